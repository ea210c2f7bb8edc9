"""One sequence in one layer on one rank: what it keeps exactly, what it has sealed, and what its prompt has taught."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.tuning import Tuning
from bitkv_dist.eviction import PageTable
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import lane_width
from bitkv_dist.prompt import Prompt
from bitkv_dist.sealed import SealedStore


def exact_rows(config: CacheConfig) -> int:
    """Rows that a sequence keeps room for in the model's dtype: sink pages, recent window, and the page that fills up."""
    return config.sink_rounded + config.recent_tokens + config.page_tokens


def sealed_end(config: CacheConfig, length: int) -> int:
    """Tokens before it are sealed, or in the sink, when a sequence has `length` tokens. The newest one is always exact: a step
    seals before it has stored its own."""
    return max(config.sink_rounded, (length - max(1, config.recent_tokens)) // config.page_tokens * config.page_tokens)


def held_end(config: CacheConfig, length: int) -> int:
    """Where the page slots in use end, counted in tokens from the sink on: `sealed_end`, less what was evicted."""
    pages = (sealed_end(config, length) - config.sink_rounded) // config.page_tokens
    return config.sink_rounded + config.kept_pages(pages) * config.page_tokens


class SequenceState:
    """Exact rows [2 (K, V), HK, capacity, D] (sink tokens, then the recent window) and sealed pages."""

    def __init__(self, config: CacheConfig, shape: HeadShape, record_bytes: int, tuning: Tuning | None,
                 together: bool = False) -> None:
        """together: the KV heads keep the same pages, where pages are evicted."""
        self.length = 0
        self.config, self.page_tokens = config, config.page_tokens
        self.sink = self.sealed_end = config.sink_rounded  # tokens before sealed_end are sealed, or in the sink
        room = (2, shape.kv_heads, exact_rows(config), shape.head_dim)
        self.exact = torch.zeros(room, dtype=shape.dtype, device=shape.device)
        self.sealed = SealedStore(GRANULE_TOKENS // config.page_tokens, shape.kv_heads, record_bytes, shape.device)
        self.reserved_granules = 0  # of all ranks, that room was announced for
        self.prompt: Prompt | None = None  # during an exact prefill
        self.tuning = tuning
        self.table = None if config.eviction == "none" else PageTable(config, shape.kv_heads, together)
        self.received: torch.Tensor | None = None  # during an exact prefill: see eviction.prompt_mass
        # Of an exact prefill: after how many tokens a query teaches, and those queries [HK, 1, G, D] in base 2.
        self.probe_ends: list[int] = []
        self.probes: dict[int, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Storage of all that it keeps, slack of preallocation included."""
        kept = self.sealed.bytes + self.exact.untyped_storage().nbytes()
        return kept if self.table is None else kept + self.table.bytes

    def sealed_at(self, length: int) -> int:
        """`sealed_end` of `length` tokens."""
        return sealed_end(self.config, length)

    def held_at(self, length: int) -> int:
        """`held_end` of `length` tokens."""
        return held_end(self.config, length)

    @property
    def held_end(self) -> int:
        """Slots before it hold a sealed page, but for the sink's."""
        return self.sealed_end if self.table is None else self.sink + len(self.table) * self.page_tokens

    def page_in(self, slot: int, head: int) -> int:
        """The global index of the page that a local KV head keeps in a slot."""
        return slot if self.table is None else int(self.table.pages[slot - self.sink // self.page_tokens, head])

    def slots_of(self, page: int) -> dict[int, list[int]]:
        """Where a sealed page is kept: slot -> local KV heads."""
        if self.table is None:
            return {page: list(range(self.exact.shape[1]))}
        return {self.sink // self.page_tokens + slot: heads for slot, heads in self.table.slots(page).items()}

    def exact_count(self) -> int:
        """Rows of `exact` in use."""
        return min(self.length, self.sink) + max(0, self.length - self.sealed_end)

    def rows(self) -> torch.Tensor:
        """The tokens that are kept exactly: [2, HK, count, D], sink first."""
        return self.exact[:, :, : self.exact_count()]

    def restore(self, length: int, rows: torch.Tensor) -> None:
        """Take in `rows` of a state of `length` tokens, whose sealed pages are in place."""
        self.length, self.sealed_end = length, self.sealed_at(length)
        self.rows().copy_(rows)

    def pages(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(slot, record [HK, record_bytes]) of the sealed pages held here; without eviction a slot is a global page."""
        for records, valid, granules in self.granules(1):
            for place in valid[0].nonzero().flatten().tolist():
                yield granules[0] * records.shape[1] + place, records[0, place]

    def view(self, shard_nodes: int, group: int) -> View:
        """What a decode query sees here; the same in all layers of a step."""
        granules = -(-self.held_end // GRANULE_TOKENS)  # of all ranks
        slabs = [held for _, held in self.sealed.blocks(sys.maxsize, granules)]
        index = [granule for held in slabs for granule in held]
        place = torch.arange(0, GRANULE_TOKENS, self.page_tokens)
        start = torch.tensor(index, dtype=torch.int64)[:, None] * GRANULE_TOKENS + place
        width = lane_width(granules, shard_nodes)
        _, heads, _, dim = self.exact.shape
        valid = (start >= self.sink) & (start < self.held_end)
        return View(list(map(len, slabs)), index, valid, width, shard_nodes, (heads, group, dim))

    def granules(
        self, most: int, end: int | None = None, modulus: int = 1, residue: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """At most `most` granules held here at a time, in token order, of those congruent to `residue`: their records
        [n, pages, HK, record_bytes], which of their page slots hold a page and lie before `end` (the sink's and those to come
        do not), bool [n, pages], and their global indices.
        """
        end = self.held_end if end is None else end
        place = torch.arange(0, GRANULE_TOKENS, self.page_tokens, device=self.exact.device)
        for records, granules in self.sealed.blocks(most, -(-end // GRANULE_TOKENS), modulus, residue):
            start = torch.tensor(granules, device=place.device)[:, None] * GRANULE_TOKENS + place
            yield records, (start >= self.sink) & (start < end), granules
