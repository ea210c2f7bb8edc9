"""The dense part of a model on a CPU, by our own kernels over the weights of the loaded model.

A decode step has a row per sequence. Its cost is reading the weights once, so they are read where they lie, in float32 or
bfloat16; everything is computed in float32, whatever the weights' type, and no number of rows or threads changes a bit.
A prompt has many rows: its matrix products are torch's, in the run's dtype, and only the small operations between them are
ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bitkv_dist import ouro
from bitkv_dist.kernels import dispatch
from bitkv_dist.kernels.cpu import dense
from bitkv_dist.split import Split

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache

WEIGHTS = (torch.float32, torch.bfloat16)


def unserved(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, split: Split) -> str | None:
    """Why the decode steps of a model are left to transformers' layers, or None; dtype: that of its weights."""
    if not dispatch.on_cpu(device):
        return "no compiled kernels for the device"
    if split.parts > 1:
        return f"tp {split.tp} with layout {split.layout} exchanges inside a layer"
    if dtype not in WEIGHTS:
        return f"{str(dtype).removeprefix('torch.')} weights"
    if config.model_type == ouro.MODEL_TYPE:
        return "looped layers with norms behind attention and MLP"
    return None if config.hidden_act == "silu" else f"activation {config.hidden_act}"


def linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """`module` over x [b, n, in]. In bfloat16 a single row goes with a second: alone, torch sums it in another order."""
    if x.dtype != torch.bfloat16 or x.shape[:2].numel() > 1:
        return module(x)
    return module(x.expand(2, -1, -1))[:1]


class Decoder:
    """Decode steps of one model, which it computes in float32, and layers of prompts."""

    def __init__(self, module: PreTrainedModel, head_dim: int) -> None:
        self.module, self.head_dim = module, head_dim
        self.kept: list[torch.Tensor] = []  # what the addresses below point to
        self.blocks = [self.block(layer, head_dim) for layer in module.model.layers]
        self.norm, self.eps = self.vector(module.model.norm.weight), module.model.norm.variance_epsilon
        self.matrix = self.matrices(module.lm_head, module.lm_head.out_features)[0]
        self.scaling = module.model.layers[0].self_attn.scaling
        self.base2 = self.scaling * math.log2(math.e)

    @torch.no_grad()
    def step(self, ids: torch.Tensor, positions: torch.Tensor, cache: PackedCache) -> torch.Tensor:
        """ids, positions int64 [rows, 1] of the sequences of `cache.step` -> logits fp32 [rows, vocabulary]."""
        hidden = self.module.model.embed_tokens(ids)[:, 0].float()
        angles = (part[:, 0].contiguous() for part in self.module.model.rotary_emb(hidden[:, None], positions))
        step = dense.Step(self.blocks[0], hidden, *angles)
        for index, block in enumerate(self.blocks):
            dense.project(block, step, self.base2)
            cache.decode(index, step.kv, step.queries, step.attended)
            dense.feed_forward(block, step)
        return dense.head(self.matrix, self.norm, self.eps, hidden)

    @torch.no_grad()
    def layer(
        self,
        index: int,
        module: torch.nn.Module,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: PackedCache,
    ) -> torch.Tensor:
        """A prompt's layer: hidden [b, n, E], float32 or bfloat16 -> [b, n, E]; angles fp32 (cosine, sine) [b, n, rotary dim].

        Torch's matrix products with the weights of `module`, layer `index` in hidden's dtype, and our own kernels between them,
        which compute in float32 and round once.
        """
        block, attention, mlp, shape = self.blocks[index], module.self_attn, module.mlp, (*hidden.shape[:2], -1, self.head_dim)
        normed = dense.norm(block.attention_norm, block.eps, hidden.contiguous())
        if hasattr(attention, "qkv_proj"):
            widths = [block.heads * block.dim, *[block.kv_heads * block.dim] * 2]
            q, k, v = (part.contiguous() for part in linear(attention.qkv_proj, normed).split(widths, -1))
        else:
            q, k, v = (linear(getattr(attention, f"{name}_proj"), normed) for name in "qkv")
        dense.place(block, *(part.expand(*hidden.shape[:2], -1).contiguous() for part in angles), q, k)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        handle, _ = cache.update(k, v, index)
        hidden = hidden + linear(attention.o_proj, handle.attend(q, self.scaling).flatten(2))
        normed = dense.norm(block.mlp_norm, block.eps, hidden)
        if hasattr(mlp, "gate_up_proj"):
            gate, up = (part.contiguous() for part in linear(mlp.gate_up_proj, normed).chunk(2, -1))
        else:
            gate, up = linear(mlp.gate_proj, normed), linear(mlp.up_proj, normed)
        dense.gate(gate, up)
        return hidden.add_(linear(mlp.down_proj, gate))

    # -- the weights, layer by layer

    def block(self, layer: torch.nn.Module, head_dim: int) -> dense.Block:
        attention, mlp, config = layer.self_attn, layer.mlp, self.module.config
        heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        if hasattr(attention, "qkv_proj"):
            qkv, gate_up = self.matrices(attention.qkv_proj, *widths), self.matrices(mlp.gate_up_proj, inner, inner)
        else:
            qkv = [
                self.matrices(getattr(attention, f"{name}_proj"), width)[0] for name, width in zip("qkv", widths, strict=True)
            ]
            gate_up = [self.matrices(part, inner)[0] for part in (mlp.gate_proj, mlp.up_proj)]
        norms = [
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(getattr(attention, name, None) for name in ("q_norm", "k_norm")),
        ]
        return dense.Block(
            heads, kv_heads, head_dim, 2 * len(self.module.model.rotary_emb.inv_freq), layer.input_layernorm.variance_epsilon,
            *(None if norm is None else self.vector(norm.weight).data_ptr() for norm in norms),
            *qkv, *self.matrices(attention.o_proj, config.hidden_size), *gate_up,
            *self.matrices(mlp.down_proj, config.hidden_size),
        )  # fmt: skip

    def matrices(self, linear: torch.nn.Linear, *widths: int) -> list[dense.Matrix]:
        """A linear layer, cut into the given numbers of outputs."""
        weight = linear.weight.detach()
        assert weight.is_contiguous()
        self.kept.append(weight)
        biases = [None] * len(widths) if linear.bias is None else self.vector(linear.bias).split(widths)
        return [dense.matrix(*pair) for pair in zip(weight.split(widths), biases, strict=True)]

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Norms and biases: few numbers, float32."""
        self.kept.append(weight.detach().float().contiguous())
        return self.kept[-1]
