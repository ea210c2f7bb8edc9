"""Scores of rotated, quantised queries on the codes of keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.rotation import rotate
from bitkv_dist.kernels.reference.sums import divide, fold_sum


class Query(NamedTuple):
    """Rotated queries of one layer. codes fp32 integers -127..127 [HK, Q, G, D]; scale, norm2 fp32 [HK, Q, G]; rotated fp32 [HK, Q, G, D].

    All in base 2: the query was multiplied by softmax scale * log2(e). norm2 = |q'|^2.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor


def quantize_query(q: torch.Tensor, signs: torch.Tensor) -> Query:
    """q fp32 [HK, Q, G, D] in base 2 -> Query: codes = rint(127 * qr / max|qr|) per head, half to even."""
    rotated = rotate(q, signs[:, None, None, :])
    peak = rotated.abs().amax(-1)
    codes = torch.round(127.0 * rotated / torch.where(peak == 0, 1.0, peak).unsqueeze(-1))
    return Query(codes, divide(peak, 127.0), fold_sum(rotated * rotated), rotated)


def score_integers(codes: torch.Tensor, key_levels: torch.Tensor) -> torch.Tensor:
    """Exact integer dot products: codes [HK, Q, G, D] x levels [n, HK, T, D] -> fp32 integers [n, HK, Q, G, T]."""
    rows = codes.flatten(1, 2)
    return (rows @ key_levels.transpose(-1, -2)).unflatten(-2, codes.shape[1:3])


def score(query: Query, key_levels: torch.Tensor, scales: torch.Tensor, unit: float, centroid: torch.Tensor, noise: float) -> torch.Tensor:
    """Base-2 scores [n, HK, Q, G, T] = q.c + a_t <q, level> + 0.5 ln2 |q'|^2 noise a_t^2 (log-normal mean; `noise` = r^2 / (D a^2)).

    key_levels [n, HK, T, D]; scales fp32 [n, HK, T]; centroid fp32 [n, pages, HK, D], T = pages * P.
    """
    pages = centroid.shape[1]
    scales = scales[:, :, None, None, :]
    integers = score_integers(query.codes, key_levels)
    base = fold_sum(query.rotated[None, None] * centroid[:, :, :, None, None, :]).movedim(1, -1)  # [n, HK, Q, G, pages]
    out = integers * query.scale.unsqueeze(-1) * (scales * unit)
    if noise:
        out = out + (query.norm2 * (0.5 * math.log(2) * noise)).unsqueeze(-1) * (scales * scales)
    return (out.unflatten(-1, (pages, -1)) + base.unsqueeze(-1)).flatten(-2)
