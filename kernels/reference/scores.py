"""Scores of rotated, quantised queries on the codes of keys, all in base 2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.pages import Plane, level_unit, levels
from bitkv_dist.kernels.reference.rotation import rotate
from bitkv_dist.kernels.reference.sums import divide, fold_sum

Noise = dict[tuple[int, int], float]  # [(S, B)]: energy r^2 / (D a^2) that the top S planes of a B-bit code lose


class Query(NamedTuple):
    """Rotated queries of one layer, in base 2: they were multiplied by softmax scale * log2(e).

    codes fp32 integers -127..127 [HK, Q, G, D]; scale, norm2 = |q'|^2 fp32 [HK, Q, G]; rotated fp32 [HK, Q, G, D].
    factor, offset fp32 [HK, Q, G]: what a fitted score multiplies the coded part of scanned scores with and adds to them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor
    factor: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def at(self, positions: slice) -> Query:
        """Some of the Q positions."""
        return Query(*(part if part is None else part[:, positions] for part in self))


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


def score(query: Query, key_levels: torch.Tensor, scales: torch.Tensor, unit: float, centroid: torch.Tensor,
          noise: float) -> torch.Tensor:
    """Base-2 scores [n, HK, Q, G, T] = q.c + a_t <q, level> + 0.5 ln2 |q'|^2 noise a_t^2.

    The last term is the log-normal mean, `noise` = r^2 / (D a^2). key_levels [n, HK, T, D]; scales fp32 [n, HK, T]; centroid
    fp32 [n, pages, HK, D], T = pages * P.
    """
    pages = centroid.shape[1]
    scales = scales[:, :, None, None, :]
    integers = score_integers(query.codes, key_levels)
    base = centroid_scores(query, centroid)
    out = integers * query.scale.unsqueeze(-1) * (scales * unit)
    if noise:
        out = out + (query.norm2 * (0.5 * math.log(2) * noise)).unsqueeze(-1) * (scales * scales)
    return (out.unflatten(-1, (pages, -1)) + base.unsqueeze(-1)).flatten(-2)


def centroid_scores(query: Query, centroid: torch.Tensor) -> torch.Tensor:
    """q.c of every page, fp32 [n, HK, Q, G, pages]; centroid fp32 [n, pages, HK, D]."""
    return fold_sum(query.rotated[None, None] * centroid[:, :, :, None, None, :]).movedim(1, -1)


def key_scores(query: Query, keys: Plane, page_valid: torch.Tensor, low: int, noise: float) -> torch.Tensor:
    """Scores [n, HK, Q, G, T] of sealed pages, -inf where there is none.

    keys: Plane with leading dims [n, pages, HK], of which page_valid bool [n, pages] are sealed.
    low: bits below the scanned planes to read; 0 scores the scan, with the query's factor and offset.
    """
    tokens, scan_bits = keys.full.shape[-1], keys.planes.shape[-3]
    scales = (keys.full if low else keys.scan).float().transpose(1, 2).flatten(2)  # [n, HK, T]
    codes = levels(keys, "K", low).transpose(1, 2).flatten(2, 3)  # [n, HK, T, D]
    if not low and query.factor is not None:
        query = query._replace(scale=query.scale * query.factor)
    found = score(query, codes, scales, level_unit(scan_bits + low), keys.centroid.float(), noise)
    if not low and query.offset is not None:
        found = found + query.offset.unsqueeze(-1)
    return torch.where(page_valid.repeat_interleave(tokens, 1)[:, None, None, None, :], found, -math.inf)
