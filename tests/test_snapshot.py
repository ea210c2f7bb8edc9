"""Snapshots: any number of ranks loads what any other has saved, to the bit; what is not whole is refused with its reason."""

from __future__ import annotations

import functools
from pathlib import Path

import calibrations
import pytest
import ranks
import simulated
import tiny
import torch
from snapshots import CACHES, NEW, PROMPTS, SMALL, engine_of, loaded, loaded_at, saved, saved_at, served, tiny_model

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot import manifest as manifests
from bitkv_dist.snapshot import pieces
from bitkv_dist.snapshot.folder import MANIFEST
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------------------------------------- the same at any number of ranks


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("size", "later"), [(1, (1, 2, 3, 4)), (3, (1, 4))])
def test_a_run_is_repeated_at_any_number_of_ranks(model, tmp_path, cache, size, later):
    run = saved_at(size, model, tmp_path / "s", cache)
    for ranks_now in later:
        found = loaded_at(ranks_now, model, tmp_path / "s", cache, PROMPTS)
        assert found["tokens"] == run["tokens"] and found["digest"] == run["digest"]
        assert (found["promise"], found["prefix"], found["read"]) == ("bit-identical", 1390, 0)
    assert loaded_at(1, model, tmp_path / "s", cache)["tokens"] == run["tokens"]  # without prompts: its own
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def state_of(engine: Engine) -> list[dict[str, torch.Tensor]]:
    found = []
    for state in (state for layer in engine.cache.layers for state in layer.states):
        learnt = state.tuning.state() if state.tuning else {}
        found.append({"exact": state.rows(), "length": torch.tensor(state.length)} | learnt)
    return found


@pytest.mark.parametrize("cache", CACHES)
def test_everything_a_layer_keeps_comes_back(model, tmp_path, cache):
    def before(mesh):
        engine = engine_of(mesh, model, cache)
        engine.generate(PROMPTS)
        save(engine, tmp_path / "s")
        return state_of(engine), engine.cache.page_digests(), engine.histories, engine.pending

    def after(mesh):
        engine = engine_of(mesh, model, cache)
        load(engine, tmp_path / "s", Manifest.read(tmp_path / "s"))
        return state_of(engine), engine.cache.page_digests(), engine.histories, engine.pending

    old, new = simulated.run(2, before), simulated.run(2, after)
    for (states, *rest), (states_now, *rest_now) in zip(old, new, strict=True):
        assert rest == rest_now
        for state, state_now in zip(states, states_now, strict=True):
            assert state.keys() == state_now.keys()
            assert all(torch.equal(state[name], state_now[name]) for name in state)
    assert len(old[0][0][0]) == {"4bit": 2, "fitted": 8, "exact": 2}[cache]


def test_a_draw_without_a_seed_is_repeated(model, tmp_path):
    run = simulated.run(1, functools.partial(saved, temperature=1.0), model, tmp_path / "s")[0]
    again = simulated.run(2, functools.partial(loaded, temperature=1.0), model, tmp_path / "s", "4bit", PROMPTS)[0]
    assert again["tokens"] == run["tokens"]
    other = functools.partial(loaded, temperature=1.0, sampling_seed=5)  # a seed of this run wins
    assert simulated.run(1, other, model, tmp_path / "s")[0]["tokens"] != run["tokens"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", ["4bit", "fitted"])
def test_a_run_goes_on_where_it_ended(model, tmp_path, cache, temperature):
    """4 tokens, saved by 2 ranks at the end, and 90 more on 3 are the 94 tokens of one run; pages are sealed on the way."""
    options = {"temperature": temperature, "sampling_seed": 7}
    whole = functools.partial(saved, max_new_tokens=94, **options)
    whole = simulated.run(1, whole, model, tmp_path / "whole", cache, PROMPTS, "end")[0]
    first = functools.partial(saved, max_new_tokens=4, **options)
    first = simulated.run(2, first, model, tmp_path / "s", cache, PROMPTS, "end")[0]
    rest = functools.partial(loaded, max_new_tokens=90, temperature=temperature)
    rest = simulated.run(3, rest, model, tmp_path / "s", cache)[0]
    assert [a + b for a, b in zip(first["tokens"], rest["tokens"], strict=True)] == whole["tokens"]
    assert rest["digest"] == first["digest"] and rest["after"] == whole["digest"] != rest["digest"]
    assert rest["promise"] == "bit-identical" and rest["read"] == 0


@pytest.mark.parametrize(("eviction", "keep"), [("heavy", 0.5), ("window", 320.0)])
def test_words_with_planes_and_eviction_go_on(model, tmp_path, eviction, keep):
    """Codec tailored with planes behind its words, half of the pages given up: the same bytes and tokens on other ranks."""
    made = {"layers": 2, "heads": 4, "dim": 16, "fingerprint": f"{served(model, 0).fingerprint:016x}"}
    cache = CacheConfig("tailored", 3, 3, calibration=calibrations.make(tmp_path, **made), eviction=eviction,
                        eviction_keep=keep, **SMALL)  # fmt: skip
    run = saved_at(3, model, tmp_path / "prompt", cache)
    for size in (1, 2, 4):
        found = loaded_at(size, model, tmp_path / "prompt", cache, PROMPTS)
        assert (found["tokens"], found["digest"]) == (run["tokens"], run["digest"]) and found["promise"] == "bit-identical"
    whole = simulated.run(1, functools.partial(saved, max_new_tokens=70), model, tmp_path / "whole", cache, PROMPTS, "end")[0]
    first = simulated.run(2, functools.partial(saved, max_new_tokens=3), model, tmp_path / "s", cache, PROMPTS, "end")[0]
    rest = simulated.run(3, functools.partial(loaded, max_new_tokens=67), model, tmp_path / "s", cache)[0]
    assert [a + b for a, b in zip(first["tokens"], rest["tokens"], strict=True)] == whole["tokens"]
    assert rest["digest"] == first["digest"] and rest["after"] == whole["digest"] != rest["digest"] and whole["evicted"] > 500


def test_a_sequence_that_has_ended_stays_ended(model, tmp_path):
    def run(mesh):
        engine = engine_of(mesh, model)
        engine.generate(PROMPTS, lambda sequence, token: sequence == 1)  # the second ends with its first token
        save(engine, tmp_path / "s")

    simulated.run(1, run)
    found = loaded_at(1, model, tmp_path / "s")
    assert [len(tokens) for tokens in found["tokens"]] == [NEW, 0] and found["reasons"] == ["length", "stop"]


def test_a_longer_prompt_is_read_packed_on_top(model, tmp_path):
    """As a turn of the run that saved: the same tokens and bytes, at any number of ranks."""
    longer = [prompt + tiny.prompt(300, seed=1) for prompt in PROMPTS]

    def one_run(mesh):
        engine = engine_of(mesh, model, max_new_tokens=0)
        engine.generate(PROMPTS, on_filled=lambda logits: save(engine, tmp_path / "s", logits))
        engine.config = GenerateConfig(max_new_tokens=NEW)
        return engine.generate([tiny.prompt(300, seed=1)] * 2, keep=True).token_ids, engine.cache_digest()

    tokens, digest = simulated.run(1, one_run)[0]
    for size in (1, 2, 3, 4):
        found = loaded_at(size, model, tmp_path / "s", "4bit", longer)
        assert (found["tokens"], found["after"], found["prefix"], found["read"]) == (tokens, digest, 1390, 600)
    mixed = [PROMPTS[0], longer[1]]  # one prompt has nothing left to read, the other has
    found = loaded_at(2, model, tmp_path / "s", "4bit", mixed)
    assert found["tokens"] == [saved_at(1, model, tmp_path / "t")["tokens"][0], tokens[1]] and found["read"] == 300


def test_one_sequence_serves_many_prompts(model, tmp_path):
    document, questions = PROMPTS[0], [tiny.prompt(20, seed=seed) for seed in (1, 2, 3)]
    saved_at(2, model, tmp_path / "s", "4bit", [document])
    alone = [loaded_at(1, model, tmp_path / "s", "4bit", [document + question])["tokens"][0] for question in questions]
    found = loaded_at(3, model, tmp_path / "s", "4bit", [document + question for question in questions])
    assert found["tokens"] == alone and (found["prefix"], found["read"]) == (3900, 60)
    assert len(set(map(tuple, alone))) == 3


def test_a_conversation_goes_on(model, tmp_path):
    turn = tiny.prompt(30, seed=2)

    def one_run(mesh):
        engine = engine_of(mesh, model)
        engine.generate(PROMPTS[:1])
        save(engine, tmp_path / "s")
        return engine.generate([turn], keep=True).token_ids

    def other_run(mesh):
        engine = engine_of(mesh, model)
        load(engine, tmp_path / "s", Manifest.read(tmp_path / "s"))
        return engine.generate([turn], keep=True).token_ids

    tokens = simulated.run(1, one_run)[0]
    assert simulated.run(2, other_run)[0] == tokens


@pytest.mark.slow
def test_real_ranks_and_tensor_parallelism(model, tmp_path):
    """Two real ranks as tp 2 and as sp 2 load what one has saved, and one what they have: KV heads are global."""
    run = saved_at(1, model, tmp_path / "one")
    for tp in (1, 2):
        found = ranks.run_ranks(2, save_and_load, str(model), str(tmp_path / "one"), str(tmp_path / f"tp{tp}"), tp=tp)[0]
        assert found["tokens"] == run["tokens"] and found["digest"] == run["digest"]
        assert found["promise"] == ("bit-identical" if tp == 1 else "identical while the logit margin exceeds 0.02")
        back = loaded_at(3, model, tmp_path / f"tp{tp}", "4bit", PROMPTS)
        assert back["promise"] == found["promise"] and back["tokens"] == run["tokens"] == found["own tokens"]
        assert back["digest"] == found["own digest"]


@pytest.mark.parametrize(("tp", "sp", "layout"), [(8, 2, "replicated"), (1, 3, "helix"), (2, 2, "helix")])
def test_grids_that_share_weights_or_copy_heads(model, tmp_path, tp, sp, layout):
    """4 KV heads on 8 TP ranks: of two copies one is written, and both are read and checked."""
    grid = {"tp": tp, "layout": layout}
    run = saved_at(1, model, tmp_path / "one")
    own = simulated.run(tp * sp, saved, model, tmp_path / "own", **grid)[0]
    assert own["tokens"] == run["tokens"]
    for found in simulated.run(tp * sp, loaded, model, tmp_path / "one", "4bit", PROMPTS, **grid):
        assert found["tokens"] == run["tokens"] and found["digest"] == run["digest"] and found["promise"] == manifests.TURNED
    for found in simulated.run(tp * sp, loaded, model, tmp_path / "own", "4bit", PROMPTS, **grid):
        assert found["tokens"] == run["tokens"] and found["digest"] == own["digest"] and found["promise"] == manifests.IDENTICAL
    back = loaded_at(3, model, tmp_path / "own", "4bit", PROMPTS)
    assert back["tokens"] == run["tokens"] and back["digest"] == own["digest"] and back["promise"] == manifests.TURNED
    held = sum(path.stat().st_size for path in (tmp_path / "own").glob("rank*"))
    assert held < 1.2 * sum(path.stat().st_size for path in (tmp_path / "one").glob("rank*"))


def save_and_load(mesh, model: str, one: str, own: str) -> dict:
    run = saved(mesh, model, Path(own))
    return loaded(mesh, model, Path(one), "4bit", PROMPTS) | {"own tokens": run["tokens"], "own digest": run["digest"]}


def test_layers_are_written_in_ranges(model, tmp_path, monkeypatch):
    run = saved_at(2, model, tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()}
    files = {f"rank000{rank}-layers0000-0001.safetensors" for rank in range(2)}
    assert names == files | {MANIFEST, "logits.safetensors"}
    monkeypatch.setattr(pieces, "FILE_BYTES", 1)
    saved_at(2, model, tmp_path / "s")
    assert len(list((tmp_path / "s").glob("rank*"))) == 4
    assert loaded_at(3, model, tmp_path / "s")["tokens"] == run["tokens"]
    assert pieces.bounded([[3, 1], [1, 3]]) == [range(0, 1), range(1, 2)]
