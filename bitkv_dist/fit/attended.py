"""How much attention key channels really receive from the queries that read them by code.

Form weighted counts all causal pairs alike (importance.py). Most of them are of queries that look elsewhere, at the sink or at
what is near, with much energy in the channels that find these. Here a pair counts by what an error of its score changes: with
p the softmax weight of query i for key j and o the query's output, an error e of the score moves o by p (v - o) e, so the pair
counts p^2 |v - o|^2, and only where a cache codes the key, behind the sink and before the recent window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bitkv_dist.codec.rope import Rope
from bitkv_dist.fit.sample import Window, turned

SINK = RECENT = 128  # tokens that a cache keeps exactly, as it does where nothing else is said
STRIDE = 16  # every so many-th query speaks for all
PAIRS = 1 << 20  # of query and key that are looked at together: memory does not grow with the square of a window


def attended(window: Window, rope: Rope) -> torch.Tensor:
    """The sum of p^2 |v - o|^2 (R q)_c^2 over sampled queries of the tokens that teach, R turning them back by the position of
    the key: fp32 [HK, D], 0 where no query is far enough from the start."""
    n, half, dim = window.taught, rope.half, window.q.shape[-1]
    cos, sin = (turn(2 * torch.arange(n)[:, None] * rope.inv_freq) for turn in (torch.cos, torch.sin))
    found = torch.zeros(len(window.q), dim)
    for seen in glances(window, rope, STRIDE):
        counts = seen.counts.T  # [keys, queries]
        x, y, rest = seen.query.split((half, half, dim - 2 * half), -1)
        even, uneven, cross = (counts @ part for part in ((x * x + y * y) / 2, (x * x - y * y) / 2, x * y))
        uneven = uneven * cos + cross * sin
        found[seen.head] += torch.cat((even + uneven, even - uneven, counts @ rest.square()), -1).sum(0)
    return found


def score_cost(window: Window, rope: Rope, error: torch.Tensor, stride: int) -> torch.Tensor:
    """What key errors fp32 [HK, n, D] of the tokens that teach, before RoPE, change in outputs by way of scores, fp32 [HK]."""
    found, turned_error = torch.zeros(len(error)), turned(rope, error)
    for seen in glances(window, rope, stride):
        found[seen.head] += (seen.counts * (seen.query @ turned_error[seen.head].T * window.scaling).square()).sum()
    return found


class Glance(NamedTuple):
    """Some queries of one query head at all keys of KV head `head`: query [m, D] after RoPE; counts [m, n] of the pairs, 0 for
    keys that they do not read by code."""

    head: int
    query: torch.Tensor
    counts: torch.Tensor


def glances(window: Window, rope: Rope, stride: int) -> Iterator[Glance]:
    """Every stride-th query of the tokens that teach, some at a time."""
    n, key = window.taught, torch.arange(window.taught)
    heads, group = window.q.shape[:2]
    position = key[SINK + RECENT :: stride]
    q = turned(rope, window.q[:, :, :n].flatten(0, 1)).unflatten(0, (heads, group))[:, :, position]
    k, v = turned(rope, window.k[:, :n]), window.v[:, :n]
    norm = v.square().sum(-1)
    for rows in torch.arange(len(position)).split(max(1, PAIRS // max(1, n))):
        at = position[rows][:, None]
        seen, coded = key <= at, (key >= SINK) & (key <= at - RECENT)
        for head in range(heads):
            for query in q[head][:, rows]:
                p = torch.where(seen, query @ k[head].T * window.scaling, -torch.inf).softmax(-1)
                o = p @ v[head]
                away = norm[head] - 2 * o @ v[head].T + o.square().sum(-1, keepdim=True)
                yield Glance(head, query, p.square() * away.clamp(min=0) * coded)


def tempered(article: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """The square root of the geometric mean of the article's weights and those of what is attended to, fp32 [HK, D]: a few
    queries make most of the sums above, and all pairs alike make the article's."""
    return (article * received) ** 0.25
