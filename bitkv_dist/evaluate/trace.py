"""True queries, keys and values of a prompt, layer by layer, as an exact prefill computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.model import ServedModel


class Trace(NamedTuple):
    """One layer of a prompt of T tokens, after RoPE, in the model's dtype: q [HK, G, T, D]; k, v [HK, T, D]."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float


class Recorder:
    """A cache that attends exactly and keeps what the last layer gave it; passed to the model's layers as `past_key_values`."""

    def __init__(self) -> None:
        self.last: Trace | None = None

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args, **kwargs) -> tuple[Recorder, Recorder]:
        self.layer, self.k, self.v = layer_idx, k[0], v[0]
        return self, self

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, H, T, D] -> [1, T, H, D]."""
        grouped = q[0].unflatten(0, (self.k.shape[0], -1))
        self.last = Trace(self.layer, grouped, self.k, self.v, scaling)
        return causal_attention(grouped, self.k, self.v, scaling).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def traces(model: ServedModel, ids: list[int]) -> Iterator[Trace]:
    """Walks the prompt through the layers and yields each in turn; memory is that of one layer."""
    recorder = Recorder()
    positions = torch.arange(len(ids), device=model.device).unsqueeze(0)
    hidden = model.embed(torch.tensor([ids], device=model.device))
    rotary = model.rotary(hidden, positions)
    for index in range(model.layers):
        hidden = model.layer(index, hidden, positions, rotary, recorder)
        yield recorder.last
