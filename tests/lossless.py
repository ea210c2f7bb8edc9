"""A cache that loses nothing, and models that run with it layer by layer: what a packed cache approximates."""

from __future__ import annotations

import math

import torch

from bitkv_dist.cache import Step
from bitkv_dist.model import ServedModel


class LosslessCache:
    """Concatenates keys and values and attends with a plain softmax."""

    def __init__(self) -> None:
        self.step = Step([])
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> k, v [b, HK, tokens, D]

    def update(self, k, v, layer_idx, *args, **kwargs):
        before = self.kept.get(layer_idx, (k[:, :, :0], v[:, :, :0]))
        self.kept[layer_idx] = self.now = tuple(torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        return self, self

    def attend(self, q, scaling):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in self.now)
        new, total = q.shape[2], k.shape[2]
        hidden = ~torch.ones(new, total, dtype=torch.bool).tril(total - new)
        scores = (q @ k.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2)

    def decode(self, index, kv, queries, outputs):
        self.update(*torch.stack(kv, dim=1), index)
        found = self.attend(torch.stack(queries).flatten(1, 3).unsqueeze(2), math.log(2))  # queries are in base 2
        for output, row in zip(outputs, found, strict=True):
            output.copy_(row)


def run(served: ServedModel, cache: LosslessCache, ids: list[int], start: int) -> torch.Tensor:
    """Feed `ids` from position `start` on; logits [1, vocabulary] after the last."""
    hidden = served.embed(torch.tensor([ids]))
    positions = torch.arange(start, start + len(ids))[None]
    embeddings = served.rotary(hidden, positions)
    for index in range(served.layers):
        hidden = served.layer(index, hidden, positions, embeddings, cache)
    return served.head(hidden[:, -1])


def continue_greedily(served: ServedModel, prompt: list[int], chunks: list[int], new_tokens: int) -> list[int]:
    """The tokens that follow a prompt which is fed in chunks of these sizes."""
    cache, position, tokens = LosslessCache(), 0, []
    for size in chunks:
        logits = run(served, cache, prompt[position : position + size], position)
        position += size
    while True:
        tokens.append(int(logits.argmax()))
        if len(tokens) == new_tokens:
            return tokens
        logits = run(served, cache, tokens[-1:], position)
        position += 1
