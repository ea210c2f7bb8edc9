"""Scan words, refine where it matters: a tailored page, and behind it rotated bit planes of what its words leave over.

Every token's scores and values are those of its words, as codec tailored reads them. The tokens that carry the attention by
these scores, chosen as codec planes chooses them, also take the planes: what words leave over has a tenth to a quarter of a
vector's energy, so few bits go far. words_cpu.py has the form with kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount, make_codec
from bitkv_dist.codec.planes import TAIL_CORRECTION, make_selection
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import exp2, fold_sum
from bitkv_dist.partial import Partial


class WordedCodec(TailoredCodec):
    """The words count as the first bit of keys and values, `below` codes the others."""

    unserved = "codec tailored with planes"

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        bits = {"key_bits": config.key_bits - 1, "value_bits": config.value_bits - 1, "scan_bits": None, "refine": None}
        planes = replace(config, codec="planes", calibration=None, calibration_digest=None, layers=(), **bits)
        self.below = make_codec(planes, heads, layer)
        self.words_bytes = self.record_bytes
        self.record_bytes += self.below.record_bytes
        fields, bits = self.below.layout.fields, (self.below.config.key_bits, self.below.config.value_bits)
        self.scanned_bits = 8 * (self.words_bytes + sum(fields[f"{side}centroid"].bytes for side in "KV"))  # of a page, KV head
        self.refined_bits = sum(each * heads.head_dim + 16 for each in bits)  # of a token
        self.selection = make_selection(config, heads.device)
        if self.correction is not None:
            self.correction = self.correction * TAIL_CORRECTION

    @property
    def rebuilt(self) -> int:
        """Words and planes of both sides."""
        return 14 * self.heads.head_dim

    def encode(self, k: torch.Tensor, v: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        records = super().encode(k, v, pages)
        left = (x.float() - words for x, words in zip((k, v), super().decode(records), strict=True))
        records[..., self.words_bytes :] = self.below.encode(*left)
        return records

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = zip(super().decode(records), self.below.decode(records[..., self.words_bytes :]), strict=True)
        k, v = (words + left for words, left in both)
        return k, v

    def attend(self, query: torch.Tensor, records: torch.Tensor, page_valid: torch.Tensor, choice: None = None,
               granules: torch.Tensor | None = None, page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        count, pages = len(records), int(page_valid.sum())
        if records.shape[0] * records.shape[2] == 1:  # a lone matrix product may be split among threads: see attend_dense
            records, page_valid = (x.expand(2, *x.shape[1:]) for x in (records, page_valid))
        words, left = self.parts(records)
        scores, chosen = self.entering(query, words[0], left[0], records, page_valid)
        m = scores.amax(-1)
        p = exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1))
        o = (p.flatten(2, 3) @ words[1] + (p * chosen).flatten(2, 3) @ left[1]).unflatten(-2, query.shape[1:3])
        if page_mass is not None:
            page_mass.copy_(fold_sum(p.unflatten(-1, (page_valid.shape[1], self.tokens)))[:count])
        reads = self.count_reads(pages, query.shape[1], int(chosen[:count].any(3).sum()))
        return Partial(m, fold_sum(p), o).rows(slice(0, count)), reads

    def parts(self, records: torch.Tensor) -> list[list[torch.Tensor]]:
        """Keys and values [n, HK, T, D] of words, and what planes add to them."""
        both = super().decode(records), self.below.decode(records[..., self.words_bytes :])
        return [[x.transpose(1, 2).flatten(2, 3) for x in of] for of in both]

    def entering(self, query: torch.Tensor, words: torch.Tensor, left: torch.Tensor, records: torch.Tensor,
                 page_valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores that enter the softmax, [n, HK, Q, G, T], and whose tokens are chosen; words and left: of the keys."""
        valid = page_valid.repeat_interleave(self.tokens, 1)
        scores = torch.where(valid[:, None, None, None], dots(*self.scored(query, words, records)), -math.inf)
        chosen = reference.select(scores, valid.sum(1), self.selection)
        return torch.where(chosen, dots(query, words + left), scores), chosen

    def count_reads(self, pages: int, queries: int, refined: int) -> ReadCount:
        """Words, scales and planes' centroids of every page for each query; planes and their scales of the `refined` tokens,
        which count once per KV head and query."""
        pages = pages * self.heads.kv_heads * queries
        bits, tokens = pages * self.scanned_bits + refined * self.refined_bits, pages * self.tokens
        return ReadCount(bits, tokens * self.heads.head_dim * 2, tokens, refined)


def dots(query: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Queries [HK, Q, G, D] with keys [n, HK, T, D]: [n, HK, Q, G, T]."""
    return (query.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(-2, query.shape[1:3])
