"""Snapshots: any number of ranks loads what any other has saved, to the bit; a crash leaves the old or the new one; what is not
whole is refused with its reason."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import simulated
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitkv_dist import model as models
from bitkv_dist.config import CacheConfig, GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot import folder as folders
from bitkv_dist.snapshot import manifest as manifests
from bitkv_dist.snapshot import save as saving
from bitkv_dist.snapshot.folder import find
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save

SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 64}
CACHES = {
    "4bit": SMALL,
    "fitted": SMALL | {"scan_bits": 1, "score": "fitted", "refine": {"rule": "mass", "value": 0.9}},
    "exact": SMALL | {"codec": "exact", "key_bits": 16, "value_bits": 16},
}
PROMPTS = [tiny.prompt(1300), tiny.prompt(90)]
NEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), num_key_value_heads=4, num_attention_heads=8, head_dim=16)


def cache_config(name: str) -> CacheConfig:
    from bitkv_dist.config import RefineConfig

    fields = dict(CACHES[name])
    if "refine" in fields:
        fields["refine"] = RefineConfig(**fields["refine"])
    return CacheConfig(**fields)


def engine_of(mesh, model: Path, cache: str = "4bit", **generate) -> Engine:
    shard = {"tp_mesh": mesh.tp_mesh, "tp": mesh.tp, "tp_rank": mesh.tp_rank}
    served = models.load(str(model), dtype=torch.float32, device=torch.device("cpu"), **shard)
    return Engine(served, cache_config(cache), mesh, GenerateConfig(**{"max_new_tokens": NEW} | generate))


def saved(mesh, model, place, cache="4bit", prompts=PROMPTS, at="prefill", **generate) -> tuple[list[list[int]], str]:
    """A run that saves; its tokens, and the digest of the sealed bytes in the snapshot."""
    engine = engine_of(mesh, model, cache, **generate)
    digests = []

    def filled(logits):
        if at == "prefill":
            save(engine, place, logits)
            digests.append(engine.cache_digest())

    tokens = engine.generate(prompts, on_filled=filled).token_ids
    if at == "end":
        save(engine, place)
        digests.append(engine.cache_digest())
    return tokens, digests[0]


def loaded(mesh, model, place, cache="4bit", prompts=None, **generate) -> dict:
    """A run that starts from a snapshot."""
    engine = engine_of(mesh, model, cache, **generate)
    folder = find(place)
    start = load(engine, folder, Manifest.read(folder), prompts)
    digest = engine.cache_digest()
    result = engine.generate(prompts or list(map(list, engine.histories)), fill=start.fill)
    return {
        "tokens": result.token_ids, "digest": digest, "after": engine.cache_digest(), "promise": start.promise,
        "prefix": start.prefix_tokens, "read": start.prefilled_tokens, "reasons": result.finish_reason,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the same at any number of ranks


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_run_is_repeated_at_any_number_of_ranks(model, tmp_path, cache, size):
    tokens, digest = simulated.run(size, saved, model, tmp_path / "s", cache)[0]
    for ranks_now in (1, 2, 3, 4):
        for found in simulated.run(ranks_now, loaded, model, tmp_path / "s", cache, PROMPTS):
            assert found["tokens"] == tokens and found["digest"] == digest
            assert (found["promise"], found["prefix"], found["read"]) == ("bit-identical", 1390, 0)
        assert simulated.run(ranks_now, loaded, model, tmp_path / "s", cache)[0]["tokens"] == tokens  # its own prompts
