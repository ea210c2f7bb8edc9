"""Exact causal attention of prompts, behind ctypes: in float32, or in bfloat16 where the instruction set multiplies in it."""

from __future__ import annotations

import ctypes
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
    sizes = [ctypes.c_int64(size) for size in (heads, group, n, dim, k.shape[1])]
    base2, stride = ctypes.c_float(scaling * math.log2(math.e)), ctypes.c_int64(k.stride(0))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v)]
    ran = cpu.load().bitkv_attend_prompt_bfloat16(
        *sizes, base2, *pointers, stride, ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(torch.get_num_threads())
    )
    return out if ran else None
