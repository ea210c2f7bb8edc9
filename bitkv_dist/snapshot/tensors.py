"""What a snapshot keeps of one sequence in one layer: named tensors [rows, HK, ..], and their digests."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS

if TYPE_CHECKING:
    from bitkv_dist.sequence import SequenceState

PAGES, EXACT, LOGITS = "pages", "exact", "logits"
MODULUS = 1 << 64


def key(layer: int, sequence: int, name: str) -> str:
    """The name of a tensor in a file."""
    return f"layer.{layer}.sequence.{sequence}.{name}"


def index_key(sequence: int) -> str:
    """int64 [n]: which page slots the rows of this sequence's `pages` are, the same in all layers; without eviction a slot is a
    global page."""
    return f"sequence.{sequence}.page_index"


def slots(state: SequenceState, granules: range) -> list[int]:
    """The page slots in use that this rank holds in some granules."""
    per_granule = GRANULE_TOKENS // state.page_tokens
    first, stop = state.sink // state.page_tokens, state.held_end // state.page_tokens
    found = []
    for granule in state.sealed.within(granules):
        found += range(max(first, granule * per_granule), min(stop, (granule + 1) * per_granule))
    return found


def records(state: SequenceState, slots: list[int]) -> torch.Tensor:
    """What is in these slots: uint8 [n, HK, record_bytes] on the CPU."""
    per_granule, heads, record_bytes = state.sealed.granule_shape
    if not slots:
        return torch.empty(0, heads, record_bytes, dtype=torch.uint8)
    return torch.stack([state.sealed.record(*divmod(slot, per_granule)) for slot in slots]).cpu()


def kept(state: SequenceState) -> dict[str, torch.Tensor]:
    """What every sequence rank has alike, on the CPU: exact rows [2, HK, count, D], and what the prompt has taught."""
    learnt = {} if state.tuning is None else state.tuning.state()
    learnt |= {} if state.table is None else state.table.state()
    return {name: tensor.cpu().contiguous() for name, tensor in ({EXACT: state.rows()} | learnt).items()}


def restore(state: SequenceState, length: int, tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `kept` for a state without tokens, whose sealed pages are in place."""
    state.restore(length, tensors[EXACT])
    if state.table is not None:
        state.table.restore(tensors)
    if state.tuning is not None:
        state.tuning.restore({name: tensor.to(state.exact.device) for name, tensor in tensors.items() if name != EXACT})


def digest_pages(records: torch.Tensor, pages: Iterable[int], first_head: int) -> int:
    """Of sealed pages uint8 [n, HK, record_bytes] with these global indices: see `digest`."""
    return digest(PAGES, records, pages, first_head)


def digest_kept(tensors: dict[str, torch.Tensor], first_head: int) -> int:
    """Of tensors [rows, HK, ..] that are no pages: see `digest`."""
    return sum(digest(name, tensor, range(len(tensor)), first_head) for name, tensor in tensors.items()) % MODULUS


def digest(name: str, tensor: torch.Tensor, rows: Iterable[int], first_head: int) -> int:
    """The 64-bit BLAKE2b digests of all tensor[i, h], [rows, HK, ..] on the CPU, added up modulo 2^64.

    Each counts with its name, its row's global index and its global head: who holds which rows and heads changes no sum.
    """
    content = tensor.contiguous().view(torch.uint8).numpy()
    described = f"{name} {tensor.dtype} {list(tensor.shape[2:])}"
    total = 0
    for row, heads in zip(rows, content, strict=True):
        for head, values in enumerate(heads, start=first_head):
            state = blake2b(f"{described} {row} {head} ".encode(), digest_size=8)
            state.update(values)
            total += int.from_bytes(state.digest(), "little")
    return total % MODULUS
