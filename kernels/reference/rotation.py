"""The randomised Hadamard rotation of any head dim 2^a * m."""

from __future__ import annotations

import functools
import math

import torch


def split_dim(dim: int) -> tuple[int, int]:
    """dim = 2^a * m -> (2^a, m) with m in {1, 3, 5, 7}; raises ValueError for head dims that have no rotation."""
    power = dim & -dim
    if dim % 8 or dim // power not in (1, 3, 5, 7):
        rule = "must be a multiple of 8 of the form 2^a * m with m in 1, 3, 5, 7"
        raise ValueError(f"head_dim {dim}: {rule}; serve it with --kv-bits 16")
    return power, dim // power


@functools.cache
def dct_matrix(m: int) -> tuple[tuple[float, ...], ...]:
    """Rows of the orthonormal DCT-II of size m (Ahmed, Natarajan, Rao 1974)."""
    def row(k: int) -> tuple[float, ...]:
        return tuple(math.sqrt((2 if k else 1) / m) * math.cos(math.pi * (j + 0.5) * k / m) for j in range(m))
    return tuple(row(k) for k in range(m))


def small_matmul(x: torch.Tensor, rows: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    """x [..., m] times the matrix of `rows`, each output a plain left-to-right sum."""
    outputs = []
    for row in rows:
        total = x[..., 0] * row[0]
        for j in range(1, len(row)):
            total = total + x[..., j] * row[j]
        outputs.append(total)
    return torch.stack(outputs, dim=-1)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform over dim -2 of x [..., 2^a, m], butterflies of stride 1, 2, 4, .."""
    size, m = x.shape[-2:]
    stride = 1
    while stride < size:
        a, b = x.reshape(*x.shape[:-2], size // (2 * stride), 2, stride, m).unbind(-3)
        x = torch.stack((a + b, a - b), dim=-3).reshape(*x.shape[:-2], size, m)
        stride *= 2
    return x * (1.0 / math.sqrt(size))


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R x = (H_{2^a} (x) Q_m) diag(signs) x, fp32 [..., D]; `signs` [.., D] broadcasts against x. Dim = i * m + j."""
    size, m = split_dim(x.shape[-1])
    y = (x * signs).unflatten(-1, (size, m))
    if m > 1:
        y = small_matmul(y, dct_matrix(m))
    return hadamard(y).flatten(-2)


def rotate_back(z: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R^T z, fp32 [..., D]: the inverse of `rotate`."""
    size, m = split_dim(z.shape[-1])
    y = hadamard(z.unflatten(-1, (size, m)))
    if m > 1:
        y = small_matmul(y, tuple(zip(*dct_matrix(m), strict=True)))
    return y.flatten(-2) * signs
