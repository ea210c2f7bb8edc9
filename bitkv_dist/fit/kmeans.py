"""Weighted k-means of many small problems at once (Lloyd's algorithm, oversampled k-means++ seeding)."""

from __future__ import annotations

import torch

from bitkv_dist.codec.books import nearest_in_book

SEED_ROUNDS = 8


def kmeans(x: torch.Tensor, weight: torch.Tensor, count: int, iterations: int, seed: int) -> torch.Tensor:
    """x fp32 [problems, N, n], weight fp32 [N] of the vectors -> words fp32 [problems, count, n].

    Words that lose all their vectors move to vectors that are far from theirs.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([_one(vectors, weight, count, iterations, generator) for vectors in x])


def _one(x: torch.Tensor, weight: torch.Tensor, count: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    words = _seeds(x, weight, count, generator)
    for _ in range(iterations):
        index, lost = assign(x, words)
        mass = torch.zeros(count).index_add_(0, index, weight)
        total = torch.zeros_like(words).index_add_(0, index, x * weight[:, None])
        empty = mass == 0
        words = torch.where(empty[:, None], words, total / mass.clamp(min=1e-30)[:, None])
        if lonely := int(empty.sum()):
            words[empty] = x[_draw(lost * weight, lonely, generator)]
    return words


def _seeds(x: torch.Tensor, weight: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Vectors drawn in rounds, each in proportion to the squared distance to those drawn before."""
    rounds = min(SEED_ROUNDS, count)
    sizes = [count // rounds + (turn < count % rounds) for turn in range(rounds)]
    words = x[_draw(weight, sizes[0], generator)]
    lost = assign(x, words)[1]
    for size in sizes[1:]:
        more = x[_draw(lost * weight, size, generator)]
        words, lost = torch.cat((words, more)), torch.minimum(lost, assign(x, more)[1])
    return words


def _draw(chances: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Rows in proportion to `chances`, different ones while there are enough with a chance."""
    chances = chances.double() + 1e-12 * chances.double().sum().clamp(min=1e-30) / len(chances)
    return torch.multinomial(chances, count, replacement=len(chances) < count, generator=generator)


def assign(x: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest word of each vector: index int64 [N] and squared distance fp32 [N]."""
    index = nearest_in_book(x, words)
    return index, (x - words[index]).square().sum(-1)
