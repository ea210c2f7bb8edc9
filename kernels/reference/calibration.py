"""How far scanned scores are from true ones, granule by granule, for queries whose true scores are at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bitkv_dist.kernels.reference.pages import Plane
from bitkv_dist.kernels.reference.scores import Noise, Query, centroid_scores, key_scores
from bitkv_dist.kernels.reference.selection import Selection, select
from bitkv_dist.kernels.reference.sums import exp2, fold_sum


def true_scores(q: torch.Tensor, k: torch.Tensor, page_valid: torch.Tensor) -> torch.Tensor:
    """q fp32 [HK, Q, G, D] in base 2 on exact keys k [n, HK, T, D] -> [n, HK, Q, G, T], -inf outside the valid pages."""
    scores = fold_sum(q[None, :, :, :, None, :] * k.float()[:, :, None, None, :, :])
    valid = page_valid.repeat_interleave(k.shape[2] // page_valid.shape[1], 1)
    return torch.where(valid[:, None, None, None, :], scores, -math.inf)


def slope_sums(query: Query, keys: Plane, page_valid: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Sums over each granule for the least-squares line y = factor * x, fp32 [n, HK, Q, G, 2] = (x y, x x).

    x: the coded part a_t <q, level_t> of a scanned score, y: what it should be, the true score without q.c.
    """
    bare = query._replace(factor=None, offset=None)
    coded = key_scores(bare, keys._replace(centroid=torch.zeros_like(keys.centroid)), page_valid, 0, 0.0)
    base = centroid_scores(query, keys.centroid.float()).repeat_interleave(keys.full.shape[-1], -1)
    valid = ~torch.isinf(coded)
    x, y = torch.where(valid, coded, 0.0), torch.where(valid, truth - base, 0.0)
    return torch.stack((fold_sum(x * y), fold_sum(x * x)), dim=-1)


def tail_weights(query: Query, keys: Plane, page_valid: torch.Tensor, truth: torch.Tensor, key_low: int, noise: Noise,
                 choices: Sequence[Selection | None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A partial of the true weights, whose output is the weight that each of `choices` leaves unrefined: all of it for None.

    m, l fp32 [n, HK, Q, G]; o fp32 [n, HK, Q, G, 2 C]: the C true weights, then the same as the scan estimates them.
    """
    scan_bits, tokens = keys.planes.shape[-3], keys.full.shape[-1]
    scores = key_scores(query, keys, page_valid, 0, noise[scan_bits, scan_bits + key_low])
    m = torch.maximum(truth, scores).amax(-1)
    base = torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1)
    weights, estimated = exp2(truth - base), exp2(scores - base)
    sealed = page_valid.sum(1) * tokens
    tails = [~select(scores, sealed, choice) if choice else torch.ones_like(scores, dtype=torch.bool) for choice in choices]
    left = [fold_sum(torch.where(tail, side, 0.0)) for side in (weights, estimated) for tail in tails]
    return m, fold_sum(weights), torch.stack(left, dim=-1)
