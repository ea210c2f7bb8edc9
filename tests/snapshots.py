"""Runs that save a snapshot and runs that start from one, on any number of simulated ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import simulated
import tiny
import torch

from bitkv_dist import model as models
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot.folder import find
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save

SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 64}
MASS = RefineConfig(rule="mass", value=0.9)
CACHES = {
    "4bit": CacheConfig(**SMALL),
    "fitted": CacheConfig(**SMALL, scan_bits=1, score="fitted", refine=MASS),  # learns from its prompt
    "exact": CacheConfig(**SMALL, codec="exact", key_bits=16, value_bits=16),
}
PROMPTS = [tiny.prompt(1300), tiny.prompt(90)]
NEW = 6


def tiny_model(folder: Path) -> Path:
    return tiny.save(folder, num_key_value_heads=4, num_attention_heads=8, head_dim=16)


@functools.cache
def served(model: Path, rank: int) -> models.ServedModel:
    """One model for each simulated rank of all tests."""
    return models.load(str(model), dtype=torch.float32, device=torch.device("cpu"))


def engine_of(mesh, model: Path, cache: str | CacheConfig = "4bit", **generate) -> Engine:
    if mesh.split.parts > 1:
        own = models.load(str(model), dtype=torch.float32, device=torch.device("cpu"), ranks=mesh)
    else:
        own = served(model, mesh.world.rank)
    return Engine(own, CACHES.get(cache, cache), mesh, GenerateConfig(**{"max_new_tokens": NEW} | generate))


def saved(mesh, model, place, cache="4bit", prompts=PROMPTS, at="prefill", **generate) -> dict:
    """A run that saves."""
    engine = engine_of(mesh, model, cache, **generate)
    found = {}

    def keep(logits=None):
        save(engine, place, logits)
        found["digest"] = engine.cache_digest()

    result = engine.generate(prompts, on_filled=keep if at == "prefill" else None)
    if at == "end":
        keep()
    return found | {"tokens": result.token_ids, "reasons": result.finish_reason, "evicted": engine.cache.evicted_tokens(0)}


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


def saved_at(size: int, model, place, *args) -> dict:
    return simulated.run(size, saved, model, place, *args)[0]


def loaded_at(size: int, model, place, *args) -> dict:
    """What rank 0 found; all ranks have the same tokens."""
    everyone = simulated.run(size, loaded, model, place, *args)
    assert all(found == everyone[0] for found in everyone)
    return everyone[0]


def refusal(model, place, *args, size: int = 2) -> str:
    """The one line with which all ranks refuse it; no rank keeps a cache."""

    def attempt(mesh):
        engine = engine_of(mesh, model, *args[:1])
        engine.generate([tiny.prompt(3)])
        with pytest.raises(ValueError, match=r"\w; \w|\(.*\)") as refused:
            manifest = Manifest.read(place)
            manifest.check_files(place)
            manifest.check_run(engine.cache_config, 2, 4, 16)
            load(engine, place, manifest, *args[1:])
        return str(refused.value)

    (message,) = set(simulated.run(size, attempt))
    assert "\n" not in message
    return message
