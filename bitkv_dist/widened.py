"""Float32 layers of a model whose weights are kept in bfloat16, for prompts: one layer's worth of memory.

Prefill walks the layers, so widening a layer costs little against all the rows that then go through it.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

HEAD_OUTPUTS = 4096  # of the LM head that are widened at a time


class Widened:
    """`layer(i)` has the weights of layer i until the next call; no value differs from the kept ones."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module, self.index = module, None
        self.room = copy.deepcopy(module.model.layers[0]).float()

    @torch.no_grad()
    def layer(self, index: int) -> torch.nn.Module:
        if index != self.index:
            for wide, kept in zip(self.room.parameters(), self.module.model.layers[index].parameters(), strict=True):
                wide.copy_(kept)
            self.room.self_attn.layer_idx = self.index = index
        return self.room

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden fp32 [b, E] after the last norm -> logits fp32 [b, vocabulary]"""
        pieces = self.module.lm_head.weight.split(HEAD_OUTPUTS)
        return torch.cat([torch.nn.functional.linear(hidden, piece.float()) for piece in pieces], dim=-1)
