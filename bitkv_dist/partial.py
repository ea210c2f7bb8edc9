"""Partial attention states and the one way to merge them.

A partial is the softmax attention of a query over *one set* of tokens: running max m, sum l, un-normalised output o, fp32, base
2 (the query was multiplied by softmax scale * log2 e). The empty set is (-inf, 0, 0). Merging is that of online softmax
(Milakov and Gimelshein, arXiv:1805.02867; attention states of FlashInfer's cascade, Ye et al. 2024).

The order of merging is a function of the global granule index only: granule g belongs to lane g mod 256, a lane takes its
granules in token order, and the 256 lanes are merged by the decimation tree node(stride, off) = merge(node(2 stride, off),
node(2 stride, off + stride)). Every rank computes whole nodes, so the result has the same bits for any number of ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bitkv_dist.cache_config import LANES
from bitkv_dist.kernels import dispatch
from bitkv_dist.kernels.reference import exp2


class Partial(NamedTuple):
    """m, l fp32 [...]; o fp32 [..., D]."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor

    def normalised(self) -> torch.Tensor:
        """The attention output o / l, [..., D]; 0 for the empty set."""
        return self.o / torch.where(self.l == 0, 1.0, self.l).unsqueeze(-1)

    def log_sum_exp(self) -> torch.Tensor:
        """Natural log of the sum of exponentials, [...]; -inf for the empty set."""
        return (self.m + torch.log2(self.l)) * math.log(2)

    def rows(self, index) -> Partial:
        """The same index or slice of the first dim of m, l and o."""
        return Partial(self.m[index], self.l[index], self.o[index])


def empty(shape: tuple[int, ...], dim: int, device: torch.device | None = None) -> Partial:
    """The partial of no tokens: m, l of `shape`, o of `shape` + [dim]."""
    return Partial(
        torch.full(shape, -math.inf, device=device), torch.zeros(shape, device=device), torch.zeros(*shape, dim, device=device)
    )


def merge(a: Partial, b: Partial) -> Partial:
    """The partial of the union of two disjoint token sets. An empty side is passed over without arithmetic, even if its l, o
    hold NaN."""
    m = torch.maximum(a.m, b.m)
    base = torch.where(torch.isneginf(m), 0.0, m)
    weight_a, weight_b = exp2(a.m - base), exp2(b.m - base)
    no_a, no_b = torch.isneginf(a.m), torch.isneginf(b.m)
    l = torch.where(no_a, torch.where(no_b, 0.0, b.l), torch.where(no_b, a.l, a.l * weight_a + b.l * weight_b))
    no_a, no_b = no_a.unsqueeze(-1), no_b.unsqueeze(-1)
    both = a.o * weight_a.unsqueeze(-1) + b.o * weight_b.unsqueeze(-1)
    o = torch.where(no_a, torch.where(no_b, 0.0, b.o), torch.where(no_b, a.o, both))
    return Partial(m, l, o)


def fill_lanes(granules: Partial, index: torch.Tensor, width: int) -> Partial:
    """Lanes [width, ...] from partials of granules [n, ...] with ascending global indices int64 [n]; lane = index mod width,
    token order.

    width = a power of two <= 256; of a whole sequence's granules as `lane_width` says, so that no lane below 256 takes two.
    """
    lanes = empty((width, *granules.m.shape[1:]), granules.o.shape[-1], granules.m.device)
    turns = index // width
    for turn in turns.unique().tolist():
        rows = turns == turn
        where = index[rows] % width
        found = granules.rows(rows)
        merged = merge(lanes.rows(where), found) if turn else found
        for lane, value in zip(lanes, merged, strict=True):
            lane[where] = value
    return lanes


def lane_width(granules: int, nodes: int) -> int:
    """The smallest power of two <= 256 that holds `granules` lanes and `nodes` tree nodes: wider leaves would only be empty."""
    return min(LANES, max(nodes, 1 << max(0, granules - 1).bit_length()))


def reduce_lanes(lanes: Partial, nodes: int) -> Partial:
    """The decimation tree from the leaves [width, ...] down to node(nodes, 0..nodes-1), [nodes, ...]."""
    stride = lanes.m.shape[0]
    while stride > nodes:
        stride //= 2
        lanes = merge(lanes.rows(slice(0, stride)), lanes.rows(slice(stride, 2 * stride)))
    return lanes


def tree(granules: Partial, index: torch.Tensor, width: int, nodes: int) -> Partial:
    """`reduce_lanes(fill_lanes(..))` by the fastest kernels for the device; every merge of the tree goes through here, on every
    rank."""
    kernels = dispatch.native(granules.m.device)
    if kernels is not None:
        return Partial(*kernels.tree(*granules, index, width, nodes))
    return reduce_lanes(fill_lanes(granules, index, width), nodes)


def root(nodes: Partial) -> Partial:
    """The top of the tree from its nodes [V, ...], V a power of two: Partial [...]."""
    count = len(nodes.m)
    if count == 1:
        return nodes.rows(0)
    return tree(nodes, torch.arange(count, device=nodes.m.device), count, 1).rows(0)
