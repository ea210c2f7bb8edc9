"""Attention to granules of sealed pages, and to tokens in floating point."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.pages import Plane, level_unit, levels
from bitkv_dist.kernels.reference.scores import Noise, Query, key_scores
from bitkv_dist.kernels.reference.selection import Selection, select
from bitkv_dist.kernels.reference.sums import divide, exp2, fold_sum, tree_sum


def value_integers(weights: torch.Tensor, value_levels: torch.Tensor) -> torch.Tensor:
    """Exact integer sums per page: weights 0..127 [n, pages, HK, R, P] x levels [n, pages, HK, P, D] -> fp32 [.., R, D]."""
    return weights @ value_levels


def quantize_weights(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative fp32 [.., P] -> (integers 0..127 as fp32, scale fp32 [..] = page maximum / 127); a page of zeros gives
    zeros."""
    peak = weights.amax(-1)
    return torch.round(127.0 * weights / torch.where(peak == 0, 1.0, peak).unsqueeze(-1)), divide(peak, 127.0)


def value_pass(weights: torch.Tensor, value_levels: torch.Tensor, unit: float) -> torch.Tensor:
    """sum_t w_t level_t per page with integer weights, fp32 [n, pages, HK, R, D].

    weights fp32 [n, HK, R, pages, P], value_levels [n, pages, HK, P, D].
    """
    integers, scale = quantize_weights(weights.permute(0, 3, 1, 2, 4))
    return value_integers(integers, value_levels) * (scale * unit).unsqueeze(-1)


class Attended(NamedTuple):
    """Partials per granule in the rotated space: m, l fp32 [n, HK, Q, G], o fp32 [n, HK, Q, G, D].

    refined: bool [n, HK, Q, G, T], or None without a selection. page_mass fp32 [n, HK, Q, G, pages]: what each page has of l.
    """

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor
    refined: torch.Tensor | None
    page_mass: torch.Tensor


def attend(query: Query, keys: Plane, values: Plane, page_valid: torch.Tensor, key_low: int, value_low: int,
           noise: Noise, selection: Selection | None, granules: torch.Tensor | None = None) -> Attended:
    """Attention of one sequence's queries to n granules of sealed pages: scan, select, refine, softmax, values.

    keys and values: Plane with leading dims [n, pages, HK]. page_valid bool [n, pages]. key_low, value_low: bits below the
    scanned planes. Without `selection` the scanned planes are all that is used. Selected tokens take their B-bit score and
    value; the tail keeps its scanned ones. granules int64 [n]: global indices, for a selection among the whole sequence.
    """
    pages, tokens = keys.full.shape[1], keys.full.shape[-1]
    key_scan, value_scan = keys.planes.shape[-3], values.planes.shape[-3]
    value_centroid = values.centroid.float()

    scores = key_scores(query, keys, page_valid, 0, noise[key_scan, key_scan + key_low])
    refined = None
    if selection is not None:
        refined = select(scores, page_valid.sum(1) * tokens, selection, granules)
        if key_low:
            full = key_scores(query, keys, page_valid, key_low, noise[key_scan + key_low, key_scan + key_low])
            scores = torch.where(refined, full, scores)

    m = scores.amax(-1)
    p = exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1))
    l = fold_sum(p)

    rows = p.flatten(2, 3).unflatten(-1, (pages, tokens))  # [n, HK, R, pages, P]
    mass = fold_sum(rows).permute(0, 3, 1, 2).unsqueeze(-1)  # [n, pages, HK, R, 1]
    out = mass * value_centroid.unsqueeze(-2)
    scan_weights = rows * values.scan.float().permute(0, 2, 1, 3).unsqueeze(2)
    if refined is None or not value_low:
        out = out + value_pass(scan_weights, levels(values, "V", 0), level_unit(value_scan))
    else:
        chosen = refined.flatten(2, 3).unflatten(-1, (pages, tokens))
        out = out + value_pass(scan_weights.masked_fill(chosen, 0.0), levels(values, "V", 0), level_unit(value_scan))
        full_weights = (rows * values.full.float().permute(0, 2, 1, 3).unsqueeze(2)).masked_fill(~chosen, 0.0)
        out = out + value_pass(full_weights, levels(values, "V", value_low), level_unit(value_scan + value_low))
    o = tree_sum(out, 1).unflatten(2, p.shape[2:4])
    return Attended(m, l, o, refined, fold_sum(p.unflatten(-1, (pages, tokens))))


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None,
                 page_mass: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of q fp32 [HK, Q, G, D] (base 2) over k, v fp32 [n, HK, T, D]: m, l [n, HK, Q, G], o [n, HK, Q, G, D].

    valid: bool broadcastable to [n, HK, Q, G, T], or None. page_mass fp32 [n, HK, Q, G, pages]: to fill with what each
    of so many equal pages has of l. T = 0 gives the empty partial. Never SDPA: with one query its last
    bits depend on the number of threads.
    """
    shape = (k.shape[0], *q.shape[:3])
    if k.shape[-2] == 0:
        return q.new_full(shape, -math.inf), q.new_zeros(shape), q.new_zeros(*shape, q.shape[-1])
    if k.shape[:2] == (1, 1):  # a lone matrix product may be split among threads, in an order of its own; one of two never is
        k, v = k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)
    scores = (q.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(-2, q.shape[1:3])
    if valid is not None:
        scores = torch.where(valid, scores, -math.inf)
    m = scores.amax(-1)
    p = exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1))
    if page_mass is not None:
        page_mass.copy_(fold_sum(p.unflatten(-1, (page_mass.shape[-1], -1)))[: shape[0]])
    o = (p.flatten(2, 3) @ v).unflatten(-2, q.shape[1:3])
    return m[: shape[0]], fold_sum(p)[: shape[0]], o[: shape[0]]
