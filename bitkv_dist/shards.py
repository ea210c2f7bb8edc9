"""A rank's part of a model, in place of the whole: views of the mapped weights, and layers that exchange the rest.

Nothing is copied on a CPU: of a file that all ranks map, each touches its own slices. A split matrix is cut by its outputs
where each rank goes on with some of them (queries, keys, values, the MLP's columns, the logits), and by its inputs where all
ranks need the sum of all parts (the output projection, the MLP's way back).
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitkv_dist.split import Split


class Ranks(Protocol):
    """The collectives that sharded layers need. `everyone`: over all ranks, else over this TP group."""

    split: Split

    def sum(self, t: Tensor, everyone: bool) -> Tensor:
        """The sum of all ranks' t, the same bits on each."""

    def gather(self, t: Tensor, everyone: bool) -> Tensor:
        """[*s] -> [ranks, *s]"""

    def gather_sp(self, t: Tensor) -> Tensor:
        """[*s] -> [sp, *s]"""

    def swap_sp(self, t: Tensor) -> Tensor:
        """[sp, *s], t[i] for SP rank i -> [sp, *s], t[i] from SP rank i."""


class Shards:
    """What the sharded layers of a model have in common.

    round_rows: None where all SP ranks bring the same rows; in a round of an exact prefill each brings its own, at most so
    many.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.split, self.ranks = ranks.split, ranks
        self.round_rows: int | None = None

    def sum(self, part: Tensor, bias: Tensor | None) -> Tensor:
        found = self.ranks.sum(part, self.split.helix)
        return found if bias is None else found + bias

    def sum_rows(self, parts: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """The first `rows` of this SP rank's rows of the sum of all ranks' parts [sp, round_rows, E] -> [1, rows, E].

        Each rank sends the others their rows alone, half of what a sum over all ranks sends, and adds up in the order of the
        ranks.
        """
        first, *others = self.ranks.swap_sp(parts)
        for other in others:
            first += other
        found = self.ranks.sum(first, False)[None, :rows]
        return found if bias is None else found + bias

    def padded(self, rows: Tensor) -> Tensor:
        """[n, width] -> [round_rows, width]"""
        return F.pad(rows, (0, 0, 0, self.round_rows - len(rows)))


class OutputShard(nn.Module):
    """The output projection: this TP rank's heads [b, n, H D] -> [b, n, E].

    Uses only the inputs that are this rank's share: of what a decode step's attention gives, the others may be anything.
    """

    def __init__(self, linear: nn.Linear, first_input: int, shards: Shards) -> None:
        """first_input: of the first head that this TP rank attends with."""
        super().__init__()
        inputs = [place.share(linear.in_features) for place in shards.split.sequence_ranks()]
        own = inputs[shards.split.sp_rank]
        self.weight, self.bias, self.shards = frozen(linear.weight[:, own.start : own.stop]), linear.bias, shards
        self.inputs = [slice(share.start - first_input, share.stop - first_input) for share in inputs]  # of each SP rank
        self.width = max(map(len, inputs))

    def forward(self, attended: Tensor) -> Tensor:
        shards, own = self.shards, self.inputs[self.shards.split.sp_rank]
        if shards.round_rows is None:
            return shards.sum(F.linear(attended[..., own], self.weight), self.bias)
        sent = attended.new_zeros(shards.split.sp, shards.round_rows, self.width)
        for place, inputs in zip(sent, self.inputs, strict=True):
            part = attended[0, :, inputs]
            place[: part.shape[0], : part.shape[1]] = part
        rows = shards.ranks.swap_sp(sent)[..., : own.stop - own.start]  # [sp, round_rows, share]
        return shards.sum_rows(F.linear(rows, self.weight), self.bias, attended.shape[1])


class MlpShard(nn.Module):
    """A gated MLP of this rank's columns: [b, n, E] -> [b, n, E], summed over the ranks."""

    def __init__(self, mlp: nn.Module, shards: Shards) -> None:
        super().__init__()
        self.inner, self.bias, self.shards = mlp, mlp.down_proj.bias, shards
        own = shards.split.share(mlp.down_proj.in_features)
        if hasattr(mlp, "gate_up_proj"):
            mlp.gate_up_proj = Stacked(mlp.gate_up_proj, [own, shifted(own, mlp.down_proj.in_features)])
        else:
            for name in ("gate_proj", "up_proj"):
                keep_outputs(getattr(mlp, name), own)
        mlp.down_proj.weight, mlp.down_proj.bias = frozen(mlp.down_proj.weight[:, own.start : own.stop]), None

    def forward(self, hidden: Tensor) -> Tensor:
        shards = self.shards
        if shards.round_rows is None:
            return shards.sum(self.inner(hidden), self.bias)
        rows = shards.ranks.gather_sp(shards.padded(hidden[0]))  # [sp, round_rows, E]
        return shards.sum_rows(self.inner(rows), self.bias, hidden.shape[1])


class Stacked(nn.Module):
    """Some ranges of the outputs of a linear layer, one after the other."""

    def __init__(self, linear: nn.Linear, outputs: list[range]) -> None:
        super().__init__()
        assert linear.bias is None
        self.weights = nn.ParameterList(frozen(linear.weight[own.start : own.stop]) for own in outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, weight) for weight in self.weights], dim=-1)


class EmbeddingShard(nn.Module):
    """Rows of the embedding table, split over the TP ranks: ids -> hidden states, of which one rank knows each."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.own = ranks, ranks.split.embedding(embedding.num_embeddings)
        self.weight = frozen(embedding.weight[self.own.start : self.own.stop])

    def forward(self, ids: Tensor) -> Tensor:
        here = (ids >= self.own.start) & (ids < self.own.stop)
        found = F.embedding(torch.where(here, ids - self.own.start, 0), self.weight)
        return self.ranks.sum(torch.where(here.unsqueeze(-1), found, 0), False)


class HeadShard(nn.Module):
    """The LM head: hidden [b, E] -> all logits [b, vocabulary] on every rank."""

    def __init__(self, weight: nn.Parameter, vocabulary: int, shards: Shards) -> None:
        """weight: this rank's rows."""
        super().__init__()
        self.weight, self.shards = weight, shards
        self.outputs = [place.share(vocabulary) for place in shards.split.sharers()]
        self.width = max(map(len, self.outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        part = F.linear(hidden, self.weight)
        gathered = self.shards.ranks.gather(F.pad(part, (0, self.width - part.shape[1])), self.shards.split.helix)
        pieces = sorted(zip(self.outputs, gathered, strict=True), key=lambda piece: piece[0].start)
        return torch.cat([logits[:, : len(own)] for own, logits in pieces], dim=-1)


def shard(module: nn.Module, ranks: Ranks, head_dim: int, dtype: torch.dtype) -> Shards:
    """Replace the weights of a causal LM by this rank's part of them, in `dtype`."""
    shards, split, config = Shards(ranks), ranks.split, module.config
    kv_heads = split.kv_heads(config.num_key_value_heads)
    heads = split.heads(config.num_attention_heads, config.num_key_value_heads)
    queries, keys = scaled(heads, head_dim), scaled(kv_heads, head_dim)
    for layer in module.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            first_key = config.num_attention_heads * head_dim
            first_value = first_key + config.num_key_value_heads * head_dim
            outputs = [queries, shifted(keys, first_key), shifted(keys, first_value)]
            attention.qkv_proj = Stacked(attention.qkv_proj, outputs)
            attention.config, attention.num_key_value_heads = copy.copy(attention.config), len(kv_heads)
            attention.config.num_attention_heads = len(heads)
        else:
            for name, own in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                keep_outputs(getattr(attention, name), own)
        attention.o_proj = OutputShard(attention.o_proj, queries.start, shards)
        layer.mlp = MlpShard(layer.mlp, shards)
    table, head = module.model.embed_tokens, module.lm_head
    own = split.share(config.vocab_size)
    rows = frozen(head.weight[own.start : own.stop])
    module.model.embed_tokens = EmbeddingShard(table, ranks)
    if table.weight is head.weight and own == split.embedding(config.vocab_size):
        rows = module.model.embed_tokens.weight
    module.lm_head = HeadShard(rows, config.vocab_size, shards)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return shards


def keep_outputs(linear: nn.Linear, own: range) -> None:
    """Only these outputs of a linear layer, biases included."""
    linear.weight = frozen(linear.weight[own.start : own.stop])
    if linear.bias is not None:
        linear.bias = frozen(linear.bias[own.start : own.stop])


def frozen(weight: Tensor) -> nn.Parameter:
    """A view of a weight as a parameter of its own."""
    return nn.Parameter(weight.detach(), requires_grad=False)


def scaled(heads: range, head_dim: int) -> range:
    """The dims of some heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def shifted(own: range, start: int) -> range:
    return range(own.start + start, own.stop + start)
