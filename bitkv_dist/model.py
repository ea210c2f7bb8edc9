"""Loads a Hugging Face model, or a rank's part of one, and serves it layer by layer.

What cannot be served correctly is refused by name in `check`, before any weight is read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from bitkv_dist import attention, checkpoint, ouro
from bitkv_dist.decoder import Decoder, unserved
from bitkv_dist.shards import Ranks, Shards, shard
from bitkv_dist.split import Split, check_tp
from bitkv_dist.widened import Widened

SERVED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    ouro.MODEL_TYPE: "OuroForCausalLM",
}
# These give a position the same angle whatever the length of the text; "dynamic" and "longrope" do not, and a key that is
# sealed in the cache cannot be rotated again.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LOADING = threading.Lock()  # from_pretrained patches globals of transformers while it runs
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")
_FINGERPRINT_BLOCKS, _FINGERPRINT_BLOCK = 32, 64


@dataclass
class ServedModel:
    """A model in eval mode. Head counts are global; `local_*` and `first_kv_head` describe this rank's shard.

    layers: those of the cache. Of `loops` loops over the module's layers, each has its own: layer i is the module's i modulo
    layers / loops.
    """

    name: str
    config: PreTrainedConfig
    module: PreTrainedModel
    tokenizer: object | None
    generation_config: GenerationConfig
    dtype: torch.dtype
    device: torch.device
    fingerprint: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    local_heads: int
    local_kv_heads: int
    first_kv_head: int
    max_positions: int
    split: Split = field(default_factory=Split)
    decoder: Decoder | None = None  # decode steps by our own kernels; None: by the module's layers
    undecoded: str | None = None  # why by these
    widened: Widened | None = None  # the module's weights in `dtype`, where they are kept in another type
    shards: Shards | None = None  # of a model whose weights several ranks share
    loops: int = 1

    @property
    def weights(self) -> torch.dtype:
        """What the weights are kept in."""
        return self.module.lm_head.weight.dtype

    def heads_of_sequence_ranks(self) -> list[range]:
        """Of each SP rank, the query heads that its output projection reads, counted from the first of this TP rank."""
        first = self.first_kv_head * (self.heads // self.kv_heads)
        touched = [place.touched_heads(self.heads, self.head_dim) for place in self.split.sequence_ranks()]
        return [range(heads.start - first, heads.stop - first) for heads in touched]

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, n] -> hidden [b, n, E]."""
        return self.module.model.embed_tokens(ids).to(self.dtype)

    @torch.no_grad()
    def rotary(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [b, n] -> (cos, sin), each [b, n, rotary dim], on hidden's device, in its dtype or, for our own kernels,
        float32."""
        return self.module.model.rotary_emb(hidden if self.decoder is None else hidden[:, :0].float(), position_ids)

    @torch.no_grad()
    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache,
        round_rows: int | None = None,
    ) -> torch.Tensor:
        """One decoder layer: hidden [b, n, E] -> [b, n, E].

        round_rows: None where all SP ranks bring the same rows; else what the one with the most brings, and those without any
        call `idle`.

        `cache.update(k, v, layer_idx)` gets k, v [b, HK_local, n, D] and returns its handle twice; the handle's
        `attend(q [b, H_local, n, D], scaling=)` gives [b, n, H_local, D].
        """
        loop, place = divmod(index, self.layers // self.loops)
        layer = self.widened.layer(place) if self.widened else self.module.model.layers[place]
        if self.shards is not None and self.split.helix:
            self.shards.round_rows = round_rows
        if self.decoder is not None:
            return self.decoder.layer(index, layer, hidden, position_embeddings, cache)
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            past_key_values=ouro.LoopSlots(cache, index - place) if loop else cache,
            position_embeddings=position_embeddings,
        )
        ends_a_loop = index + 1 < self.layers and (index + 1) % (self.layers // self.loops) == 0
        return self.module.model.norm(hidden) if ends_a_loop else hidden  # after the last loop the head has it

    @torch.no_grad()
    def idle(self, index: int, round_rows: int) -> None:
        """Take part in a layer over rows of other SP ranks, where their weights are shared with this one."""
        if self.shards is None or not self.split.helix:
            return
        self.shards.round_rows = round_rows
        layer = self.module.model.layers[index % (self.layers // self.loops)]
        for part, width in ((layer.self_attn.o_proj, self.local_heads * self.head_dim), (layer.mlp, self.config.hidden_size)):
            part(torch.empty(1, 0, width, dtype=self.dtype, device=self.device))

    @torch.no_grad()
    def step(self, ids: torch.Tensor, position_ids: torch.Tensor, cache) -> torch.Tensor:
        """One token of each sequence of `cache.step` through all layers.

        ids, position_ids [b, 1] -> fp32 logits [b, vocabulary].
        """
        if self.decoder is not None:
            return self.decoder.step(ids, position_ids, cache)
        hidden = self.embed(ids)
        rotary = self.rotary(hidden, position_ids)
        for index in range(self.layers):
            hidden = self.layer(index, hidden, position_ids, rotary, cache)
        return self.head(hidden[:, 0])

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head for these rows only: hidden [b, E] -> fp32 logits [b, vocabulary]."""
        normed = self.module.model.norm(hidden)
        return self.widened.head(normed) if self.widened else self.module.lm_head(normed).float()


def check(source: str, tp: int = 1, ranks: int | None = None) -> PreTrainedConfig:
    """The configuration of a model that can be served on `tp` tensor-parallel ranks, of `ranks` in all; ValueError before
    weights load."""
    ouro.register()
    model_type = checkpoint.read_model_type(source)
    if model_type not in SERVED:
        raise ValueError(f"model {source}: architecture {model_type} is not served; use one of {', '.join(SERVED)}")
    config = checkpoint.read_config(source)
    _check_features(source, config)
    check_tp(source, tp, config.num_attention_heads, config.num_key_value_heads, ranks)
    return config


def load(
    source: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    weights: str = "auto",
    ranks: Ranks | None = None,
    progress: checkpoint.Progress | None = None,
) -> ServedModel:
    """Load `source` for this rank. dtype None: float32 on a CPU, bfloat16 elsewhere. weights: see GenerateConfig. ranks: None =
    the whole model, else this rank's part of it (see split.py).

    Files are memory-mapped, and of them only what is this rank's is read. Weights stored in what they are kept in stay mapped
    on a CPU: the ranks of a host share one copy of them.
    """
    split = ranks.split if ranks else Split()
    check(source, split.tp)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: must be float32, bfloat16 or float16")
    place = checkpoint.localise(source, progress)
    config = checkpoint.read_config(source)  # as written by the conversion, so that the first run equals all later ones
    kept = _kept_dtype(place, config, dtype, device, weights, split)
    module = _read_weights(source, place, config, kept if split.parts == 1 else "auto")
    fingerprint = fingerprint_of(module, kept)
    shards = shard(module, ranks, head_dim_of(config), kept) if split.parts > 1 else None
    module.to(device)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    undecoded = unserved(config, kept, device, split)
    return ServedModel(
        name=source,
        config=module.config,
        module=module,
        tokenizer=checkpoint.read_tokenizer(place),
        generation_config=module.generation_config,
        dtype=dtype,
        device=device,
        fingerprint=fingerprint,
        layers=layers_of(config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim_of(config),
        local_heads=len(split.heads(heads, kv_heads)),
        local_kv_heads=len(split.kv_heads(kv_heads)),
        first_kv_head=split.kv_heads(kv_heads).start,
        max_positions=max_positions_of(config),
        split=split,
        decoder=None if undecoded else Decoder(module, head_dim_of(config)),
        undecoded=undecoded,
        widened=Widened(module) if kept != dtype else None,
        shards=shards,
        loops=loops_of(config),
    )


def _kept_dtype(
    place, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, weights: str, split: Split
) -> torch.dtype:
    """`dtype`, or bfloat16 under computing in float32, which only our own decode kernels do."""
    if weights == "model" or dtype == torch.bfloat16:
        return dtype
    why = unserved(config, torch.bfloat16, device, split)
    if why is None and dtype != torch.float32:
        why = f"dtype {str(dtype).removeprefix('torch.')}"
    if weights == "bfloat16" and why:
        raise ValueError(f"weights bfloat16: are served with dtype float32 on a CPU, by compiled kernels ({why}); leave it out")
    return torch.bfloat16 if weights == "bfloat16" or (not why and checkpoint.stored_in_bfloat16(place)) else dtype


def head_dim_of(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def loops_of(config: PreTrainedConfig) -> int:
    """How often a token passes the layers."""
    return config.total_ut_steps if config.model_type == ouro.MODEL_TYPE else 1


def layers_of(config: PreTrainedConfig) -> int:
    """Layers that keep keys and values of their own: each of the model's, in each of its loops."""
    return config.num_hidden_layers * loops_of(config)


def max_positions_of(config: PreTrainedConfig) -> int:
    """YaRN checkpoints often keep the length before scaling in max_position_embeddings."""
    positions, rope = config.max_position_embeddings, config.rope_parameters
    if rope["rope_type"] == "yarn" and rope.get("factor"):
        return max(positions, int(rope["factor"] * rope["original_max_position_embeddings"]))
    return positions


def fingerprint_of(module: PreTrainedModel, kept: torch.dtype | None = None) -> int:
    """64 bits over the configuration and, for each parameter, name, shape and a few blocks of its values.

    Reads a handful of pages per parameter, so memory-mapped weights stay on disk. Values are hashed as float32: a bfloat16
    checkpoint has the same fingerprint whether it runs in bfloat16 or in float32. kept: what they are going to be rounded to.
    """
    config = {key: kept for key, kept in module.config.to_dict().items() if key not in _VOLATILE_CONFIG}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8)
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name}{list(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        last = max(0, flat.numel() - _FINGERPRINT_BLOCK)
        for start in sorted({last * block // (_FINGERPRINT_BLOCKS - 1) for block in range(_FINGERPRINT_BLOCKS)}):
            block = flat[start : start + _FINGERPRINT_BLOCK]
            digest.update(block.to(kept or block.dtype).float().cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _check_features(source: str, config: PreTrainedConfig) -> None:
    def refuse(feature: str, remedy: str) -> None:
        raise ValueError(f"model {source}: {feature} is not served; {remedy}")

    architectures = config.architectures or [SERVED[config.model_type]]
    if architectures != [SERVED[config.model_type]]:
        refuse(f"architecture {', '.join(architectures)}", f"use a {SERVED[config.model_type]}")
    if getattr(config, "is_encoder_decoder", False):
        refuse("an encoder-decoder", "use a decoder-only model")
    if getattr(config, "quantization_config", None) is not None:
        refuse("a quantized checkpoint", "use the unquantized weights or a .gguf file")
    if (window := _sliding_window(config)) is not None:
        refuse(f"sliding_window {window}", "use a model with full attention in every layer")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in STATIC_ROPE:
        refuse(f"rope_type {rope_type}", f"its angles change with the length; use one of {', '.join(STATIC_ROPE)}")
    for softcap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, softcap, None) is not None:
            refuse(f"{softcap} {getattr(config, softcap)}", "use a model without it")
    if config.model_type == ouro.MODEL_TYPE and config.total_ut_steps < 1:
        refuse(f"total_ut_steps {config.total_ut_steps}", "it must be at least 1")
    if getattr(config, "early_exit_threshold", 1.0) < 1:
        refuse(f"early_exit_threshold {config.early_exit_threshold}", "all loops run; set it to 1.0")
    head_dim = head_dim_of(config)
    odd_part = head_dim // (head_dim & -head_dim)
    if head_dim % 8 or odd_part not in (1, 3, 5, 7):
        refuse(f"head_dim {head_dim}", "it must be a multiple of 8 and a power of two times 1, 3, 5 or 7")
    if config.num_attention_heads % config.num_key_value_heads:
        refuse(
            f"num_attention_heads {config.num_attention_heads} with num_key_value_heads {config.num_key_value_heads}",
            "the second must divide the first",
        )


def _sliding_window(config: PreTrainedConfig) -> int | None:
    """The window, if it ever hides a token. Phi3 and Mistral use it in every layer, Qwen in those that say so."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_positions_of(config):
        return None
    layer_types = getattr(config, "layer_types", None)
    return window if layer_types is None or "sliding_attention" in layer_types else None


def _read_weights(source: str, place, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    """from_pretrained maps weights that already have `dtype` (measured: nothing private, nothing read) and copies only
    converted ones; "auto": what they are stored in."""
    attention.register()
    if dtype == "auto":
        config.dtype = None  # else transformers takes what config.json says, whatever the files hold
    if hasattr(config, "sliding_window"):
        config.sliding_window = None  # `check` let it pass, so it hides nothing; attention refuses to see one
    try:
        with _LOADING, checkpoint.quiet():
            module, loaded = AutoModelForCausalLM.from_pretrained(
                place, config=config, dtype=dtype, attn_implementation=attention.NAME, output_loading_info=True
            )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model {source}: its weights cannot be read ({checkpoint.brief(error)})") from error
    # transformers fills what is missing with random numbers and drops what it does not know, both with a mere warning.
    stray = [name for name in loaded["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")]
    for complaint, names in (
        ("missing", loaded["missing_keys"]),
        ("of the wrong shape", loaded["mismatched_keys"]),
        ("not part of the model", stray),
    ):
        if names:
            raise ValueError(f"model {source}: {len(names)} weights are {complaint} (the first: {min(names)})")
    return module.eval()

