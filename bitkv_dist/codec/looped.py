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

from bitkv_dist.codec.exact import DenseAttention
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.config import CacheConfig
from bitkv_dist.kernels.reference import safe_divide, to_half, tree_sum

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
    anchor's bytes], the anchor's behind its own."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.heads, self.tokens = heads, config.page_tokens
        self.residual = PlanesCodec(planes_config(config, config.key_bits), heads, layer)
        self.anchor = PlanesCodec(planes_config(config, ANCHOR_BITS), heads, anchor_of(layer, heads))
        shares = ((f"{side}share", torch.float16, (self.tokens,)) for side in "KV")
        self.layout = RecordLayout(("residual", torch.uint8, (self.residual.record_bytes,)), *shares)
        self.record_bytes = self.layout.bytes
        noise = self.residual.noise[config.key_bits, config.key_bits]
        self.correction = 0.5 * math.log(2) * noise if config.correction else None

    def encode(self, k: torch.Tensor, v: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """k, v [pages, HK, P, D], anchors uint8 [pages, HK, anchor's bytes] -> uint8 [pages, HK, record_bytes]."""
        left, fields = [], {}
        for side, x, anchor in zip("KV", (k.float(), v.float()), self.anchor.decode(anchors), strict=True):
            fields[f"{side}share"] = share = shares(x, anchor)
            left.append(x - share.float().unsqueeze(-1) * anchor)
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        return self.layout.write(records, residual=self.residual.encode(*left), **fields)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.residual.decode(self.layout.view(records, "residual"))
        anchors = self.anchor.decode(records[..., self.record_bytes :])
        share = (self.layout.view(records, f"{side}share").float().unsqueeze(-1) for side in "KV")
        k, v = (s * anchor + rest for s, anchor, rest in zip(share, anchors, left, strict=True))
        return k, v

    def scored(self, query: torch.Tensor, k: torch.Tensor, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-normal correction of the residual's code (see codec/planes.py) as one more channel."""
        if self.correction is None:
            return query, k
        plane = self.residual.load(self.layout.view(records, "residual"), "K")
        scale = plane.full.float().transpose(1, 2).flatten(2)  # [n, HK, pages * P]
        variance = self.correction * query.square().sum(-1, keepdim=True)
        return torch.cat((query, variance), -1), torch.cat((k, scale.square().unsqueeze(-1)), -1)
