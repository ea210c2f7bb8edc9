"""The ways to ask torch for one decode step of attention over a long cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bitkv_dist.kernels import cpu

GQA_ROWS = "sdpa-bf16"  # the fast way: the GQA group laid out as query rows; always among the peers
PEERS = (GQA_ROWS, "sdpa-fp32", "sdpa-gqa-bf16", "matmul-bf16", "matmul-fp32", "hf-quantized")
GROUP = 64  # elements per scale of the quantised peer, as in transformers' QuantizedCacheConfig

Attend = Callable[[torch.Tensor], torch.Tensor]


def attend_rows(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q [HK, 1, G, D] in base 2 -> natural units, [1, HK, G, D]: the GQA group laid out as query rows."""
    return (q * math.log(2)).squeeze(1).unsqueeze(0).to(dtype)


def held(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in that dtype, in huge pages like the packed cache that it is compared with."""
    return cpu.advise_huge_pages(torch.empty_like(x, dtype=dtype)).copy_(x)


class GroupQuantized:
    """A cache kept as transformers' QuantizedCache keeps it, and read as it reads it: every step dequantises all of it.

    Stands in for that class, whose backends (optimum-quanto, hqq) need packages of their own: INT4 or INT2 codes with one scale
    and zero point per group of 64, packed into bytes, bfloat16 when read. x [1, HK, T, D], quantised along D.
    """

    def __init__(self, x: torch.Tensor, bits: int) -> None:
        self.bits, self.shape = bits, x.shape
        groups = x.unflatten(-1, (-1, GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        self.scale = ((high - low) / (2**bits - 1)).to(torch.bfloat16)
        self.low = low.to(torch.bfloat16)
        codes = ((groups - low) / self.scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
        parts = codes.unflatten(-1, (-1, 8 // bits)).unbind(-1)
        self.packed = held(sum(part << (bits * i) for i, part in enumerate(parts)), torch.uint8)

    def read(self) -> torch.Tensor:
        mask = 2**self.bits - 1
        codes = torch.stack([(self.packed >> (self.bits * i)) & mask for i in range(8 // self.bits)], -1).flatten(-2)
        return (codes.to(torch.bfloat16) * self.scale + self.low).flatten(-2)


def make(name: str, shape: tuple[int, int, int], bits: int, seed: int) -> Attend:
    """A function of the query [HK, 1, G, D] (in base 2) that attends over a random cache of its own, shape (HK, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, *shape, generator=generator) for _ in range(2))
    if name == "hf-quantized":
        keys, values = (GroupQuantized(x, 4 if bits > 2 else 2) for x in (k, v))
        return lambda q: F.scaled_dot_product_attention(attend_rows(q, torch.bfloat16), keys.read(), values.read(), scale=1.0)
    way, dtype = name.rsplit("-", 1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    k, v = held(k, dtype), held(v, dtype)

    def run(q: torch.Tensor) -> torch.Tensor:
        rows = attend_rows(q, dtype)
        if way == "sdpa":
            return F.scaled_dot_product_attention(rows, k, v, scale=1.0)
        if way == "sdpa-gqa":
            return F.scaled_dot_product_attention(rows.flatten(1, 2).unsqueeze(2), k, v, scale=1.0, enable_gqa=True)
        return torch.softmax((rows @ k.transpose(-1, -2)).float(), -1).to(dtype) @ v

    return run
