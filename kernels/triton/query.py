"""Queries in the form that the kernels take: rotated, int8 codes with one scale per head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels import reference
from bitkv_dist.kernels.triton.numbers import ROUNDER
from bitkv_dist.kernels.triton.rotate import FACTORS, constants, log2, rotate_rows, rotation_of, tree_sum

ROWS = 4  # queries of a program
WARPS = 4


class Query(NamedTuple):
    """codes int8 and rotated fp32 [.., HK, Q, G, D], scale and norm2 fp32 [.., HK, Q, G], contiguous; base 2 (see
    reference.Query)."""

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor


@triton.jit(do_not_specialize=["count"])
def quantize_rows(q, signs, table, codes, scale, norm2, rotated, heads, count, DIM: tl.constexpr, WIDE: tl.constexpr,
                  SIZE: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Program (group, block of rows): queries of q [B * HK, count, D] in base 2, as `Query` holds them."""
    group, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    real, last = row < count, tl.minimum(row, count - 1)  # rows beyond the last repeat it
    z = rotate_rows(q + group * count * DIM, last, DIM, 1, signs + group % heads * DIM, table + FACTORS, DIM, WIDE, SIZE,
                    STEPS, ROOT)  # fmt: skip
    peak = tl.max(tl.abs(z), 1)
    step = tl.where(peak == 0, 1.0, peak)
    whole = tl.div_rn(127.0 * z, tl.broadcast_to(step[:, None], z.shape)) + ROUNDER - ROUNDER
    at = group * count + row
    d = tl.arange(0, WIDE)
    inside = real[:, None] & (d < DIM)[None, :]
    tl.store(codes + at[:, None] * DIM + d[None, :], whole.to(tl.int8), mask=inside)
    tl.store(rotated + at[:, None] * DIM + d[None, :], z, mask=inside)
    tl.store(scale + at, tl.div_rn(peak, 127.0), mask=real)
    tl.store(norm2 + at, tree_sum(z * z, log2(WIDE)), mask=real)


def quantize_query(q: torch.Tensor, signs: torch.Tensor) -> Query:
    """q fp32 [..., HK, Q, G, D] in base 2, signs fp32 [HK, D]; codes as of the reference's `quantize_query`."""
    *lead, heads, queries, members, dim = q.shape
    q = q.contiguous()
    codes, rows = q.new_empty(q.shape, dtype=torch.int8), q.shape[:-1]
    found = Query(codes, q.new_empty(rows), q.new_empty(rows), q.new_empty(q.shape))
    grid = math.prod(lead) * heads, triton.cdiv(queries * members, ROWS)
    quantize_rows[grid](
        q, signs, constants(dim, q.device), *found, heads, queries * members, **rotation_of(dim)._asdict(), ROWS=ROWS,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def rotate_back(z: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R^T z for z fp32 [HK, Q, G, D], signs [HK, D]."""
    return reference.rotate_back(z, signs[:, None, None, :])
