"""Exact causal attention of prompts, behind ctypes: in float32, or in bfloat16 where the instruction set multiplies in it."""

from __future__ import annotations

import math

import torch

from bitkv_dist.kernels import cpu
from bitkv_dist.kernels.cpu.step import attend_prompt


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """q [HK, G, n, D], queries of the last n of T tokens; k, v [HK, T, D]; all in the model's dtype -> [HK, G, n, D].
    None where the instruction set has no kernel for it."""
    if q.dtype == torch.bfloat16 and (out := _paired(q, k, v, scaling)) is not None:
        return out
    out = attend_prompt(q.float(), k.float(), v.float(), scaling)
    return None if out is None else out.to(q.dtype)


def _paired(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor | None:
    heads, group, n, dim = q.shape
    q = q.contiguous()
    if k.stride() != v.stride() or k.stride()[1:] != (dim, 1):
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    where, base2, threads = cpu.addresses(q, k, v, out), scaling * math.log2(math.e), torch.get_num_threads()
    ran = cpu.load().bitkv_attend_prompt_bfloat16(
        heads, group, n, dim, k.shape[1], base2, *where[:3], k.stride(0), where[3], threads
    )
    return out if ran else None
