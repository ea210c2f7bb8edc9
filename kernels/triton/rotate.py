"""The rotation in registers, for the kernels that encode, that take queries and that give outputs.

Rows are tiles [rows, WIDE], WIDE the power of two that holds D; what lies beyond D is zero. The order of operations is that of
kernels/reference/rotation.py, so the bits are.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.reference import SCALE_FACTORS, dct_matrix, split_dim

FACTORS: tl.constexpr = tl.constexpr(len(SCALE_FACTORS))


class Rotation(NamedTuple):
    """What the kernels are told of the rotation of a head dim D = 2^STEPS * SIZE, as compile-time constants."""

    DIM: int
    WIDE: int
    SIZE: int
    STEPS: int
    ROOT: float  # 2^(-STEPS / 2)


def rotation_of(dim: int) -> Rotation:
    power, size = split_dim(dim)
    return Rotation(dim, triton.next_power_of_2(dim), size, power.bit_length() - 1, 1.0 / math.sqrt(power))


@functools.cache
def constants(dim: int, device: torch.device) -> torch.Tensor:
    """fp32: the candidate factors of the scale search, then the rows of the small DCT."""
    rows = dct_matrix(split_dim(dim)[1])
    return torch.tensor([*SCALE_FACTORS, *(value for row in rows for value in row)], device=device)


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sum over the last dim of x [rows, 2^LEVELS] as a tree of adjacent pairs, [rows]."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = a + b
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def hadamard_rows(z, DIM: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr):
    """Butterflies of stride 1, 2, 4, .. blocks of SIZE dims, then the scale."""
    d = tl.arange(0, z.shape[1])
    for step in tl.static_range(STEPS):
        upper = (d // SIZE >> step) % 2 == 1
        away = SIZE << step
        partner = tl.where(d < DIM, tl.where(upper, d - away, d + away), d)
        other = tl.gather(z, tl.broadcast_to(partner[None, :], z.shape), 1)
        z = tl.where(upper[None, :], other - z, z + other)
    return z * ROOT


@triton.jit
def rotate_rows(x, row, row_stride, dim_stride, signs, dct, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
                STEPS: tl.constexpr, ROOT: tl.constexpr):  # fmt: skip
    """R x for the rows `row` [rows] of x, fp32 [rows, WIDE]."""
    d = tl.arange(0, WIDE)
    inside = d < DIM
    block, k = d // SIZE, d % SIZE
    rows = x + row[:, None].to(tl.int64) * row_stride
    z = tl.zeros((row.shape[0], WIDE), tl.float32)
    for j in tl.static_range(SIZE):
        source = block * SIZE + j
        part = tl.load(rows + source[None, :] * dim_stride, mask=inside[None, :], other=0.0).to(tl.float32)
        part = part * tl.load(signs + source, mask=inside, other=0.0)[None, :]
        if SIZE > 1:
            part = part * tl.load(dct + k * SIZE + j)[None, :]
        z = part if j == 0 else z + part
    return hadamard_rows(z, DIM, SIZE, STEPS, ROOT)


@triton.jit
def rotate_rows_back(z, signs, dct, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
                     ROOT: tl.constexpr):  # fmt: skip
    """R^T z, fp32 [rows, WIDE]."""
    d = tl.arange(0, WIDE)
    inside = d < DIM
    z = hadamard_rows(z, DIM, SIZE, STEPS, ROOT)
    if SIZE > 1:
        held = z
        for k in tl.static_range(SIZE):
            source = tl.where(inside, d // SIZE * SIZE + k, d)
            part = tl.gather(held, tl.broadcast_to(source[None, :], held.shape), 1)
            part = part * tl.load(dct + k * SIZE + d % SIZE)[None, :]
            z = part if k == 0 else z + part
    return z * tl.load(signs + d, mask=inside, other=0.0)[None, :]
