"""Which file of a snapshot holds what of a cache.

Sealed pages of complete granules do not change any more (unless others take their slots, see eviction.py): every rank puts
them in files of their own, so many granules of one sequence each, that the next snapshot can take over as they are. What is
left goes into one file more: the pages after them, the exact windows, and what the prompts have taught.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.snapshot import tensors as parts

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache
    from bitkv_dist.sequence import SequenceState

# Granules of each rank in a file of sealed pages. Fewer: less that is written again until a file is full; more: fewer files.
FILE_GRANULES = 2
FILE_BYTES = 256 << 20  # of a rank's file, if more than one layer is in it; as much is copied at a time


@dataclass(frozen=True)
class Piece:
    """Some layers of the complete granules in a range of one sequence; sequence None: of what all sequences have besides."""

    layers: range
    sequence: int | None = None
    granules: range | None = None

    def name(self, rank: int) -> str:
        layers = f"rank{rank:04d}-layers{self.layers[0]:04d}-{self.layers[-1]:04d}"
        if self.sequence is None:
            return f"{layers}.safetensors"
        return f"{layers}-sequence{self.sequence:04d}-granules{self.granules[0]:06d}-{self.granules[-1]:06d}.safetensors"

    def slots(self, cache: PackedCache) -> Iterator[tuple[int, int, list[int]]]:
        """(layer, sequence, sealed page slots) of what this rank holds of it."""
        for layer in self.layers:
            for sequence, state in enumerate(cache.layers[layer].states):
                if self.sequence is None:
                    first = width(cache) * files_of(cache, state)
                    yield layer, sequence, parts.slots(state, range(first, -(-state.held_end // GRANULE_TOKENS)))
                elif self.sequence == sequence:
                    yield layer, sequence, parts.slots(state, self.granules)

    def writes(self, cache: PackedCache) -> list[list[int]]:
        """Of a range of granules: how many pages were written so far in each that is held here, layer by layer."""
        stores = [cache.layers[layer].states[self.sequence].sealed for layer in self.layers]
        return [[store.writes[granule] for granule in store.within(self.granules)] for store in stores]


def pieces(cache: PackedCache, layers: list[range]) -> list[Piece]:
    """The same on every rank: the pieces of the first layers, then those of the next."""
    found, wide = [], width(cache)
    for some in layers:
        for sequence, state in enumerate(cache.layers[some[0]].states):
            starts = range(0, wide * files_of(cache, state), wide)
            found += [Piece(some, sequence, range(start, start + wide)) for start in starts]
        found.append(Piece(some))
    return found


def width(cache: PackedCache) -> int:
    """Granules, of all ranks, in a range."""
    return FILE_GRANULES * cache.shard.ranks


def files_of(cache: PackedCache, state: SequenceState) -> int:
    """How many ranges of complete granules a sequence has."""
    return state.held_end // (GRANULE_TOKENS * width(cache))


def layer_bytes(cache: PackedCache) -> list[int]:
    """What a file of one layer can have at most on this rank, whatever the lengths: while a cache grows, its files stay the
    same."""
    pages = FILE_GRANULES * GRANULE_TOKENS // cache.config.page_tokens
    return [
        sum(pages * cache.heads.kv_heads * layer.codec.record_bytes + state.exact.nbytes for state in layer.states)
        for layer in cache.layers
    ]


def bounded(sizes: list[list[int]]) -> list[range]:
    """Consecutive items whose bytes on every rank (sizes[rank][item]) stay below FILE_BYTES, or single ones."""
    found, first, total = [], 0, 0
    largest = [max(item) for item in zip(*sizes, strict=True)]
    for item, size in enumerate(largest):
        if item > first and total + size > FILE_BYTES:
            found.append(range(first, item))
            first, total = item, 0
        total += size
    return [*found, range(first, len(largest))]
