"""The exact keys and values of one sequence's prompt in one layer, while an exact prefill walks through it.

Either every rank has them whole, exchanged once as the rounds bring them. Or each rank keeps its own granules, and every round
gathers what its queries see, some KV heads at a time: less memory for more exchange. Attention is given the same numbers both
ways, and KV heads do not know of each other, so the results have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.placement import owned_granules, owner

if TYPE_CHECKING:
    from bitkv_dist.cache import Shard

EXCHANGED_GRANULES = 16  # of all ranks, or one of each: what one exchange of kept rows brings


class Prompt:
    """`tokens` tokens of a sequence. rows [2 (K, V), HK, held, D]: all tokens, or this rank's granules one after the other.

    heads_at_once: KV heads that are gathered together; all of them: every rank has the prompt whole.
    """

    def __init__(self, sequence: int, tokens: int, heads: HeadShape, shard: Shard, heads_at_once: int | None = None) -> None:
        self.tokens, self._heads, self._shard = tokens, heads, shard
        self.heads_at_once = min(heads_at_once or heads.kv_heads, heads.kv_heads)
        self.whole = self.heads_at_once == heads.kv_heads or shard.ranks == 1
        self._owned: list[list[int]] = [[] for _ in range(shard.ranks)]  # granules of each rank
        for granule in range(-(-tokens // GRANULE_TOKENS)):
            self._owned[owner(granule, sequence, shard.ranks)].append(granule)
        self._slots = {granule: slot for slot, granule in enumerate(self._owned[shard.rank])}
        self.rows = self._room(tokens if self.whole else len(self._slots) * GRANULE_TOKENS)

    def _room(self, tokens: int, heads: int | None = None) -> torch.Tensor:
        shape = (2, self._heads.kv_heads if heads is None else heads, tokens, self._heads.head_dim)
        return torch.empty(shape, dtype=self._heads.dtype, device=self._heads.device)

    def put(self, start: int, kv: torch.Tensor) -> None:
        """Take in kv [2, HK, n, D] of tokens start .. start + n - 1, which lie in one granule."""
        if not self.whole:
            start = self._slots[start // GRANULE_TOKENS] * GRANULE_TOKENS + start % GRANULE_TOKENS
        self.rows[:, :, start : start + kv.shape[2]] = kv

    def head_groups(self) -> Iterator[slice]:
        """The KV heads that are attended to together."""
        step = self._heads.kv_heads if self.whole else self.heads_at_once
        for first in range(0, self._heads.kv_heads, step):
            yield slice(first, min(first + step, self._heads.kv_heads))

    def read(self, start: int, stop: int, heads: slice = slice(None)) -> torch.Tensor:
        """[2, heads, stop - start, D] of tokens start .. stop - 1; collective unless `whole`."""
        if self.whole or stop <= start:
            return self.rows[:, heads, start : max(start, stop)] if self.whole else self.rows[:, heads, :0]
        first, last = start // GRANULE_TOKENS, -(-stop // GRANULE_TOKENS)
        wanted = [[granule for granule in own if first <= granule < last] for own in self._owned]
        own = self.rows[:, heads]
        found = self._room(stop - start, own.shape[1])
        at_once = max(1, EXCHANGED_GRANULES // self._shard.ranks)
        for turn in range(0, max(map(len, wanted)), at_once):
            mine = wanted[self._shard.rank][turn : turn + at_once]
            sent = self._room(at_once * GRANULE_TOKENS, own.shape[1])
            sent[:, :, len(mine) * GRANULE_TOKENS :] = 0
            for place, granule in enumerate(mine):
                place, slot = place * GRANULE_TOKENS, self._slots[granule] * GRANULE_TOKENS
                sent[:, :, place : place + GRANULE_TOKENS] = own[:, :, slot : slot + GRANULE_TOKENS]
            for theirs, received in zip(wanted, self._shard.gather(sent), strict=True):
                for place, granule in enumerate(theirs[turn : turn + at_once]):
                    begin, end = max(start, granule * GRANULE_TOKENS), min(stop, (granule + 1) * GRANULE_TOKENS)
                    shift = place * GRANULE_TOKENS - granule * GRANULE_TOKENS
                    found[:, :, begin - start : end - start] = received[:, :, begin + shift : end + shift]
            del sent, received  # before the next ones come
        return found

    def pieces(self, start: int, stop: int, most: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first token, rows [2, HK, n, D]), n <= most, of what is held here of tokens start .. stop - 1."""
        if self.whole:
            for first in range(start, stop, most):
                yield first, self.rows[:, :, first : min(first + most, stop)]
            return
        for granule, slot in self._slots.items():
            begin, end = max(start, granule * GRANULE_TOKENS), min(stop, (granule + 1) * GRANULE_TOKENS)
            shift = (slot - granule) * GRANULE_TOKENS
            for first in range(begin, end, most):
                yield first, self.rows[:, :, first + shift : min(first + most, end) + shift]

    def granule_keys(self, granules: Sequence[int]) -> torch.Tensor:
        """The keys of granules that this rank owns, [n, HK, 512, D]; zeros beyond the prompt's end."""
        parts = []
        for granule in granules:
            first = granule if self.whole else self._slots[granule]
            tokens = min(GRANULE_TOKENS, self.tokens - granule * GRANULE_TOKENS)
            part = self.rows[0, :, first * GRANULE_TOKENS : first * GRANULE_TOKENS + tokens]
            parts.append(F.pad(part, (0, 0, 0, GRANULE_TOKENS - tokens)))
        return torch.stack(parts)


def prompt_bytes(lengths: Sequence[int], heads: tuple[int, int, int], ranks: int, heads_at_once: int) -> int:
    """What the prompts of a batch take on the fullest rank, in one layer. heads: KV heads, dimension, bytes per element."""
    kv_heads, head_dim, element = heads
    row = 2 * head_dim * element
    if heads_at_once >= kv_heads or ranks == 1:
        return sum(lengths) * kv_heads * row
    owned = [owned_granules(-(-tokens // GRANULE_TOKENS), sequence, ranks) for sequence, tokens in enumerate(lengths)]
    own = GRANULE_TOKENS * max(map(sum, zip(*owned, strict=True)))
    slots = max(1, EXCHANGED_GRANULES // ranks)
    exchanged = (ranks + 1) * slots * GRANULE_TOKENS
    return row * (own * kv_heads + (max(lengths) + exchanged) * heads_at_once)


def fitting_heads(limit_bytes: float | None, lengths: Sequence[int], heads: tuple[int, int, int], ranks: int) -> int:
    """How many KV heads to gather at once: all, or as many as fit. ValueError where not even one does."""
    kv_heads = heads[0]
    if limit_bytes is None:
        return kv_heads
    for count in range(kv_heads, 0, -1):
        least = prompt_bytes(lengths, heads, ranks, count)
        if least <= limit_bytes:
            return count
    least = min(least, prompt_bytes(lengths, heads, ranks, kv_heads))
    rule = f"keys and values of one layer take at least {math.ceil(least / 1e6) / 1e3:g} GB on a rank"
    remedy = "give that, more sequence ranks, or --prefill packed" if kv_heads > 1 else "give that, or --prefill packed"
    raise ValueError(f"generate.prefill_memory_gb {limit_bytes / 1e9:g}: {rule}; {remedy}")
