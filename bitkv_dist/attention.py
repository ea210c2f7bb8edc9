"""The attention function "bitkv": hands the query to the cache that holds the keys and values.

transformers calls `k, v = cache.update(k, v, layer_idx)` and then, at once, the registered attention function with what
`update` returned. Our caches return themselves as both, so `key` and `value` here are one opaque handle with an `attend`
method, and no modeling file is patched.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

NAME = "bitkv"

# What the five served architectures pass on and attention does not need: the cache knows its own positions.
_IRRELEVANT = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})


def register() -> None:
    """Make "bitkv" known to transformers. Explicit, so that importing this package changes nothing; idempotent."""
    AttentionInterface.register(NAME, attention)
    # Without a mask function of its own the name would fall back to one that drops padding silently.
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key,
    value,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **features,
) -> tuple[torch.Tensor, None]:
    """query [B, H, n, D]; key is value: the cache's handle. Returns ([B, n, H, D] in the model's dtype, no weights).

    Whatever would change the result and is not served (masks, dropout, windows, softcaps, sinks, a keyword nobody
    knows) raises ValueError instead of being ignored.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: padding and custom masks are not served; pass each sequence at its own length")
    if dropout:
        raise ValueError(f"dropout {dropout}: attention dropout is not served; put the model in eval mode")
    for name, given in features.items():
        if given is not None and name not in _IRRELEVANT:
            raise ValueError(f"{name} {_brief(given)}: this attention feature is not served; use a model without it")
    if key is not value or not hasattr(key, "attend"):
        raise ValueError(f"cache {type(key).__name__}: attention 'bitkv' needs a cache whose update() returns a handle")
    return key.attend(query, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _brief(given) -> str:
    return f"tensor{list(given.shape)}" if isinstance(given, torch.Tensor) else str(given)
