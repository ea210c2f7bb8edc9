"""How much attention key channels, keys and values really receive from the queries that look at them.

Form weighted counts all causal pairs alike (importance.py). Most of them are of queries that look elsewhere, at the sink or at
what is near, with much energy in the channels that find these. Here a pair counts by what an error of its score changes: with
p the softmax weight of query i for key j and o the query's output, an error e of the score moves o by p (v - o) e, so the pair
counts p^2 |v - o|^2, and an error of the value moves it by p, so the value counts p^2; and only where a cache codes the key,
behind the sink and before the recent window.
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
FLOOR = 1e-3  # of the mean: what a token counts that no sampled query reads by code


class Received(NamedTuple):
    """Of one window: channels fp32 [HK, D], the sum of p^2 |v - o|^2 (R q)_c^2 over its pairs, R turning q back by the position
    of the key; keys and values fp32 [HK, n], the means of p^2 |v - o|^2 and of p^2 over the queries that read a token by code.
    All of sampled queries of the tokens that teach; 0 where there is none."""

    channels: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def received(window: Window, rope: Rope) -> Received:
    heads, _, tokens, dim = window.q.shape
    n, half = window.taught, rope.half
    cos, sin = (turn(2 * torch.arange(n)[:, None] * rope.inv_freq) for turn in (torch.cos, torch.sin))
    found = Received(torch.zeros(heads, dim), torch.zeros(heads, tokens), torch.zeros(heads, tokens))
    looks = torch.zeros(heads, tokens)
    for seen in glances(window, rope, STRIDE):
        counts = seen.counts.T  # [keys, queries]
        x, y, rest = seen.query.split((half, half, dim - 2 * half), -1)
        even, uneven, cross = (counts @ part for part in ((x * x + y * y) / 2, (x * x - y * y) / 2, x * y))
        uneven = uneven * cos + cross * sin
        found.channels[seen.head] += torch.cat((even + uneven, even - uneven, counts @ rest.square()), -1).sum(0)
        found.keys[seen.head, :n] += counts.sum(1)
        found.values[seen.head, :n] += seen.square.sum(0)
        looks[seen.head, :n] += seen.coded.sum(0)
    return Received(found.channels, *(sums / looks.clamp(min=1) for sums in (found.keys, found.values)))


def score_cost(window: Window, rope: Rope, error: torch.Tensor, stride: int) -> torch.Tensor:
    """What key errors fp32 [HK, n, D] of the tokens that teach, before RoPE, change in outputs by way of scores, fp32 [HK]."""
    found, turned_error = torch.zeros(len(error)), turned(rope, error)
    for seen in glances(window, rope, stride):
        found[seen.head] += (seen.counts * (seen.query @ turned_error[seen.head].T * window.scaling).square()).sum()
    return found


class Glance(NamedTuple):
    """Some queries of one query head at all keys of KV head `head`: query [m, D] after RoPE; coded bool [m, n]: keys that they
    read by code; square = p^2 and counts = p^2 |v - o|^2 [m, n] there, 0 elsewhere."""

    head: int
    query: torch.Tensor
    coded: torch.Tensor
    square: torch.Tensor
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
                square = p.square() * coded
                yield Glance(head, query, coded, square, square * away.clamp(min=0))


def tempered(mass: torch.Tensor) -> torch.Tensor:
    """Half-way, in logarithms, between these masses [HK, n] of tokens and none: a few queries make most of such sums."""
    return (mass + FLOOR * mass.mean(-1, keepdim=True)).sqrt()
