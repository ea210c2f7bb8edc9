"""One sequence in one layer on one rank: what it keeps exactly, what it has sealed, and what its prompt has taught."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.tuning import Tuning
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import lane_width
from bitkv_dist.sealed import SealedStore


class SequenceState:
    """Exact rows [2 (K, V), HK, capacity, D] (sink tokens, then the recent window) and sealed pages."""

    def __init__(self, config: CacheConfig, shape: HeadShape, record_bytes: int, tuning: Tuning | None) -> None:
        self.length = 0
        self.page_tokens, self.recent_tokens = config.page_tokens, config.recent_tokens
        self.sink = self.sealed_end = config.sink_rounded  # tokens before sealed_end are sealed, or in the sink
        rows = config.sink_rounded + config.recent_tokens + config.page_tokens
        self.exact = torch.zeros(2, shape.kv_heads, rows, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.sealed = SealedStore(GRANULE_TOKENS // config.page_tokens, shape.kv_heads, record_bytes, shape.device)
        self.prompt: torch.Tensor | None = None  # [2, HK, T, D] during an exact prefill
        self.tuning = tuning
        self.probes: dict[int, torch.Tensor] = {}  # exact prefill: tokens so far -> query [HK, 1, G, D], base 2

    def sealed_at(self, length: int) -> int:
        """`sealed_end` of `length` tokens. The newest one is always exact: a step seals before it has stored its own."""
        return max(self.sink, (length - max(1, self.recent_tokens)) // self.page_tokens * self.page_tokens)

    def exact_count(self) -> int:
        """Rows of `exact` in use."""
        return min(self.length, self.sink) + max(0, self.length - self.sealed_end)

    def pages(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(global page index, record [HK, record_bytes]) of the sealed pages held here, in token order."""
        for records, valid, granules in self.granules(1):
            for place in valid[0].nonzero().flatten().tolist():
                yield granules[0] * records.shape[1] + place, records[0, place]

    def view(self, shard_nodes: int, group: int) -> View:
        """What a decode query sees here; the same in all layers of a step."""
        granules = -(-self.sealed_end // GRANULE_TOKENS)  # of all ranks
        slabs = [held for _, held in self.sealed.blocks(sys.maxsize, granules)]
        index = [granule for held in slabs for granule in held]
        place = torch.arange(0, GRANULE_TOKENS, self.page_tokens)
        start = torch.tensor(index, dtype=torch.int64)[:, None] * GRANULE_TOKENS + place
        width = lane_width(granules, shard_nodes)
        _, heads, _, dim = self.exact.shape
        valid = (start >= self.sink) & (start < self.sealed_end)
        return View(list(map(len, slabs)), index, valid, width, shard_nodes, (heads, group, dim))

    def granules(self, most: int, end: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """At most `most` granules held here at a time, in token order: their records [n, pages, HK, record_bytes], which of
        their page slots hold a page sealed before `end` (the sink's and those to come do not), bool [n, pages], and their
        global indices.
        """
        end = self.sealed_end if end is None else end
        place = torch.arange(0, GRANULE_TOKENS, self.page_tokens, device=self.exact.device)
        for records, granules in self.sealed.blocks(most, -(-end // GRANULE_TOKENS)):
            start = torch.tensor(granules, device=place.device)[:, None] * GRANULE_TOKENS + place
            yield records, (start >= self.sink) & (start < end), granules
