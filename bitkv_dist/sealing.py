"""What a layer of the packed cache keeps of each sequence: its exact rows, and pages that are sealed as they grow old.

A token is exact while it is in the sink pages or in the recent window; a page is sealed, once, when it is complete and older
than the window. Which pages are sealed is a function of the length alone, so the bytes do not depend on how the tokens arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.codec.interface import make_codec
from bitkv_dist.eviction import Evictor
from bitkv_dist.sequence import SequenceState
from bitkv_dist.shortage import needing

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache

PAGES_AT_ONCE = 32  # pages that are encoded together: sealing a long prompt makes no copy of it


def digest(record: torch.Tensor) -> int:
    """64-bit BLAKE2b of a page record uint8 [record_bytes] of one KV head."""
    return int.from_bytes(hashlib.blake2b(record.cpu().contiguous().numpy().tobytes(), digest_size=8).digest(), "little")


class SealingLayer:
    """One layer's exact rows and sealed pages of all sequences."""

    def __init__(self, cache: PackedCache, index: int) -> None:
        self.cache, self.index = cache, index
        self.codec = make_codec(cache.config.for_layer(index), cache.heads, index)
        with needing(f"the exact windows of layer {index}"):
            self.states = [
                SequenceState(cache.config, cache.heads, self.codec.record_bytes, self.codec.tuning(), self.codec.joined)
                for _ in range(cache.sequences)
            ]
        self.audited: dict[tuple[int, int, int], int] = {}  # (sequence, slot, local KV head) -> digest, of pages of other ranks
        self.evictor = Evictor(cache.config, cache.shard, cache.heads.device)

    def extend(self, sequence: int, kv: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Append kv [2, HK, n, D]; returns the rows [2, HK, .., D] that the n queries see exactly (sink, recent window and the
        n tokens), and how many of them count."""
        state = self.states[sequence]
        if kv.shape[2] > 1:
            rows = self.seal_due(sequence, state.length + 1, state.exact[:, :, : state.exact_count()])
            state.length += kv.shape[2]
            return torch.cat((rows, kv), dim=2), rows.shape[2] + kv.shape[2]
        row = self.make_room(sequence)
        state.exact[:, :, row : row + 1] = kv
        return state.exact, row + 1

    def make_room(self, sequence: int) -> int:
        """Seal what is due before one more token and count it; the row of `exact` that it takes."""
        state = self.states[sequence]
        if state.sealed_at(state.length + 1) != state.sealed_end:
            self.keep(sequence, self.seal_due(sequence, state.length + 1, state.rows()))
        state.length += 1
        return state.exact_count() - 1

    def settle(self, sequence: int, rows: torch.Tensor) -> None:
        """Seal what a chunk has made due, and keep the rest of its exact rows [2, HK, count, D]."""
        self.keep(sequence, self.seal_due(sequence, self.states[sequence].length, rows))

    def seal_due(self, sequence: int, length: int, rows: torch.Tensor) -> torch.Tensor:
        """Seal the pages due at `length` tokens; rows [2, HK, count, D] start with the sink. Returns those that stay exact."""
        state, sink = self.states[sequence], self.cache.config.sink_rounded
        end = state.sealed_at(length)
        count = end - state.sealed_end
        if count == 0:
            return rows
        at_once = PAGES_AT_ONCE * state.page_tokens
        if state.table is not None:
            self.evictor.place(state, sequence, range(state.sealed_end // state.page_tokens, end // state.page_tokens))
        for start in range(0, count, at_once):
            some = rows[:, :, sink + start : sink + min(start + at_once, count)]
            self.seal(sequence, state.sealed_end + start, some)
        state.sealed_end = end
        return torch.cat((rows[:, :, :sink], rows[:, :, sink + count :]), dim=2)

    def seal(self, sequence: int, first_token: int, rows: torch.Tensor) -> None:
        """Encode the pages that this rank owns of rows [2, HK, n * P, D], whole pages from first_token on."""
        page_tokens = self.cache.config.page_tokens
        pages = rows.unflatten(2, (-1, page_tokens)).transpose(1, 2)  # [2, n, HK, P, D]
        first = first_token // page_tokens
        numbers = list(range(first, first + pages.shape[1]))
        self.check_finite(pages, numbers)
        wanted = self.wanted(sequence, numbers)
        if not wanted:
            return
        own = [number - first for number in wanted]
        place = [wanted] if self.codec.positional else []
        self.store(sequence, wanted, self.codec.encode(pages[0, own], pages[1, own], *place))

    def wanted(self, sequence: int, numbers: Sequence[int]) -> list[int]:
        """Those of these pages that are encoded here: this rank's, and with an audit all; of those that are kept."""
        state, per_granule = self.states[sequence], GRANULE_TOKENS // self.cache.config.page_tokens
        owns, audit = self.cache.shard.owns, self.cache.audit
        return [page for page in numbers if any(audit or owns(slot // per_granule, sequence) for slot in state.slots_of(page))]

    def store(self, sequence: int, numbers: Sequence[int], records: torch.Tensor) -> None:
        """Keep the records [n, HK, record_bytes] of these pages, or, of slots of other ranks, their digests."""
        state, per_granule = self.states[sequence], GRANULE_TOKENS // self.cache.config.page_tokens
        for number, record in zip(numbers, records, strict=True):
            for slot, heads in state.slots_of(number).items():
                granule, place = divmod(slot, per_granule)
                if self.cache.shard.owns(granule, sequence):
                    with needing(f"more sealed pages of layer {self.index}"):
                        page = state.sealed.page(granule, place)
                    page[heads] = record[heads]
                elif self.cache.audit:
                    self.audited.update({(sequence, slot, head): digest(record[head]) for head in heads})

    def check_finite(self, pages: torch.Tensor, numbers: Sequence[int]) -> None:
        """pages [2, n, HK, P, D]; numbers: their global indices."""
        if not torch.isfinite(pages).all():
            side, page, place = (~torch.isfinite(pages)).any(dim=(2, 4)).nonzero()[0].tolist()
            token = numbers[page] * self.cache.config.page_tokens + place
            raise FloatingPointError(f"layer {self.index}, token {token}: {('key', 'value')[side]} is not finite")

    def keep(self, sequence: int, rows: torch.Tensor) -> None:
        self.states[sequence].exact[:, :, : rows.shape[2]] = rows
