"""Sums in a fixed order, and the few scalar functions whose last bit must not depend on where a value stands.

`tree_sum` adds adjacent pairs and belongs to the format: encoding uses it, so its bytes are the same on every machine.
`fold_sum` adds the two halves of a row, which vectorises; it fixes an order that depends neither on the number of threads nor
on how many rows are computed together.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` as a tree of adjacent pairs, zero-padded to a power of two."""
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        if x.shape[0] % 2:
            x = torch.cat((x, torch.zeros_like(x[:1])))
        x = x[0::2] + x[1::2]
    return x[0]


def fold_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim by adding its second half to its first, zero-padded to a power of two."""
    n = x.shape[-1]
    size = 1 << max(0, n - 1).bit_length()
    x = F.pad(x, (0, size - n)) if size != n else x
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x through `torch.exp`: torch.exp2 differs in the last bit between its vector body and its scalar tail, so that a value
    would depend on its place in the tensor."""
    return torch.exp(x * math.log(2))


def divide(x: torch.Tensor, value: float) -> torch.Tensor:
    """IEEE-rounded x / value: torch on CUDA would multiply by the reciprocal of a Python number."""
    return x / torch.full((), value, dtype=x.dtype, device=x.device)


def safe_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / torch.where(y == 0, 1.0, y))
