"""What a model makes of texts, layer by layer: queries and keys before RoPE, and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.codec.rope import Rope
from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.model import ServedModel

HELD_OUT = 8  # every so many-th part of a window, its last, teaches nothing and is measured instead


@dataclass(frozen=True)
class Window:
    """A stretch of text in one layer, from position 0: q [HK, G, n, D], k and v [HK, n, D], fp32, on the CPU wherever the model
    is; q and k before RoPE."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float

    @property
    def taught(self) -> int:
        """The tokens before it teach, the others are held out."""
        return taught(self.k.shape[1])


def taught(tokens: int) -> int:
    """How many of a window's tokens teach, its first."""
    return tokens - tokens // HELD_OUT


class _Listener:
    """Stands in for a cache: one layer attends exactly, and what it attended with is kept."""

    def __init__(self) -> None:
        self.q: list[torch.Tensor] = []
        self.k = self.v = None

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> tuple[_Listener, _Listener]:
        k, v = k[0], v[0]
        self.k = k if self.k is None else torch.cat((self.k, k), 1)
        self.v = v if self.v is None else torch.cat((self.v, v), 1)
        return self, self

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        grouped, self.scaling = q[0].unflatten(0, (len(self.k), -1)), scaling
        self.q.append(grouped)
        return causal_attention(grouped, self.k, self.v, scaling).flatten(0, 1).transpose(0, 1).unsqueeze(0)


@torch.inference_mode()
def walk(model: ServedModel, windows: Sequence[list[int]], visit: Callable[[int, list[Window]], None],
         progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Calls visit(layer, what each window of token ids is there) for every layer in turn. Memory: hidden states of all tokens,
    and the queries, keys and values of one layer."""
    device = model.device
    rope = rope_of(model, GRANULE_TOKENS)
    hidden = [model.embed(torch.tensor([ids], device=device)) for ids in windows]
    for index in range(model.layers):
        found = []
        for states in hidden:
            listener = _Listener()
            for start in range(0, states.shape[1], GRANULE_TOKENS):
                chunk = states[:, start : start + GRANULE_TOKENS]
                positions = torch.arange(start, start + chunk.shape[1], device=device).unsqueeze(0)
                chunk.copy_(model.layer(index, chunk, positions, model.rotary(chunk, positions), listener))
            found.append(window(rope, listener))
        check_finite(model.name, index, found)
        visit(index, found)
        progress(index + 1, model.layers)


def check_finite(name: str, layer: int, windows: Sequence[Window]) -> None:
    """ValueError: nothing can be fitted to what is not finite, and a cache would refuse it too."""
    for what, said in (("q", "queries"), ("k", "keys"), ("v", "values")):
        if not all(getattr(window, what).isfinite().all() for window in windows):
            rule = f"{said} of layer {layer} are not finite"
            raise ValueError(f"model {name}: {rule}; check its weights, or give another --dtype")


def rope_of(model: ServedModel, page_tokens: int, device: torch.device | None = None) -> Rope:
    """With its tables on `device`; None = the model's."""
    rotary = model.module.model.rotary_emb
    return Rope(rotary.inv_freq.float().cpu(), float(rotary.attention_scaling), page_tokens, device or model.device)


def window(rope: Rope, heard: _Listener) -> Window:
    q = torch.cat(heard.q, 2)
    unturned_q = unturned(rope, q.flatten(0, 1).float()).view(q.shape)
    return Window(unturned_q.cpu(), unturned(rope, heard.k.float()).cpu(), heard.v.float().cpu(), heard.scaling)


def unturned(rope: Rope, x: torch.Tensor) -> torch.Tensor:
    """x fp32 [heads, n, D] of positions 0 .. n - 1 as it was before RoPE."""
    return _by_pages(rope.undo, x, rope.page_tokens)


def turned(rope: Rope, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `unturned`."""
    return _by_pages(rope.apply, x, rope.page_tokens)


def _by_pages(turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, page: int) -> torch.Tensor:
    n = x.shape[1]
    pages = F.pad(x, (0, 0, 0, -n % page)).unflatten(1, (-1, page)).transpose(0, 1)
    return turn(pages, torch.arange(len(pages), device=x.device)).transpose(0, 1).flatten(1, 2)[:, :n]
