"""Which channels share a codebook: those that vary together. A book of 2^R words for n channels of covariance C loses about
det(C)^(1/n) 4^(-R/n), so groups are chosen for the least sum of det(C)^(1/n) (TaSQ, arXiv 2610.03027).

RoPE pairs stay whole. Groups of 4 pairs come from two rounds of minimum-weight perfect matching, pairs to quads and quads to
octets; each round is solved exactly as an integer programme by HiGHS, the two together are not the optimum over all octets.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def group_channels(covariance: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """covariance fp32 [D, D] of a head's channels, pairs int64 [D/2, 2], D a multiple of 8 -> int64 [D/8, 8], whole pairs."""
    covariance = covariance.double().numpy()
    groups = pairs.numpy()
    for _ in range(2):
        if len(groups) % 2:
            raise ValueError(f"{len(groups)} groups of {groups.shape[1]} channels: their number must be even")
        chosen = best_pairs(volumes(covariance, groups))
        groups = np.concatenate((groups[chosen[:, 0]], groups[chosen[:, 1]]), 1)
    return torch.from_numpy(groups[np.lexsort((groups.min(1),))])


def volumes(covariance: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """det(C)^(1/n) of every two groups together, [m, m]; log-determinants, since products of variances run out of range."""
    m = len(groups)
    first, second = np.triu_indices(m, 1)
    both = np.concatenate((groups[first], groups[second]), 1)
    sign, log = np.linalg.slogdet(covariance[both[:, :, None], both[:, None, :]])
    cost = np.zeros((m, m))
    cost[first, second] = cost[second, first] = np.where(sign > 0, np.exp(log / both.shape[1]), 0.0)
    return cost


def best_pairs(cost: np.ndarray) -> np.ndarray:
    """The perfect matching of m points, m even, with the least sum of cost [m, m], symmetric: int [m/2, 2]."""
    m = len(cost)
    if m == 2:
        return np.array([[0, 1]])
    first, second = np.triu_indices(m, 1)
    edges = np.arange(len(first))
    touches = csr_array((np.ones(2 * len(first)), (np.r_[first, second], np.r_[edges, edges])))
    weight = cost[first, second]
    peak = weight.max()
    found = milp(
        weight / peak if peak > 0 else weight, integrality=np.ones(len(first)), bounds=Bounds(0, 1),
        constraints=LinearConstraint(touches, 1, 1), options={"mip_rel_gap": 0},
    )  # fmt: skip
    assert found.success, found.message
    chosen = found.x > 0.5
    return np.stack((first[chosen], second[chosen]), 1)
