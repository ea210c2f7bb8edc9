"""Mid-rise codes of vectors and their scales."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.sums import divide, safe_divide, tree_sum

HALF_MAX = 65504.0
SCALE_FACTORS = tuple(round(0.40 + 0.05 * i, 2) for i in range(17))


def to_half(x: torch.Tensor) -> torch.Tensor:
    """fp16 that saturates at +-65504 instead of becoming infinite."""
    return x.clamp(-HALF_MAX, HALF_MAX).half()


class Codes(NamedTuple):
    """Mid-rise codes of vectors: code uint8 [..., D]; full and scan fp16 [...], the same tensor when all planes are scanned."""

    code: torch.Tensor
    full: torch.Tensor
    scan: torch.Tensor


def quantize(z: torch.Tensor, bits: int, scan_bits: int, unbiased: bool = False) -> Codes:
    """B-bit mid-rise codes of z fp32 [..., D]: z ~ full * (code - (2^B - 1) / 2), whose top bit is sign(z).

    B = 1: full = |z|_1 / D, the least-squares scale. B >= 2: of 17 candidates fp16(f * max|z| / ((2^B - 1) / 2)) the one with
    the least squared error, ties to the smaller. scan = least-squares scale of the top S planes, whose levels are -1, +1 for
    S = 1 and code_top - (2^S - 1) / 2 otherwise. `unbiased` takes <z, z> / <z, level> for scan instead (RaBitQ, Gao and Long,
    SIGMOD 2024): right for ranking by inner product, wrong under softmax.
    """
    dim = z.shape[-1]
    z = z.movedim(-1, 0).contiguous()  # dim first: the tree then adds whole rows
    magnitude = z.abs()
    if bits == 1:
        code = (z >= 0).to(torch.uint8)
        full = to_half(divide(tree_sum(magnitude, 0), dim))
    else:
        code, full = search_scale(z, magnitude.amax(0), bits)
    if scan_bits == bits and not unbiased:
        scan = full
    elif scan_bits == 1:
        total = tree_sum(magnitude, 0)
        scan = to_half(safe_divide(tree_sum(z * z, 0), total) if unbiased else divide(total, dim))
    else:
        level = (code >> (bits - scan_bits)).float() - ((1 << scan_bits) - 1) / 2
        cross = tree_sum(z * level, 0)
        scan = to_half(safe_divide(tree_sum(z * z, 0), cross) if unbiased else cross / tree_sum(level * level, 0))
    full = scan if scan_bits == bits else full
    return Codes(code.movedim(0, -1), full, scan)


def search_scale(z: torch.Tensor, peak: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(code uint8 [D, ...], scale fp16 [...]) of z [D, ...] with the least squared error over SCALE_FACTORS."""
    half_range = ((1 << bits) - 1) / 2
    best_error = torch.full_like(peak, math.inf)
    best_code = torch.zeros_like(z)
    best_scale = torch.zeros_like(peak)
    for factor in SCALE_FACTORS:
        scale = to_half(divide(peak * factor, half_range)).float()
        cell = torch.floor(z / torch.where(scale == 0, 1.0, scale)).clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        error = cell.add(0.5).mul_(scale).sub_(z)
        error = tree_sum(error.mul_(error), 0)
        better = error < best_error
        if factor == SCALE_FACTORS[0]:
            better = torch.ones_like(better)  # an error that overflows to infinity still leaves a code and a scale
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_code = torch.where(better, cell, best_code)
    return (best_code + (1 << (bits - 1))).to(torch.uint8), best_scale.half()
