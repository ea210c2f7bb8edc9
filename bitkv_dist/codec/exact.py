"""No compression: pages in the model's dtype, sharded and merged like every other codec. The baseline that answers as the model
does."""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.kernels import reference
from bitkv_dist.partial import Partial


class DenseAttention:
    """Attention of codecs that are read by decoding whole pages: needs `decode`, `record_bytes`, `heads`, `tokens`."""

    heads: HeadShape
    tokens: int
    record_bytes: int
    chooses_globally = False
    fused = takes_tables = positional = joined = False
    book_bytes = 0

    @property
    def rebuilt(self) -> int:
        """Keys and values, their copies by head, and what decoding them takes."""
        return 5 * self.heads.head_dim

    def tuning(self) -> None:
        return None

    def prepare(self, q: torch.Tensor, tuning: None = None) -> torch.Tensor:
        return q

    def choice(self, tuning: None, exact: Partial) -> None:
        return None

    def attend(
        self,
        query: torch.Tensor,
        records: torch.Tensor,
        page_valid: torch.Tensor,
        choice: None = None,
        granules: torch.Tensor | None = None,
        page_mass: torch.Tensor | None = None,
    ) -> tuple[Partial, ReadCount]:
        k, v = (x.transpose(1, 2).flatten(2, 3) for x in self.vectors(records))  # [n, HK, pages * P, D]
        valid = page_valid.repeat_interleave(self.tokens, 1)[:, None, None, None, :]
        part = Partial(*reference.attend_dense(*self.scored(query, k, records), v, valid, page_mass))
        return part, self.count_reads(int(page_valid.sum()), query.shape[1])

    def count_reads(self, pages: int, queries: int, refined: int = 0) -> ReadCount:
        """Whole records of so many sealed pages for each query; nothing is refined."""
        pages = pages * self.heads.kv_heads * queries
        return ReadCount(pages * self.record_bytes * 8, pages * self.tokens * self.heads.head_dim * 2, pages * self.tokens)

    def vectors(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as attention takes them."""
        return self.decode(records)

    def scored(self, query: torch.Tensor, k: torch.Tensor, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [HK, Q, G, D'] and keys [n, HK, pages * P, D'] whose products are the scores."""
        return query, k

    def finish(self, partial: Partial) -> Partial:
        return partial


class ExactCodec(DenseAttention):
    """Keys and values as they came; see interface.Codec."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.heads, self.tokens = heads, config.page_tokens
        self.layout = RecordLayout(*((side, heads.dtype, (self.tokens, heads.head_dim)) for side in "KV"))
        self.record_bytes = self.layout.bytes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        return self.layout.write(records, K=k, V=v)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layout.view(records, "K").float(), self.layout.view(records, "V").float()
