"""Calibration files for tests: fitted in a second to made-up queries, keys and values that vary as real ones do."""

from __future__ import annotations

from pathlib import Path

import torch

from bitkv_dist.calibrated import FORMS, VERSION, Origin
from bitkv_dist.codec.codebooks import save
from bitkv_dist.codec.rope import Rope
from bitkv_dist.fit import sample
from bitkv_dist.fit.books import Fit, fit_layer
from bitkv_dist.fit.sample import Window, turned
from bitkv_dist.model import ServedModel

FORM = {codec: forms[0] for codec, forms in FORMS.items()}
PAGE = 64


def rope_of(dim: int) -> Rope:
    return Rope(10000.0 ** -(torch.arange(0, dim, 2) / dim), 1.0, PAGE, torch.device("cpu"))


def vectors(heads: int, count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """fp32 [heads, count, dim]: a mean, channels of different spread that vary together, a few common shapes with noise."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(77)) / dim**0.5
    shapes = torch.randn(heads, 24, dim, generator=torch.Generator().manual_seed(78))
    pick = torch.randint(0, 24, (count,), generator=generator)
    return (shapes[:, pick] + 0.3 * torch.randn(heads, count, dim, generator=generator)) @ mixing * 3 + 2 * mixing[:, :1]


def window(heads: int, tokens: int, dim: int, seed: int = 0, group: int = 2) -> Window:
    """Before RoPE; a quarter of the pairs receive most of the queries' energy."""
    loud = torch.ones(dim)
    loud[: dim // 8] = loud[dim // 2 : dim // 2 + dim // 8] = 5.0
    q = vectors(heads * group, tokens, dim, seed + 1).unflatten(0, (heads, group)) * loud
    return Window(q, vectors(heads, tokens, dim, seed + 2), vectors(heads, tokens, dim, seed + 3), dim**-0.5)


def make(folder: Path, codec: str = "tailored", form: str | None = None, layers: int = 1, heads: int = 2, dim: int = 32,
         fingerprint: str = "0" * 16, seed: int = 0) -> str:
    """The path of a new file."""
    rope, how = rope_of(dim), Fit(codec, form or FORM[codec], vectors=1536, iterations=2, seed=seed)
    found = [fit_layer([window(heads, 2048, dim, 10 * layer)], rope, how) for layer in range(layers)]
    path = folder / f"{codec}-{how.form}-{seed}.safetensors"
    write(path, found, rope, how, fingerprint, heads, dim)
    return str(path)


def fitted_to(model: ServedModel, folder: Path, codec: str, ids: list[int]) -> str:
    """The path of a new file, fitted to what a model makes of a text, as `bitkv calibrate` fits it."""
    rope, how = sample.rope_of(model, PAGE), Fit(codec, FORM[codec], vectors=1536, iterations=2)
    found: list[tuple[dict, dict]] = []
    sample.walk(model, [ids], lambda layer, windows: found.append(fit_layer(windows, rope, how)))
    path = folder / f"{codec}-of-model.safetensors"
    write(path, found, rope, how, f"{model.fingerprint:016x}", model.kv_heads, model.head_dim)
    return str(path)


def write(path: Path, found: list[tuple[dict, dict]], rope: Rope, how: Fit, fingerprint: str, heads: int, dim: int) -> None:
    tensors = {name: torch.stack([layer[name] for layer, _ in found]) for name in found[0][0]} | {"inv_freq": rope.inv_freq}
    origin = Origin(VERSION, how.codec, how.form, "made-up", fingerprint, len(found), heads, dim, rope.scaling, "all KV heads",
                    (), how.vectors, how.seed, found[0][1], "")  # fmt: skip
    save(path, origin, tensors)


def keys(heads: int, pages: int, dim: int, seed: int = 0, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) [pages, heads, PAGE, dim] of pages first .. , keys after RoPE."""
    count = (first + pages) * PAGE
    made = window(heads, count, dim, seed)
    paged = (x.unflatten(1, (-1, PAGE)).transpose(0, 1)[first:].contiguous() for x in (turned(rope_of(dim), made.k), made.v))
    return tuple(paged)
