"""64-bit digests that must be the same on every rank: of the rotation of each layer, and of the sealed pages of a cache."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch

from bitkv_dist.cache_config import CacheConfig

PageKey = tuple[int, int, int, int]  # layer, sequence, page, global KV head
Key = TypeVar("Key", bound=Hashable)


def digest64(*parts: bytes) -> int:
    """blake2b of the parts in order, 8 bytes read as a little-endian integer."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def chained(before: int, numbers: Sequence[int]) -> int:
    """The digest of a sequence of integers that goes on: what came before stands in `before`."""
    return digest64(before.to_bytes(8, "little"), np.array(numbers, dtype="<i8").tobytes())


def config_digest(config: CacheConfig) -> int:
    return digest64(json.dumps(config.identity(), sort_keys=True).encode())


def layer_digests(
    config: CacheConfig, fingerprint: int, rotation_words: Callable[[int], np.ndarray], layers: int
) -> np.ndarray:
    """uint64 [layers]: all that the sealed bytes of a layer depend on besides the tokens.

    `fingerprint` identifies the model; `rotation_words(layer)` are the uint64 words of all *global* KV heads, K and V, in a
    fixed order.
    """
    common = np.array([config_digest(config), fingerprint, layers], dtype="<u8").tobytes()
    return np.array(
        [digest64(common, b"%d:" % layer, rotation_words(layer).astype("<u8").tobytes()) for layer in range(layers)],
        dtype=np.uint64,
    )


def combine(pages: Mapping[PageKey, int]) -> str:
    """16 hex digits for a set of page digests, taken in global order, whichever rank held which page."""
    table = np.array([[*key, pages[key]] for key in sorted(pages)], dtype="<u8")
    return f"{digest64(table.tobytes()):016x}"


def whole(digests: np.ndarray) -> int:
    """One digest for uint64 [n]: what ranks compare when they cannot be sure to agree even on n."""
    return digest64(digests.astype("<u8").tobytes())


def as_int64(digests: np.ndarray) -> torch.Tensor:
    """uint64 [n] -> int64 [n] with the same 64 bits, for Mesh.all_equal: torch compares and reduces no uint64."""
    return torch.from_numpy(np.ascontiguousarray(digests, dtype=np.uint64).view(np.int64))


def odd_ones(per_rank: Sequence[Mapping[Key, int]]) -> list[tuple[int, Key]]:
    """(rank, key) wherever a rank's digest is not what most ranks have, or the lowest of them when there is no majority.

    A rank may lack keys (heads of another tensor-parallel rank): only those who have a key vote on it.
    """
    odd = []
    for key in sorted({key for digests in per_rank for key in digests}):
        votes = [(rank, digests[key]) for rank, digests in enumerate(per_rank) if key in digests]
        right = Counter(digest for _, digest in votes).most_common(1)[0][0]  # ties: the first seen, so the lowest rank's
        odd += [(rank, key) for rank, digest in votes if digest != right]
    return odd
