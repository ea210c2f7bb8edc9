"""Pages in stored form: encoding them, and what their bits stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.codes import quantize, to_half
from bitkv_dist.kernels.reference.layout import pack_low, pack_planes, unpack_low, unpack_planes
from bitkv_dist.kernels.reference.rotation import rotate, rotate_back
from bitkv_dist.kernels.reference.sums import tree_sum


class Plane(NamedTuple):
    """Keys or values of pages in stored form; leading dims are those of the pages and KV heads.

    planes int32 [.., S, D/4, P/8] (keys) or [.., S, P/4, D/8] (values); low uint8 [.., P, (B - S) D/8]; scan, full fp16
    [.., P]; centroid fp16 [.., D], in the rotated space.
    """

    planes: torch.Tensor
    low: torch.Tensor
    scan: torch.Tensor
    full: torch.Tensor
    centroid: torch.Tensor


def encode(x: torch.Tensor, signs: torch.Tensor, bits: int, scan_bits: int, side: str, unbiased: bool = False) -> Plane:
    """Encode whole pages x fp32 [pages, HK, P, D] with rotation signs [HK, D]; finite input only.

    The centroid is the mean of the *rotated* page, rounded to fp16; what is coded is the distance to it as stored. Rotation is
    linear, so this is R (x - c) with c rounded in the rotated space: q.c and the values' centroid then need no second rotation.
    """
    z = rotate(x, signs[:, None, :])
    centroid = to_half(tree_sum(z, -2) / x.shape[-2])
    z = z - centroid.float().unsqueeze(-2)
    code, full, scan = quantize(z, bits, scan_bits, unbiased)
    return Plane(pack_planes(code, bits, scan_bits, side), pack_low(code, bits - scan_bits), scan, full, centroid)


def levels(plane: Plane, side: str, low_bits: int) -> torch.Tensor:
    """Odd integers 2 i - (2^B - 1) of the full codes, fp32 [.., P, D]; low_bits = 0 gives those of the scanned planes."""
    code = unpack_planes(plane.planes, side)
    bits = plane.planes.shape[-3] + low_bits
    if low_bits:
        code = code * (1 << low_bits) + unpack_low(plane.low, low_bits)
    return code.mul_(2).sub_((1 << bits) - 1)


def level_unit(bits: int) -> float:
    """What one odd integer of `levels` is worth in scales: the sign plane's levels are -1, +1, all others are half-integers."""
    return 1.0 if bits == 1 else 0.5


def decode(plane: Plane, signs: torch.Tensor, bits: int, scan_bits: int, side: str) -> torch.Tensor:
    """The vectors that the full codes stand for, fp32 [.., HK, P, D], rotated back."""
    return rotate_back(decode_rotated(plane, bits, scan_bits, side), signs[:, None, :])


def decode_rotated(plane: Plane, bits: int, scan_bits: int, side: str) -> torch.Tensor:
    """The same as they were rotated."""
    z = levels(plane, side, bits - scan_bits) * (plane.full.float() * level_unit(bits)).unsqueeze(-1)
    return z + plane.centroid.float().unsqueeze(-2)
