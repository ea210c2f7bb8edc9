"""64-bit digests that must be the same on every rank: of the rotation of each layer, and of the sealed pages of a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import blake2b

import numpy as np
import torch

from bitkv_dist.config import CacheConfig

PageKey = tuple[int, int, int, int]  # layer, sequence, page, global KV head


def digest64(*parts: bytes) -> int:
    """blake2b of the parts in order, 8 bytes read as a little-endian integer."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def layer_digests(config: CacheConfig, fingerprint: int, rotation_words: Callable[[int], np.ndarray], layers: int) -> np.ndarray:
    """uint64 [layers]: what layer l's sealed bytes depend on besides the tokens.

    `fingerprint` identifies the model, `rotation_words(l)` are the uint64 words of all *global* KV heads, K and V, in a fixed order.
    """
    common = json.dumps({"cache": asdict(config), "fingerprint": fingerprint, "layers": layers}, sort_keys=True).encode()
    return np.array([digest64(common, b"%d" % layer, rotation_words(layer).astype("<u8").tobytes()) for layer in range(layers)],
                    dtype=np.uint64)


def combine(pages: Mapping[PageKey, int]) -> str:
    """16 hex digits for a set of page digests, in global order, whichever rank held which page."""
    table = [[*key, pages[key]] for key in sorted(pages)]
    return f"{digest64(np.array(table, dtype='<u8').tobytes()):016x}"


def as_int64(digests: np.ndarray) -> torch.Tensor:
    """The same 64 bits as torch knows them: uint64 [n] -> int64 [n], for Mesh.all_equal."""
    return torch.from_numpy(np.ascontiguousarray(digests, dtype=np.uint64).view(np.int64))
