"""Pages coded by codebooks that a calibration has made, keys as they were before RoPE.

Keys are rebuilt from looked-up words and then turned by RoPE, once per KV head. The other exact way, tables of query times word
per group, would have to keep the turning out of the table (a position turns each pair by another angle): as many products per
token and query head as there are channels, after as many look-ups. Rebuilding costs two products per channel for the turn and
one per channel and query head, and reads each word once for all heads of a group: from two query heads per KV head on it is
cheaper. For values, which nobody turns, summing the weights of equal words first would save products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.codebooks import LayerBooks
from bitkv_dist.codec.exact import DenseAttention
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.codec.rope import Rope, page_numbers

FieldShape = tuple[str, torch.dtype, tuple[int, ...]]


class BookCodec(DenseAttention):
    """Codebook pages; see interface.Codec. A page's record also holds its global index, which decoding turns keys by.

    With `correction`, scores gain half their variance: what the words lose of a channel, as the calibration measured it, times
    the query's energy there (a pair's two channels alike, so that RoPE does not matter).
    """

    positional = True

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int, *fields: FieldShape) -> None:
        """fields: further ones of the record."""
        self.heads, self.tokens = heads, config.page_tokens
        self.apart = config.eviction == "heavy" and not self.joined  # the KV heads of a slot may hold different pages
        learnt = LayerBooks(config, heads, layer)
        self.books, self.book_bytes = learnt.books, learnt.bytes
        self.rope = Rope(learnt.inv_freq, learnt.origin.rope_scaling, self.tokens, heads.device)
        self.correction = None
        if config.correction:
            lost = learnt.lost * self.rope.scaling**2  # [HK, D]
            self.correction = (0.5 * math.log(2) * lost)[:, None, None]
            self.book_bytes += self.correction.nbytes
        codes = ((f"{side}codes", torch.uint8, (*self.books[side].code_shape, self.tokens // 8)) for side in "KV")
        self.layout = RecordLayout(("page", torch.int32, (1,)), *codes, *fields)
        self.record_bytes = self.layout.bytes

    @property
    def rebuilt(self) -> int:
        """As of other dense codecs, and the bits and numbers of words."""
        return 8 * self.heads.head_dim

    def encode(self, k: torch.Tensor, v: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        numbers = page_numbers(pages, k.device)
        k, fields = self.split(self.rope.undo(k.float(), numbers))
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        codes = {"Kcodes": self.books["K"].encode(k), "Vcodes": self.books["V"].encode(v.float())}
        return self.layout.write(records, page=numbers[:, None, None], **codes, **fields)

    def split(self, k: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Keys fp32 [pages, HK, P, D] before RoPE -> what the books code of them, and the other fields of the record."""
        return k, {}

    def scales(self, records: torch.Tensor) -> torch.Tensor:
        """uint8 [..., HK, record_bytes] -> what `split` took out of the keys, fp32, broadcastable to [..., HK, P]."""
        return torch.ones(1, 1, device=records.device)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (self.books[side].decode(self.layout.view(records, f"{side}codes")) for side in "KV")
        k, pages = k * self.scales(records).unsqueeze(-1), self.layout.view(records, "page")[..., 0].long()
        if self.apart:
            return self.rope.apply(k.unsqueeze(-3), pages).squeeze(-3), v
        return self.rope.apply(k, pages[..., 0]), v

    def scored(self, query: torch.Tensor, k: torch.Tensor, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction as one more channel: the query's share of it times the square of the token's scale."""
        if self.correction is None:
            return query, k
        scale = self.scales(records).expand(*records.shape[:-1], self.tokens).transpose(1, 2).flatten(2)  # [n, HK, pages * P]
        variance = (query.square() * self.correction).sum(-1, keepdim=True)
        return torch.cat((query, variance), -1), torch.cat((k, scale.square().unsqueeze(-1)), -1)
