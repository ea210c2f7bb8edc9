"""Fine-tuning a model to its own packed cache: keys and values are encoded and decoded in the training forward, and gradients
pass as if they were not (the straight-through estimator of Bengio, Leonard and Courville, 2013)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import Codec, HeadShape, make_codec
from bitkv_dist.model import fingerprint_of, loops_of

NAME = "bitkv_straight_through"


@contextmanager
def straight_through(model: PreTrainedModel, config: CacheConfig) -> Iterator[None]:
    """Inside, every attention of a transformers model sees keys and values as `config` would seal them, from position 0 on; a
    last page that is not full, and the sink, stay exact. Queries see even their newest keys by code: harder than decoding.

    Rows of a batch are whole sequences without padding. Attention dropout and caches are refused, and a calibration of other
    weights than those at entry. So are models that loop: an attention does not say in which loop it is called, and codec looped
    codes keys against those of a loop that has not run yet.
    """
    shape = model.config
    if (loops := loops_of(shape)) > 1:
        raise ValueError(f"total_ut_steps {loops}: a training forward does not number its loops; train a model without them")
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    parameter = next(model.parameters())
    sizes = shape.num_hidden_layers, 0, shape.num_key_value_heads, dim
    fingerprint = f"{fingerprint_of(model):016x}" if config.calibration else None
    heads = HeadShape(*sizes, parameter.dtype, parameter.device, fingerprint=fingerprint)
    config.check_model(shape.num_hidden_layers, dim, kv_heads=shape.num_key_value_heads)
    if config.eviction != "none":
        raise ValueError(f"cache.eviction {config.eviction}: a training forward sees all tokens; set it to none")
    codecs = [make_codec(config.for_layer(index), heads, index) for index in range(shape.num_hidden_layers)]

    def attention(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **_):
        if dropout:
            raise ValueError(f"dropout {dropout}: attention dropout is not served; put the model in eval mode or set it to 0")
        if key.shape[2] != query.shape[2]:
            rule = "a training forward takes no cache"
            raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} queries: {rule}; pass use_cache=False")
        if attention_mask is not None:
            raise ValueError("attention_mask: padding and custom masks are not served; give whole sequences of one length")
        coded = seen_through(codecs[module.layer_idx], config, key, value)
        out = F.scaled_dot_product_attention(query, *coded, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = shape._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def seen_through(codec: Codec, config: CacheConfig, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """k, v [B, HK, n, D] after encoding and decoding; their gradient is that of the result."""
    page, first = config.page_tokens, config.sink_rounded
    end = first + max(0, k.shape[2] - first) // page * page
    if end == first:
        return [k, v]
    with torch.no_grad():
        pages = [x[:, :, first:end].unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1) for x in (k, v)]
        count = (end - first) // page
        place = [list(range(first // page, end // page)) * len(k)] if codec.positional else []
        decoded = codec.decode(codec.encode(*(x.detach().contiguous() for x in pages), *place))
        found = [x.unflatten(0, (len(k), count)).transpose(1, 2).flatten(2, 3).to(k.dtype) for x in decoded]
    seen = []
    for x, coded in zip((k, v), found, strict=True):
        middle = x[:, :, first:end]
        seen.append(torch.cat((x[:, :, :first], middle + (coded - middle).detach(), x[:, :, end:]), 2))
    return seen
