"""Tiny random models of the served architectures, saved as directories the way a real model comes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

from bitkv_dist import ouro

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,  # so that attention is not flat and greedy tokens do not repeat at once
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 64}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": (Phi3Config, {"partial_rotary_factor": 0.5}),
}
LOOPED = {"ouro": (ouro.OuroConfig, {"total_ut_steps": 3, "initializer_range": 0.1})}


def save(folder: Path, architecture: str = "llama", seed: int = 0, **sizes) -> Path:
    """A model of `architecture` with the given sizes changed; returns the folder."""
    ouro.register()
    cls, special = (CONFIGS | LOOPED)[architecture]
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(cls(**SIZES | special | sizes)).save_pretrained(folder)
    return folder


def contracting(folder: Path, branch: float = 0.05, **sizes) -> Path:
    """A random model of 4 loops in which a loop changes little, as in a trained one: what attention and MLP add to the hidden
    state is `branch` of it. By construction, not by training: benchmarks/looped.py has a trained one."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "total_ut_steps": 4} | sizes
    model = AutoModelForCausalLM.from_pretrained(save(folder, "ouro", **sizes), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight /= model.model.embed_tokens.weight.std()
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(branch)
            layer.post_attention_layernorm_2.weight.fill_(branch)
    model.save_pretrained(folder)
    return folder


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(0, SIZES["vocab_size"], (tokens,), generator=generator).tolist()


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer of 256 bytes, a token each, and one special token "<e>" (256); returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<e>"])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>").save_pretrained(folder)
    return folder
