"""Ranks that differ in configuration, model or rotation are told apart, by real ranks."""

import socket
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from ranks import run_ranks

LAYERS = 3


def disagreements(mesh):
    """What each of three ranks concludes: all equal; other seed, kernels on rank 2; model on rank 1; a flipped word."""
    from bitkv_dist.agreement import compare, require
    from bitkv_dist.cache_config import CacheConfig
    from bitkv_dist.kernels import dispatch

    rank = mesh.world.rank
    shape = {"layers": LAYERS, "kv_heads": 2, "head_dim": 80, "dtype": torch.float32, "device": torch.device("cpu")}
    model = SimpleNamespace(fingerprint=2**64 - 1, **shape)
    digest = require(mesh, model, CacheConfig())
    seed = compare(mesh, model, CacheConfig(seed=int(rank == 2)))
    flip = compare(mesh, model, CacheConfig(), flip_word_of_layer=1 if rank == 0 else None)
    isa = ""
    with dispatch.forced("reference") if rank == 2 else nullcontext():
        kernels = compare(mesh, model, CacheConfig())
        try:
            require(mesh, model, CacheConfig())
        except RuntimeError as error:
            isa = str(error)
    model.fingerprint -= rank == 1
    other = compare(mesh, model, CacheConfig())
    refusal = ""
    try:
        require(mesh, model, CacheConfig())
    except RuntimeError as error:
        refusal = str(error)
    found = {"seed": seed.mismatches, "flip": flip.mismatches, "model": other.mismatches, "kernels": kernels.mismatches}
    return (
        digest,
        {what: [(m.rank, m.layer, m.cause) for m in mismatches] for what, mismatches in found.items()},
        (isa, refusal),
    )


def test_who_differs_where_and_why():
    results = run_ranks(3, disagreements)
    digests, concluded, refusals = zip(*results, strict=True)
    assert len(set(digests)) == 1 and len(digests[0]) == 16
    assert (
        concluded[0]
        == concluded[1]
        == concluded[2]
        == {
            "seed": [(2, layer, "configuration") for layer in range(LAYERS)],
            "flip": [(0, 1, "rotation words")],
            "kernels": [(2, 0, "kernels")],
            "model": [(1, layer, "model") for layer in range(LAYERS)],
        }
    )
    assert len(set(refusals)) == 1
    isa, model = refusals[0]
    who = f"(host {socket.gethostname()}) differs from the others in layer 0"
    assert isa.startswith(f"rank 2 {who}: another kernels;") and "--cpu-isa avx2" in isa
    assert model.startswith(f"rank 1 {who} (and 2 more): another model;")
