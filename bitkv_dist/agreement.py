"""What all ranks must have in common before they share a cache: configuration, model, rotations, and the kernels.

Kernels of different instruction sets give the same bytes and integers, but the last bits of a softmax may differ; so may
those of words looked up (codec tailored), whose sums plain torch has in yet another order. One wrong sign word makes a rank
seal pages that decode to noise without any error, so every run compares digests at its start, and `diagnose` shows the
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel import roll
from bitkv_dist.parallel.digest import as_int64, config_digest, digest64, layer_digests, odd_ones, whole
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.rotation import sign_words

if TYPE_CHECKING:
    from bitkv_dist.model import ServedModel


@dataclass(frozen=True)
class Mismatch:
    """Rank `rank` disagrees with the others about layer `layer` because of `cause`."""

    rank: int
    host: str
    layer: int
    digest: str
    cause: str  # configuration | model | kernels | generate settings | version of LIBRARY | rotation words


@dataclass(frozen=True)
class Agreement:
    rotation: str  # 16 hex digits over all layers, as this rank has them
    mismatches: list[Mismatch]  # the same list on every rank


def compare(
    mesh: Mesh,
    model: ServedModel,
    cache: CacheConfig,
    generate: GenerateConfig | None = None,
    flip_word_of_layer: int | None = None,
) -> Agreement:
    """Compare all ranks with one all-reduce; only when they differ gather who has what.

    `generate` holds what bounds the ranks' loops and shapes their exchanges. `flip_word_of_layer` spoils one bit of this rank's
    words, to prove that the alarm works.
    """

    def words(layer: int) -> np.ndarray:
        heads = range(model.kv_heads)
        found = np.concatenate([sign_words(cache.seed, layer, head, side, model.head_dim) for side in "KV" for head in heads])
        found[0] ^= np.uint64(layer == flip_word_of_layer)
        return found

    digests = layer_digests(cache, model.fingerprint, words, model.layers)
    rotation = whole(digests)
    kernels = digest64(" ".join(dispatch.backend(model.device)).encode())  # the reason names the GPU's architecture
    settings = digest64(f"{generate} {model.dtype} {mesh.split.layout} {mesh.exchange}".encode())
    installed = roll.versions()
    libraries = {f"version of {name}": digest64(installed[name].encode()) for name in roll.COMPARED_VERSIONS}
    compared = [rotation, kernels, settings, *libraries.values()]
    if mesh.all_equal(as_int64(np.array(compared, dtype=np.uint64))):
        return Agreement(f"{rotation:016x}", [])
    inputs = {
        "configuration": config_digest(cache),
        "model": model.fingerprint,
        "kernels": kernels,
        "generate settings": settings,
    } | libraries
    everyone = mesh.gather_objects((dict(enumerate(digests.tolist())), inputs, mesh.world.host))
    causes = odd_ones([theirs for _, theirs, _ in everyone])
    mismatches = []
    odd = odd_ones([theirs for theirs, _, _ in everyone])
    odd += sorted({(rank, 0) for rank, _ in causes} - {(rank, 0) for rank, _ in odd})
    for rank, layer in odd:
        cause = " and ".join(what for odd_rank, what in causes if odd_rank == rank) or "rotation words"
        mismatches.append(Mismatch(rank, everyone[rank][2], layer, f"{everyone[rank][0][layer]:016x}", cause))
    return Agreement(f"{rotation:016x}", mismatches)


def require(mesh: Mesh, model: ServedModel, cache: CacheConfig, generate: GenerateConfig | None = None) -> str:
    """The common rotation digest, 16 hex digits; RuntimeError that names rank, layer and cause where there is none."""
    found = compare(mesh, model, cache, generate)
    if found.mismatches:
        first, *others = found.mismatches
        more = f" (and {len(others)} more)" if others else ""
        remedy = "run the same command, files and versions on every host, and `diagnose` for the whole list"
        if first.cause == "kernels":
            remedy = "name an instruction set that all hosts have, such as --cpu-isa avx2, or portable"
        where = f"rank {first.rank} (host {first.host}) differs from the others in layer {first.layer}{more}"
        raise RuntimeError(f"{where}: another {first.cause}; {remedy}")
    return found.rotation
