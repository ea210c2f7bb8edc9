"""A calibration file of random codebooks, for what times or checks a kernel: no text is read and nothing is fitted."""

from __future__ import annotations

from pathlib import Path

import torch

from bitkv_dist.calibrated import VERSION, Origin
from bitkv_dist.codec.codebooks import save
from bitkv_dist.codec.rope import channel_pairs

WORDS, WIDTH = 1024, 8
SPREAD = 200  # of a word's numbers; what is coded has a spread of about 1


def write(path: Path, heads: int, dim: int, layers: int = 1, fingerprint: str = "0" * 16, turned: int | None = None,
          scaling: float = 1.0, seed: int = 0) -> str:  # fmt: skip
    """The file's path. turned: how many of the channels RoPE turns (all), and `scaling` its factor; keys have weights and are
    grouped by pairs drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    turned = dim if turned is None else turned
    books, half = (layers, heads, dim // WIDTH), turned // 2

    def uniform(*shape: int, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    tensors = {"inv_freq": 10000.0 ** -(torch.arange(0, turned, 2) / turned)}
    tensors["K.weighted"] = torch.ones(layers, heads, dtype=torch.uint8)
    for side in "KV":
        tensors[f"{side}.words"] = (SPREAD * torch.randn(*books, 1, WORDS, WIDTH, generator=generator)).round().clamp(-700, 700)
        tensors[f"{side}.words"] = tensors[f"{side}.words"].to(torch.int16)
        tensors[f"{side}.unit"] = uniform(*books, low=0.8, high=1.2) / SPREAD
        tensors[f"{side}.center"] = torch.zeros(layers, heads, dim)
    orders = [torch.randperm(dim // 2, generator=generator) for _ in range(layers * heads)]
    pairs = torch.stack([channel_pairs(half, dim)[order] for order in orders])
    tensors["K.channels"] = pairs.view(layers, heads, dim).to(torch.int16)
    tensors["V.channels"] = torch.arange(dim, dtype=torch.int16).expand(layers, heads, dim)
    tensors["K.weight"], tensors["V.weight"] = uniform(layers, heads, dim, low=0.3, high=3.0), torch.ones(layers, heads, dim)
    tensors["K.lost"], tensors["V.lost"] = torch.full((2, layers, heads, dim), 0.2)
    origin = Origin(VERSION, "tailored", "weighted", "random books", fingerprint, layers, heads, dim, scaling, "all KV heads",
                    (), 0, seed, {}, "")  # fmt: skip
    save(path, origin, tensors)
    return str(path)
