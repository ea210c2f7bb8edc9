"""Prompts read in chunks through a model's layers, with the attention of an exact prefill and no engine around them."""

from __future__ import annotations

import torch

from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.model import ServedModel


class Chunks:
    """Keys and values of one sequence."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}  # layer -> [2, HK, tokens, D]

    def update(self, k, v, layer_idx, *args, **kwargs):
        now = torch.cat((k, v))
        self.now = self.kept[layer_idx] = torch.cat((self.kept[layer_idx], now), 2) if layer_idx in self.kept else now
        return self, self

    def attend(self, q, scaling):
        grouped = q[0].unflatten(0, (self.now.shape[1], -1))
        return causal_attention(grouped, *self.now, scaling).flatten(0, 1).transpose(0, 1)[None]


def read(served: ServedModel, prompt: list[int], chunks: list[int]) -> torch.Tensor:
    """The hidden states [n, E], before the last norm, of a prompt that is read in chunks of these sizes."""
    cache, found = Chunks(), []
    for ids, positions in zip(torch.tensor(prompt).split(chunks), torch.arange(len(prompt)).split(chunks), strict=True):
        hidden = served.embed(ids[None])
        angles = served.rotary(hidden, positions[None])
        for index in range(served.layers):
            hidden = served.layer(index, hidden, positions[None], angles, cache)
        found.append(hidden[0])
    return torch.cat(found)
