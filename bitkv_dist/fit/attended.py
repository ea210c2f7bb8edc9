"""How much attention a key channel receives from the queries that look at it.

Form weighted counts all causal pairs alike (importance.py). Most of them are of queries that look elsewhere, at the sink or at
what is near, with much energy in the channels that find these. Here a pair counts by what an error of its score changes: with
p the softmax weight of query i for key j and o the query's output, an error e of the score moves o by p (v - o) e, so the pair
counts p^2 |v - o|^2, and only where a cache codes the key, behind the sink and before the recent window.
"""

from __future__ import annotations

import torch

from bitkv_dist.codec.rope import Rope
from bitkv_dist.fit.sample import Window, turned

SINK = RECENT = 128  # tokens that a cache keeps exactly, as it does where nothing else is said
STRIDE = 16  # every so many-th query speaks for all


def attended(window: Window, rope: Rope) -> torch.Tensor:
    """The sum of p^2 |v - o|^2 (R q)_c^2 over sampled queries of the tokens that teach, R turning them back by the position of
    the key: fp32 [HK, D], 0 where no query is far enough from the start."""
    n, half = window.taught, rope.half
    heads, group, _, dim = window.q.shape
    position, key = torch.arange(n)[SINK + RECENT :: STRIDE], torch.arange(n)
    q = turned(rope, window.q[:, :, :n].flatten(0, 1)).unflatten(0, (heads, group))[:, :, position]
    k, v = turned(rope, window.k[:, :n]), window.v[:, :n]
    seen = key <= position[:, None]
    coded = (key >= SINK) & (key <= position[:, None] - RECENT)
    cos, sin = (turn(2 * key[:, None] * rope.inv_freq) for turn in (torch.cos, torch.sin))
    found = torch.zeros(heads, dim)
    for head in range(heads):
        for query in q[head]:
            p = torch.where(seen, query @ k[head].T * window.scaling, -torch.inf).softmax(-1)
            o = p @ v[head]
            away = v[head].square().sum(-1) - 2 * o @ v[head].T + o.square().sum(-1, keepdim=True)
            counts = (p.square() * away.clamp(min=0) * coded).T  # [keys, queries]
            x, y, rest = query.split((half, half, dim - 2 * half), -1)
            even, uneven, cross = (counts @ part for part in ((x * x + y * y) / 2, (x * x - y * y) / 2, x * y))
            uneven = uneven * cos + cross * sin
            found[head] += torch.cat((even + uneven, even - uneven, counts @ rest.square()), -1).sum(0)
    return found


def tempered(weight: torch.Tensor) -> torch.Tensor:
    """Half-way, in logarithms, between these weights and none: a few queries make most of the sums above."""
    return weight.sqrt()
