"""An engine whose cache is full without a prefill: a random model of a given attention shape, and random keys and values of
which a few granules per layer are encoded and the others are copies. Content changes no bytes, and the work a little: see
`packed_cache` in decode_attention.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bitkv_dist import attention
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.decoder import Decoder, unserved
from bitkv_dist.engine import Engine
from bitkv_dist.layer import PackedLayer
from bitkv_dist.model import ServedModel
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.split import Split

DISTINCT_GRANULES = 8  # encoded per layer and sequence
NOISE_NUMBERS = 1_000_003  # that weights repeat: a prime, so that no two rows of a matrix are alike
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model; the default is Llama-3.1-8B but for its number of layers and its vocabulary."""

    layers: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 4096


def random_model(shape: Shape, positions: int, mesh: Mesh) -> ServedModel:
    """Bfloat16 weights, as a checkpoint has them, computed with in float32; float32 where there are no compiled kernels."""
    attention.register()
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    compiled = unserved(config, torch.bfloat16, CPU, Split()) is None
    with torch.device("meta"):
        kept = torch.bfloat16 if compiled else torch.float32
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=kept)
    module = module.to_empty(device=CPU).eval()
    module.model.rotary_emb = type(module.model.rotary_emb)(config)  # its buffers were empty too
    noise = 0.02 * torch.randn(NOISE_NUMBERS, generator=torch.Generator().manual_seed(0))
    taken = 0
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            for piece in parameter.view(-1).split(NOISE_NUMBERS // 2):  # elsewhere in the noise than any other matrix
                start = taken % (NOISE_NUMBERS // 2)
                piece.copy_(noise[start : start + len(piece)])
                taken += len(piece)
    return ServedModel(
        name="random", config=module.config, module=module, tokenizer=None, generation_config=module.generation_config,
        dtype=torch.float32, device=CPU, fingerprint=0, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, local_heads=shape.heads, local_kv_heads=shape.kv_heads, first_kv_head=0,
        max_positions=positions, split=mesh.split, decoder=Decoder(module, shape.head_dim) if compiled else None,
    )  # fmt: skip


def filled_engine(model: ServedModel, cache: CacheConfig, mesh: Mesh, lengths: list[int], new_tokens: int) -> Engine:
    """An engine that holds a sequence of each length and is to be fed token 0 of all; room for `new_tokens` more each. Its
    `decode` gives one token a call."""
    engine = Engine(model, cache, mesh, GenerateConfig(max_new_tokens=new_tokens, ignore_eos=True, prefill="packed"))
    engine.open([[0] * length for length in lengths])
    for layer in engine.cache.layers:
        for sequence, length in enumerate(lengths):
            fill(layer, sequence, length)
    engine.pending = [[0] for _ in lengths]
    engine.config = replace(engine.config, max_new_tokens=1)
    return engine


def fill(layer: PackedLayer, sequence: int, length: int) -> None:
    """Pages and exact rows of `length` tokens; the same ones on every rank, whichever of them it owns."""
    config, heads, state = layer.cache.config, layer.cache.heads, layer.states[sequence]
    chance = torch.Generator().manual_seed(1000 * layer.index + sequence)
    page_tokens = config.page_tokens
    pages = GRANULE_TOKENS // page_tokens
    k, v = drawn((DISTINCT_GRANULES * pages, heads.kv_heads, page_tokens, heads.head_dim), chance)
    records = layer.codec.encode(k, v).unflatten(0, (DISTINCT_GRANULES, pages))
    for start in range(state.sink, state.sealed_at(length), page_tokens):
        granule, place = divmod(start // page_tokens, pages)
        if layer.cache.shard.owns(granule, sequence):
            state.sealed.page(granule, place).copy_(records[granule % DISTINCT_GRANULES, place])
    rows = min(length, state.sink) + max(0, length - state.sealed_at(length))
    state.restore(length, drawn((heads.kv_heads, rows, heads.head_dim), chance).to(heads.dtype))


def drawn(shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    """Keys and values fp32 [2, *shape]; keys have channel means of twice their spread, as after RoPE the slow channels have."""
    kv = torch.randn(2, *shape, generator=chance)
    kv[0] += 2 * torch.randn(shape[-1], generator=chance)
    return kv
