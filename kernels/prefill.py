"""Exact causal attention of a chunk of prompt queries over all keys so far, without a mask in memory.

On CPUs with AVX2 by kernels of our own (kernels/cpu/prompt.hpp and, for a model in bfloat16 where the instruction set has
products of it, prompt_bfloat16.hpp), elsewhere by torch's fused ones: there, the keys before the
chunk and the chunk itself are attended to apart and merged by their log-sum-exp, so nothing proportional to chunk x T beyond
the fused kernel's tiles is ever allocated.
"""

from __future__ import annotations

import math

import torch

from bitkv_dist.kernels import dispatch
from bitkv_dist.kernels.cpu import prompt
from bitkv_dist.kernels.reference import attend_dense

# The fused CPU kernel splits a handful of query rows by thread count, which changes last bits (measured with one row per head).
FEW_ROWS = 64


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """q [HK, G, n, D], the queries of the last n of T tokens; k, v [HK, T, D]; all in the model's dtype -> [HK, G, n, D]."""
    if q.is_cuda:
        return masked_sdpa(q, k, v, scaling)
    if dispatch.on_cpu(q.device) and (out := prompt.causal_attention(q, k, v, scaling)) is not None:
        return out
    n, total = q.shape[2], k.shape[1]
    if q.shape[1] * n < FEW_ROWS:
        return dense(q, k, v, scaling)
    group = q.shape[1]
    own = [x[:, total - n :].repeat_interleave(group, 0).unsqueeze(0) for x in (k, v)]
    out, lse = fused(q.flatten(0, 1).unsqueeze(0), *own, causal=True, scaling=scaling)
    if total == n:
        return out.view(q.shape)
    # Before the chunk every query of a group sees the same keys: the group is laid out as query rows and the keys are read
    # once.
    before = fused(
        q.flatten(1, 2).unsqueeze(0),
        k[:, : total - n].unsqueeze(0),
        v[:, : total - n].unsqueeze(0),
        causal=False,
        scaling=scaling,
    )
    out, lse, out_before, lse_before = (x.reshape(*q.shape[:3], -1).float() for x in (out, lse, *before))
    peak = torch.maximum(lse, lse_before)
    weight, weight_before = torch.exp(lse - peak), torch.exp(lse_before - peak)
    return ((out * weight + out_before * weight_before) / (weight + weight_before)).to(q.dtype)


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [1, H, n, D], log-sum-exp [1, H, n]) of torch's flash attention for CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scaling)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    n, total = q.shape[2], k.shape[1]
    rows = torch.arange(n, device=q.device)[:, None] + (total - n)
    valid = (torch.arange(total, device=q.device) <= rows)[None, None, :, None, :]
    scaled = q.float().transpose(1, 2) * (scaling * math.log2(math.e))
    _, l, o = attend_dense(scaled, k.float().unsqueeze(0), v.float().unsqueeze(0), valid)
    return (o / l.unsqueeze(-1))[0].transpose(1, 2).to(q.dtype)


def masked_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right

    # Flash attention takes half precision and shares a key head among its queries; fp32 has a kernel for equal heads only.
    shared = q.dtype != torch.float32
    keys, values = (x.unsqueeze(0) if shared else x.repeat_interleave(q.shape[1], 0).unsqueeze(0) for x in (k, v))
    bias = causal_lower_right(q.shape[2], k.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(
        q.flatten(0, 1).unsqueeze(0), keys, values, bias, scale=scaling, enable_gqa=shared
    ).view(q.shape)
