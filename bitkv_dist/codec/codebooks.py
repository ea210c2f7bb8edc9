"""The calibration file: tensors of all layers under one digest, written once, read by every layer's codec.

Per side S (K, V): S.words int16 [layers, HK, groups, stages, words, n], S.unit fp32 [layers, HK, groups], S.channels int16
[layers, HK, D], S.center and S.weight fp32 [layers, HK, D], S.lost fp32 [layers, HK, D] (what the codes lose of a channel, mean
square on held-out tokens, before RoPE, a pair's two channels alike; of keys with a scale, per square of the scale). K.weighted
uint8 [layers, HK]: heads whose keys are weighted by the attention that they receive. inv_freq fp32 [r/2].
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.calibrated import KEY, Origin, read_origin
from bitkv_dist.codec.books import Books
from bitkv_dist.codec.interface import HeadShape

BOOK_FIELDS = ("words", "unit", "channels", "center", "weight")
MOST_EXACT = 2048  # whole numbers up to it are exact in fp16


def check_place(path: Path) -> None:
    """ValueError where `save` could not write the file: asked before the fit, which would be lost."""
    draft = draft_of(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ValueError(f"output {str(path)!r}: cannot be written ({error.strerror}); give a file in another folder") from None


def draft_of(path: Path) -> Path:
    """What becomes the file when it is whole."""
    return path.with_name(path.name + ".part")


def save(path: Path, origin: Origin, tensors: Mapping[str, torch.Tensor]) -> Origin:
    """Writes the file, whole or not at all; returns `origin` with its digest."""
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    origin = replace(origin, digest=content_digest(origin, tensors))
    draft, mask = draft_of(path), os.umask(0)
    os.umask(mask)
    try:
        save_file(tensors, draft, {KEY: json.dumps(origin.record())})
        draft.chmod(0o666 & ~mask)  # safetensors writes it for its owner alone, whatever the umask
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return origin


def content_digest(origin: Origin, tensors: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits over everything that the file holds."""
    state = blake2b(json.dumps(origin.record() | {"digest": ""}, sort_keys=True).encode(), digest_size=8)
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bf16
    return state.hexdigest()


@functools.lru_cache(maxsize=8)
def tensors_of(path: str, digest: str, device: torch.device, heads: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What is used of the file with that digest, shared by all layers and caches: inv_freq, and of the KV heads in this
    half-open range BOOK_FIELDS of both sides and K.lost. No other head's stays in memory. ValueError where the
    file's content is another."""
    try:
        origin, whole = read_origin(path), load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"cache.calibration {path!r}: is truncated or cannot be read; calibrate again") from None
    except ValueError as error:
        raise ValueError(f"cache.calibration {path!r}: {error}") from None
    if content_digest(origin, whole) != digest:
        raise ValueError(f"cache.calibration {path!r}: was changed after it was written; calibrate again")
    for name in ("K.channels", "V.channels"):
        if (whole[name].sort(-1).values != torch.arange(origin.head_dim)).any():
            rule = f"must name channels 0 to {origin.head_dim - 1} once for each head"
            raise ValueError(f"cache.calibration {path!r}: its tensor {name} {rule}; calibrate again")
    names = ["K.lost", *(f"{side}.{name}" for side in "KV" for name in BOOK_FIELDS)]
    own = {name: whole[name][:, slice(*heads)].clone().to(device) for name in names}
    if device.type == "cuda":
        own |= {name: as_kernels_take(tensor) for name, tensor in own.items() if name.endswith(".words")}
    return own | {"inv_freq": whole["inv_freq"].clone().to(device)}


def as_kernels_take(words: torch.Tensor) -> torch.Tensor:
    """Words int16 as fp16, the same numbers in as many bytes; as they are where fp16 does not hold them all exactly."""
    return words.half() if words.int().abs().amax() <= MOST_EXACT else words


class LayerBooks:
    """What one layer and rank needs of the file of `config`. ValueError for the file of another model; without a fingerprint
    the heads must be all of the model's. bytes: of all that is held of the rank's KV heads; lost fp32 [HK, D] of keys."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.origin = config.origin
        if heads.fingerprint not in (None, self.origin.fingerprint):
            made = f"was made for {self.origin.model} with fingerprint {self.origin.fingerprint}"
            rule = f"{made}, this model's is {heads.fingerprint}"
            raise ValueError(f"cache.calibration {config.calibration!r}: {rule}; calibrate with this model and --dtype")
        there, end = self.origin.kv_heads, heads.first_kv_head + heads.kv_heads
        if end > there or (heads.fingerprint is None and heads.kv_heads != there):  # a rank with a part of them knows its model
            rule = f"was made for {there} KV heads; calibrate with this model"
            raise ValueError(f"cache.calibration {config.calibration!r}: {rule}")
        found = tensors_of(config.calibration, config.calibration_digest, heads.device, (heads.first_kv_head, end))
        self.inv_freq = found["inv_freq"]
        self.books = {side: Books(*(found[f"{side}.{name}"][layer] for name in BOOK_FIELDS)) for side in "KV"}
        self.lost = found["K.lost"][layer]
        permutations = sum(found[f"{side}.channels"][layer].nbytes for side in "KV")
        self.bytes = self.lost.nbytes + permutations + sum(books.bytes for books in self.books.values())
