"""Shapes of models, as far as memory and time depend on them: the built-in table, or a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitkv_dist.rules import near_miss
from bitkv_dist.split import Split

WHOLE = Split()


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the served architectures. `layers`: those of the cache, of all loops. `hidden` is E, `intermediate` the
    width of its gated MLP."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool = False  # the LM head is the embedding table
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # an RMS norm of every query and key head (Qwen3)
    looped: bool = False  # Ouro: norms also behind attention and MLP, and a gate that could end the loops
    loops: int = 1  # of a token, over layers / loops layers of weights

    def layer_elements(self, split: Split = WHOLE) -> int:
        """Parameters of a decoder layer on one rank: norms, and biases behind a sum over ranks, whole."""
        queries = len(split.heads(self.heads, self.kv_heads)) * self.head_dim
        keys = len(split.kv_heads(self.kv_heads)) * self.head_dim
        outputs, columns = len(split.share(self.heads * self.head_dim)), len(split.share(self.intermediate))
        projections = self.hidden * (queries + 2 * keys + outputs + 3 * columns)
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * columns + self.hidden)
        norms = (4 if self.looped else 2) * self.hidden + self.head_norms * 2 * self.head_dim
        return projections + biases + norms

    def read_elements(self, split: Split = WHOLE) -> int:
        """Parameters that a decode step reads on one rank, in each loop anew: all but the embedding table, of which it looks
        rows up."""
        head = len(split.share(self.vocabulary)) * self.hidden
        return self.layers * self.layer_elements(split) + self.hidden + head

    def elements(self, split: Split = WHOLE) -> int:
        """Parameters that one rank holds."""
        own = split.embedding(self.vocabulary)
        kept_as_head = self.tied and own == split.share(self.vocabulary)
        read_again = (self.layers - self.layers // self.loops) * self.layer_elements(split)
        gate = self.looped * (self.hidden + 1)
        return self.read_elements(split) - read_again + gate + (0 if kept_as_head else len(own) * self.hidden)


# From the models' own config.json.
_LLAMA_8B = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True),
        ModelShape("llama-3.1-8b", **_LLAMA_8B, vocabulary=128256, positions=131072),
        ModelShape("llama-3-8b-1048k", **_LLAMA_8B, vocabulary=128256, positions=1048576),
        ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
        ModelShape("mistral-7b", **_LLAMA_8B, vocabulary=32768, positions=32768),
        ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960, head_norms=True),
        ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960, head_norms=True),
    )
}
# The same by the name on the hub, so that a configuration file plans without the network.
_HUB = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": "llama-3-8b-1048k",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}


def built_in(name: str) -> ModelShape | None:
    """The table's entry for a name in any case, or for a hub id."""
    return MODELS.get(_HUB.get(name, name.lower()))


def unknown(name: str) -> ValueError:
    """What to say about a name that is neither in the table nor a path."""
    return ValueError(f"model {name!r}: neither a directory nor in the table; {near_miss(name.lower(), MODELS)}")


def from_config(name: str, config: Any, head_dim: int, positions: int) -> ModelShape:
    """The shape that a transformers configuration of a served architecture describes."""
    kind = config.model_type
    bias = bool(getattr(config, "attention_bias", False))
    loops = getattr(config, "total_ut_steps", 1)
    return ModelShape(
        name=name,
        layers=config.num_hidden_layers * loops,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        positions=positions,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3", "ouro") and bias),
        output_bias=kind in ("llama", "qwen3", "ouro") and bias,
        mlp_bias=kind in ("llama", "ouro") and bool(getattr(config, "mlp_bias", False)),
        head_norms=kind == "qwen3",
        looped=kind == "ouro",
        loops=loops,
    )
