"""Rotation signs as a pure function of (seed, layer, global KV head, K|V): the same on every rank, host and device.

No random stream is consumed and no device generator is used, so building them never disturbs `torch.manual_seed`.
The mixer is splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
import torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SIDES = {"K": 0, "V": 1}


def mix64(x: int) -> int:
    """The splitmix64 output function on a Python integer, modulo 2^64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def sign_words(seed: int, layer: int, kv_head: int, side: str, dim: int) -> np.ndarray:
    """uint64 [ceil(dim / 64)]: bit j of word i is the sign (1 = negative) of dim 64 i + j. `kv_head` is the *global* head."""
    key = 0
    for field in (seed, layer, kv_head, SIDES[side]):
        key = mix64((key + GOLDEN + (field & MASK)) & MASK)
    return np.array([mix64((key + GOLDEN * (i + 1)) & MASK) for i in range(-(-dim // 64))], dtype=np.uint64)


def signs_from_words(words: np.ndarray, dim: int) -> torch.Tensor:
    """fp32 [dim] of +-1, words read from bit 0 up."""
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * bits.reshape(-1)[:dim].astype(np.float32))


def layer_signs(seed: int, layer: int, first_kv_head: int, kv_heads: int, side: str, dim: int) -> torch.Tensor:
    """fp32 [HK, dim] for the global KV heads first_kv_head .. first_kv_head + kv_heads - 1."""
    heads = range(first_kv_head, first_kv_head + kv_heads)
    return torch.stack([signs_from_words(sign_words(seed, layer, head, side, dim), dim) for head in heads])
