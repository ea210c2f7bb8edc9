"""Queries in the form that the kernels take: rotated, int8 codes with one scale per head. One small step per layer, in plain
torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bitkv_dist.kernels import reference


class Query(NamedTuple):
    """codes int8 and rotated fp32 [HK, Q, G, D], scale and norm2 fp32 [HK, Q, G], contiguous; base 2 (see reference.Query)."""

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor


def quantize_query(q: torch.Tensor, signs: torch.Tensor) -> Query:
    """q fp32 [HK, Q, G, D] in base 2, signs [HK, D]."""
    query = reference.quantize_query(q, signs)
    return Query(
        query.codes.to(torch.int8).contiguous(), query.scale.contiguous(), query.norm2.contiguous(), query.rotated.contiguous()
    )


def rotate_back(z: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R^T z for z fp32 [HK, Q, G, D], signs [HK, D]."""
    return reference.rotate_back(z, signs[:, None, None, :])
