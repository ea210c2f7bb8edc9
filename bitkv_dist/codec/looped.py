"""Loop-anchored residuals (ResidualQuant, arXiv 2610.10381) for models that run the same layers several times.

The last loop's keys and values, 4-bit bit planes, are the anchor A. An earlier loop stores of each token and KV head how much
of the anchor it is, s = <X, A> / <A, A>, and what that leaves, X - s A, rotated, in 2 bits. A is the anchor *as stored* and s
is rounded before the residual is taken, so that neither's error adds to the residual's: what is lost of X is what the 2 bits
lose of the residual. RoPE turns all loops' keys of a token alike, so s is the same before and after it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.exact import DenseAttention
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import safe_divide, to_half, tree_sum
from bitkv_dist.partial import Partial

ANCHOR_BITS = 4


def anchor_of(layer: int, heads: HeadShape) -> int:
    """The cache layer of the last loop that runs the weights of `layer`."""
    stack = heads.layers // heads.loops
    return heads.layers - stack + layer % stack


def planes_config(config: CacheConfig, bits: int) -> CacheConfig:
    return replace(config, codec="planes", key_bits=bits, value_bits=bits)


def shares(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """fp16 [...] of the least squares fit x ~ s * anchor of each vector [..., D] fp32; 0 where the anchor is 0."""
    return to_half(safe_divide(tree_sum(x * anchor, -1), tree_sum(anchor * anchor, -1)))


class LoopedCodec(DenseAttention):
    """A layer of an earlier loop. `encode` takes its anchor's records too; all that reads takes records [..., own bytes +
    anchor's bytes], the anchor's behind its own.

    Attention turns no key back: a query is turned into both rotated spaces and meets s A and X - s A there, side by side as 2 D
    channels; so do the values, whose weighted sums are turned back once per query and granule.
    """

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.heads, self.tokens = heads, config.page_tokens
        self.anchor = PlanesCodec(planes_config(config, ANCHOR_BITS), heads, anchor_of(layer, heads))
        self.residual = PlanesCodec(planes_config(config, config.key_bits), heads, layer)
        fields = ((f"{side}share", torch.float16, (self.tokens,)) for side in "KV")
        self.layout = RecordLayout(("residual", torch.uint8, (self.residual.record_bytes,)), *fields)
        self.record_bytes = self.layout.bytes
        self.variance = 0.5 * math.log(2) * self.residual.noise[config.key_bits, config.key_bits]

    @property
    def rebuilt(self) -> int:
        """Twice the channels of other dense codecs."""
        return 10 * self.heads.head_dim

    def encode(self, k: torch.Tensor, v: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """k, v [pages, HK, P, D], anchors uint8 [pages, HK, anchor's bytes] -> uint8 [pages, HK, record_bytes]."""
        left, fields = [], {}
        for side, x, anchor in zip("KV", (k.float(), v.float()), self.anchor.decode(anchors), strict=True):
            fields[f"{side}share"] = share = shares(x, anchor)
            left.append(x - share.float().unsqueeze(-1) * anchor)
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        return self.layout.write(records, residual=self.residual.encode(*left), **fields)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (self.turned_back(self.rotated(records, side), side, (1,)) for side in "KV")
        return k, v

    def rotated(self, records: torch.Tensor, side: str) -> torch.Tensor:
        """(s A, X - s A) of keys or values as they were rotated, fp32 [..., HK, P, 2 D]."""
        planes = self.anchor.load(records[..., self.record_bytes :], side), self.residual.load(self.own(records), side)
        codecs = self.anchor, self.residual
        anchor, left = (reference.decode_rotated(z, *codec.depth(side), side) for z, codec in zip(planes, codecs, strict=True))
        return torch.cat((self.layout.view(records, f"{side}share").float().unsqueeze(-1) * anchor, left), -1)

    def own(self, records: torch.Tensor) -> torch.Tensor:
        """The residuals' records."""
        return self.layout.view(records, "residual")

    def turned_back(self, z: torch.Tensor, side: str, between: tuple[int, ...]) -> torch.Tensor:
        """The sum of both halves of z [..., HK, *between, 2 D], out of their rotated spaces: [..., HK, *between, D]."""
        signs = (codec.signs[side].view(-1, *between, self.heads.head_dim) for codec in (self.anchor, self.residual))
        anchor, left = (reference.rotate_back(half, sign) for half, sign in zip(z.chunk(2, -1), signs, strict=True))
        return anchor + left

    def prepare(self, q: torch.Tensor, tuning: None = None) -> torch.Tensor:
        """[HK, Q, G, 2 D + 1]: the query in both spaces, and what the log-normal correction (see codec/planes.py) of a
        residual's score takes for each square of its scale."""
        turned = (reference.rotate(q, codec.signs["K"][:, None, None, :]) for codec in (self.anchor, self.residual))
        return torch.cat((*turned, self.variance * q.square().sum(-1, keepdim=True)), -1)

    def attend(self, query: torch.Tensor, records: torch.Tensor, page_valid: torch.Tensor, choice: None = None,
               granules: torch.Tensor | None = None, page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        found, count = super().attend(query, records, page_valid, page_mass=page_mass)
        return found._replace(o=self.turned_back(found.o, "V", (1, 1))), count

    def count_reads(self, pages: int, queries: int, refined: int = 0) -> ReadCount:
        """The anchor's records too."""
        count = super().count_reads(pages, queries)
        count.bits += pages * self.heads.kv_heads * queries * self.anchor.record_bytes * 8
        return count

    def vectors(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.residual.load(self.own(records), "K").full.float().unsqueeze(-1)
        return torch.cat((self.rotated(records, "K"), scale * scale), -1), self.rotated(records, "V")
