"""A looped language model: one stack of Llama layers that every token passes several times, with the same weights.

This is the layout of the Ouro models (Zhu et al., "Scaling Latent Reasoning via Looped Language Models", arXiv 2510.25741),
which transformers does not have: norms before and behind attention and MLP, the final norm after every loop, and keys and
values of their own in every loop, in cache slot loop * layers + layer. All loops always run; the gate that could end them
early is loaded and not asked.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel, LlamaRMSNorm

MODEL_TYPE = "ouro"


@strict
class OuroConfig(LlamaConfig):
    """A Llama configuration whose `num_hidden_layers` layers of weights run `total_ut_steps` times."""

    model_type = MODEL_TYPE

    total_ut_steps: int = 4
    early_exit_threshold: float = 1.0  # of the gate's probability that a token needs no further loop; 1 = never


class LoopSlots:
    """A cache as one loop sees it: the slots of the layers start at `first`."""

    def __init__(self, cache: Any, first: int) -> None:
        self.cache, self.first = cache, first

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args, **kwargs) -> tuple[Any, Any]:
        return self.cache.update(k, v, self.first + layer_idx, *args, **kwargs)


class OuroDecoderLayer(LlamaDecoderLayer):
    """h + norm(attention(norm(h))), then the same with the MLP."""

    def __init__(self, config: OuroConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attended)
        return hidden_states + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(hidden_states)))


class OuroModel(LlamaModel):
    """The stack in its loops: ids [b, n] -> hidden [b, n, E] after the last norm."""

    config_class = OuroConfig

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OuroDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        loops, stack = self.config.total_ut_steps, len(self.layers)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        held = 0
        if past_key_values is not None:
            held = past_key_values.get_seq_length()
            past_key_values.layers += [DynamicLayer() for _ in range(loops * stack - len(past_key_values.layers))]
        if position_ids is None:
            position_ids = torch.arange(held, held + hidden.shape[1], device=hidden.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        rotary = self.rotary_emb(hidden, position_ids)
        for loop in range(loops):
            slots = None if past_key_values is None else LoopSlots(past_key_values, loop * stack)
            for layer in self.layers:
                hidden = layer(
                    hidden, attention_mask=mask, position_ids=position_ids, past_key_values=slots, position_embeddings=rotary,
                    **kwargs,
                )  # fmt: skip
            hidden = self.norm(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class OuroForCausalLM(LlamaForCausalLM):
    """With a head on the hidden states of the last loop."""

    config_class = OuroConfig

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.post_init()


def register() -> None:
    """Make "ouro" known to transformers. Explicit, so that importing this package changes nothing; idempotent."""
    AutoConfig.register(MODEL_TYPE, OuroConfig, exist_ok=True)
    AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
