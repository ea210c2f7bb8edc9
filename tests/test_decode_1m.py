"""A dry run of benchmarks/decode_1m.py: what it says about growth, appending and bytes holds at a small size."""

from __future__ import annotations

import json
import runpy
import sys
from types import SimpleNamespace

import pytest
from ranks import ROOT, run_command

from bitkv_dist.config import build
from bitkv_dist.sealed import GROWTH_GRANULES

SMALL = {"layers": 2, "hidden": 128, "intermediate": 128, "vocabulary": 256, "heads": 4, "kv-heads": 2, "head-dim": 64}
TOKENS = 9_000
GRANULE_BYTES = 2 * SMALL["kv-heads"] * SMALL["head-dim"] * 512 * 4  # keys and values of a layer, in float32


@pytest.fixture(scope="module")
def found():
    flags = [str(word) for name, value in SMALL.items() for word in (f"--{name}", value)]
    script = ROOT / "benchmarks" / "decode_1m.py"
    argv = [sys.executable, script, *flags, "--tokens", str(TOKENS), "--appends", "256"]
    ended = run_command(argv, PYTHONPATH=str(script.parent))  # also under PYTHONSAFEPATH
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])["runs"]


def test_the_cache_is_the_planned_one(found):
    for run in found.values():
        assert run["cache_bytes"] == run["planned_cache_bytes"] and run["logits_error"] < 1e-2
    element_bytes = 2 * SMALL["layers"] * SMALL["kv-heads"] * SMALL["head-dim"] * TOKENS * 4
    assert found["1bit"]["cache_bytes"] < found["tiered4"]["cache_bytes"] < element_bytes / 4


def test_a_step_reads_what_the_presets_read(found):
    elements = 2 * SMALL["layers"] * SMALL["kv-heads"] * SMALL["head-dim"]
    exact_bytes = elements * 384 * 4  # sink and window, at most
    for name, bits in (("1bit", 1.375), ("tiered4", 1.54)):
        sealed_bytes = elements * (TOKENS - 256) * bits / 8
        run = found[name]
        assert sealed_bytes * 0.98 < run["cache_bytes_read"] < sealed_bytes * 1.02 + exact_bytes
        table_bytes = run["weight_bytes"] + run["cache_bytes_read"] - run["bytes_read"]  # the embedding, bf16 or fp32
        assert table_bytes / (SMALL["vocabulary"] * SMALL["hidden"]) in (2, 4)


def test_growth_moves_and_copies_nothing(found):
    for run in found.values():
        grown = run["growth"]
        assert grown["older_slabs_in_place"] and grown["slabs_after"] == grown["slabs_before"] + 2
        assert grown["largest_temporaries_bytes"] < 4 * GRANULE_BYTES
        assert 0 <= grown["slack_bytes"] <= grown["slack_bound_bytes"]
        assert grown["bytes_added"] * (GROWTH_GRANULES + 1) == 2 * GROWTH_GRANULES * grown["slack_bound_bytes"]


def test_an_append_costs_the_same_everywhere(found):
    for run in found.values():
        short, full = (run["append_ms"][name]["median"] for name in ("short", "full"))
        assert 1 / 3 < full / short < 3


def test_whole_layers_fit_into_the_memory(monkeypatch):
    """Llama-3.1-8B's, by hand: 436 MB of weights a layer, and the caches' 1.375 and 4.5 bits for each of 2^31 numbers."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    layers_that_fit = runpy.run_path(str(ROOT / "benchmarks" / "decode_1m.py"))["layers_that_fit"]
    shape = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "vocabulary": 4096}
    asked = SimpleNamespace(tokens=1 << 20, memory_gib=6.0, **shape)
    assert [layers_that_fit(asked, build(preset, {}).cache) for preset in ("1bit", "tiered4")] == [7, 3]
    asked.memory_gib = 1.0
    with pytest.raises(ValueError, match=r"memory-gib 1: a layer takes 0\.72 GiB; give more or fewer tokens"):
        layers_that_fit(asked, build("1bit", {}).cache)
