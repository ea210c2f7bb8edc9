"""Round-to-nearest between minimum and maximum, the honest baseline: keys per channel over groups of tokens, values per token
over groups of channels (the scheme of KIVI, Liu et al., ICML 2024), an fp16 scale and an fp16 minimum per group, no
rotation."""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.exact import DenseAttention
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.kernels.reference import to_half


class MinMaxCodec(DenseAttention):
    """INT2, INT4 or INT8 pages; see interface.Codec."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.heads, self.tokens = heads, config.page_tokens
        self.bits = {"K": config.key_bits, "V": config.value_bits}
        dim = heads.head_dim
        self.value_group = min(config.value_group_channels, dim)
        self.key_group = config.key_group_tokens
        shapes = {"K": (self.tokens // self.key_group, dim), "V": (self.tokens, dim // self.value_group)}
        self.layout = RecordLayout(
            *((side + "codes", torch.uint8, (self.tokens, dim * self.bits[side] // 8)) for side in "KV"),
            *((side + name, torch.float16, shapes[side]) for side in "KV" for name in ("scale", "low")),
        )
        self.record_bytes = self.layout.bytes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        for side, x in (("K", k), ("V", v)):
            groups, axis = self.grouped(x.float(), side)
            low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
            top = (1 << self.bits[side]) - 1
            scale, low = to_half((high - low) / torch.full((), top, dtype=low.dtype, device=low.device)), to_half(low)
            step = torch.where(scale == 0, 1.0, scale.float())
            code = torch.round((groups - low.float()) / step).clamp(0, top).to(torch.uint8).reshape(x.shape)
            self.layout.write(
                records,
                **{
                    side + "codes": pack_fields(code, self.bits[side]),
                    side + "scale": scale.squeeze(axis),
                    side + "low": low.squeeze(axis),
                },
            )
        return records

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.restore(records, "K"), self.restore(records, "V")

    def restore(self, records: torch.Tensor, side: str) -> torch.Tensor:
        codes, scale, low = (self.layout.view(records, side + name) for name in ("codes", "scale", "low"))
        groups, axis = self.grouped(unpack_fields(codes, self.bits[side]).float(), side)
        x = groups * scale.float().unsqueeze(axis) + low.float().unsqueeze(axis)
        return x.reshape(*records.shape[:-1], self.tokens, self.heads.head_dim)

    def grouped(self, x: torch.Tensor, side: str) -> tuple[torch.Tensor, int]:
        """x [..., P, D] with the dim over which a scale is shared split off: ([..., P/g, g, D], -2) or ([..., P, D/g, g],
        -1)."""
        if side == "K":
            return x.unflatten(-2, (-1, self.key_group)), -2
        return x.unflatten(-1, (-1, self.value_group)), -1


def pack_fields(code: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., D] of 2, 4 or 8 bits -> uint8 [..., D * bits / 8], the first code in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=code.device)
    return (code.unflatten(-1, (-1, 8 // bits)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_fields`, uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
