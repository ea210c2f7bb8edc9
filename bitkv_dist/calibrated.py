"""What a calibration file says about itself: read with the configuration, before torch or any weight is loaded.

The file is safetensors; its metadata hold one JSON object under "bitkv", the fields of `Origin`.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitkv_dist.rules import shown

VERSION = 1
KEY = "bitkv"
FORMS = {"tailored": ("attended", "weighted", "unweighted", "threshold"), "residual": ("two-stage",)}
MOST_HEADER_BYTES = 1 << 24


@dataclass(frozen=True)
class Origin:
    """Which codec and model a file was made for, and from what.

    fingerprint: 16 hex digits, see model.fingerprint_of. scale: whose channels share a token's scale ("all KV heads", or "none"
    without one). texts: name, digest and tokens of each, read `window` tokens at a time. vectors, iterations, seed: of k-means.
    lost: shares of the variance that the codes lose, on the part of the texts that taught and on the part that was held out.
    digest: 16 hex digits over all of this and the tensors. Files from before window and iterations were recorded are read, and
    say nothing of them.
    """

    version: int
    codec: str
    form: str
    model: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    rope_scaling: float
    scale: str
    texts: tuple[dict[str, Any], ...]
    vectors: int
    seed: int
    lost: dict[str, float]
    digest: str
    iterations: int | None = None
    window: int | None = None

    def record(self) -> dict[str, Any]:
        """The fields that are known, as the file holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def described(self) -> str:
        """Codec, model and fit in one line."""
        tokens = sum(text["tokens"] for text in self.texts)
        of_window = "" if self.window is None else f" in windows of {self.window:,}"
        passes = "" if self.iterations is None else f" in {self.iterations} iterations"
        fitted = f"fitted to {tokens:,} tokens{of_window}, {self.vectors:,} vectors{passes}, seed {self.seed}"
        return f"codec {self.codec} ({self.form}) of {self.model}, {fitted}"


def read_origin(path: str) -> Origin:
    """ValueError without the name of the field: what is wrong with the file, and the remedy."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); make it with bitkv calibrate") from None
    return _read(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: str, modified_ns: int, size: int) -> Origin:
    """One read for all layers of a cache, until the file changes."""
    try:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < min(size, MOST_HEADER_BYTES) else {}
        found = json.loads(header.pop("__metadata__")[KEY])
        version = found["version"]
        if version == VERSION:
            origin = Origin(**found | {"texts": tuple(found["texts"])})
            tensors = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
            told = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); make it with bitkv calibrate") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError("is not a calibration file; make one with bitkv calibrate") from None
    if version != VERSION:
        raise ValueError(f"is of version {shown(version)}, this program reads {VERSION}; calibrate again")
    if size != told:
        what = "is truncated" if size < told else "goes on behind its end"
        raise ValueError(f"{what}: has {size:,} bytes, its header tells of {told:,}; copy it again or calibrate again")
    _check_tensors(origin, tensors)
    return origin


def _check_tensors(origin: Origin, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse a file without the tensors that codec/codebooks.py reads; types as safetensors names them."""

    def check(name: str, dtype: str, *wanted: int | str) -> tuple[int, ...]:
        """The shape of a tensor; where any number will do, `wanted` has a word."""
        if name not in tensors:
            raise ValueError(f"holds no tensor {name}; calibrate again")
        found, shape = tensors[name]
        same = len(shape) == len(wanted) and all(isinstance(n, str) or n == m for n, m in zip(wanted, shape, strict=True))
        if found != dtype or not same:
            rule = f"must be {dtype} [{', '.join(map(str, wanted))}]"
            raise ValueError(f"holds tensor {name} as {found} {list(shape)}, {rule}; calibrate again")
        return shape

    dim, heads = origin.head_dim, (origin.layers, origin.kv_heads)
    if any(type(n) is not int or n < 1 for n in (*heads, dim)):
        raise ValueError("is not a calibration file; make one with bitkv calibrate")
    for side in "KV":
        *_, groups, stages, words, width = check(f"{side}.words", "I16", *heads, "groups", "stages", "words", "channels")
        if groups * width != dim or stages < 1 or words < 2:
            rule = f"of {words} words in {stages} stages for {groups} groups of {width} channels"
            raise ValueError(f"holds tensor {side}.words {rule}, must be two words or more for {dim} channels; calibrate again")
        check(f"{side}.unit", "F32", *heads, groups)
        check(f"{side}.channels", "I16", *heads, dim)
        for name in ("center", "weight"):
            check(f"{side}.{name}", "F32", *heads, dim)
    check("K.lost", "F32", *heads, dim)
    if 2 * check("inv_freq", "F32", "pairs")[0] > dim:
        raise ValueError(f"holds tensor inv_freq of more pairs than {dim} channels have; calibrate again")
