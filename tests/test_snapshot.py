"""Snapshots: any number of ranks loads what any other has saved, to the bit; what is not whole is refused with its reason."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import simulated
import tiny
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from bitkv_dist import model as models
from bitkv_dist.config import CacheConfig, GenerateConfig, RefineConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot import manifest as manifests
from bitkv_dist.snapshot import pieces
from bitkv_dist.snapshot.folder import MANIFEST, find
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), num_key_value_heads=4, num_attention_heads=8, head_dim=16)


@functools.cache
def served(model: Path, rank: int) -> models.ServedModel:
    """One model for each simulated rank of all tests."""
    return models.load(str(model), dtype=torch.float32, device=torch.device("cpu"))


def engine_of(mesh, model: Path, cache: str = "4bit", **generate) -> Engine:
    if mesh.split.parts > 1:
        own = models.load(str(model), dtype=torch.float32, device=torch.device("cpu"), ranks=mesh)
    else:
        own = served(model, mesh.world.rank)
    return Engine(own, CACHES[cache], mesh, GenerateConfig(**{"max_new_tokens": NEW} | generate))


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
    return found | {"tokens": result.token_ids, "reasons": result.finish_reason}


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


# -------------------------------------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def snapshot(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "s"
    saved_at(2, model, place)
    return place


@pytest.fixture
def copy(snapshot, tmp_path):
    return shutil.copytree(snapshot, tmp_path / "copy")


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


def file_names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_changed_byte_anywhere_is_refused(model, copy):
    """Every file, at its start, in its middle and at its end."""
    for name in file_names(copy):
        content = (copy / name).read_bytes()
        for at in (3, 9, len(content) // 3, len(content) // 2, len(content) - 3):
            (copy / name).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            assert refusal(model, copy), (name, at)
        (copy / name).write_bytes(content)
    found = loaded_at(2, model, copy)
    assert found["promise"] == "bit-identical"


def test_a_changed_page_names_its_layer(model, copy):
    name = "rank0001-layers0000-0001.safetensors"
    with safe_open(copy / name, "pt") as tensors:
        page = tensors.get_tensor("layer.1.sequence.0.pages")[1, 2].numpy().tobytes()
    content = (copy / name).read_bytes()
    assert content.count(page) == 1
    (copy / name).write_bytes(content.replace(page, page[:50] + bytes([page[50] ^ 1]) + page[51:]))
    for size in (1, 2, 3):
        assert "layer 1 of sequence 0 does not have its digest" in refusal(model, copy, size=size)


def test_a_truncated_or_missing_file_is_refused(model, copy):
    for name in file_names(copy):
        content = (copy / name).read_bytes()
        for size in (0, 5, len(content) // 2, len(content) - 2):
            (copy / name).write_bytes(content[:size])
            assert name in refusal(model, copy) and re.search("truncated|changed", refusal(model, copy)), (name, size)
        (copy / name).unlink()
        assert name in refusal(model, copy)
        (copy / name).write_bytes(content)
    extended = copy / "logits.safetensors"
    extended.write_bytes(extended.read_bytes() + b"\0")
    assert "truncated or another file" in refusal(model, copy)


def test_files_of_two_snapshots_are_refused(model, copy, tmp_path):
    """The same prompts, model and sizes: only the mark in each file tells."""
    saved_at(2, model, tmp_path / "other")
    for name in file_names(copy):
        content = (copy / name).read_bytes()
        shutil.copy(tmp_path / "other" / name, copy / name)
        assert "belongs to another snapshot" in refusal(model, copy), name
        (copy / name).write_bytes(content)
    parts = sorted(copy.glob("rank*"))
    parts[0].write_bytes(parts[1].read_bytes().ljust(parts[0].stat().st_size, b"\0")[: parts[0].stat().st_size])
    assert parts[0].name in refusal(model, copy)


def rewritten(place: Path, **fields) -> None:
    """A manifest with other fields that still matches its own digest."""
    content = json.loads((place / MANIFEST).read_text()) | fields
    del content["digest"]
    content["digest"] = manifests.content_digest(content)
    (place / MANIFEST).write_text(json.dumps(content))


def test_ranks_that_do_not_make_a_whole_are_refused(model, copy):
    """A manifest that honestly lists too few files, or one rank's file twice."""
    files = json.loads((copy / MANIFEST).read_text())["files"]
    rewritten(copy, files=[files[0], files[2]])
    assert "is in no file" in refusal(model, copy)
    rewritten(copy, files=[files[0], files[0], files[2]])
    assert "a page of sequence 0 is in another file too" in refusal(model, copy)
    rewritten(copy, files=files[1:])
    assert re.search("is in no file|is not complete", refusal(model, copy))


def test_what_is_foreign_is_refused(model, copy, tmp_path):
    assert "cache.scan_bits is None there and 1 in this run" in refusal(model, copy, "fitted")
    content = json.loads((copy / MANIFEST).read_text())
    for fields, part in (
        ({"version": 1}, "version 1 of the format, this program reads version 2"),
        ({"format": "something"}, "is not that of a bitkv snapshot"),
        ({"rotation": "0" * 16}, "rotation digest 0000000000000000 there"),
        ({"model": content["model"] | {"layers": 30}}, "is of another model"),
        ({"model": content["model"] | {"fingerprint": "0" * 16}}, "is of other weights (fingerprint 0000000000000000 of"),
    ):
        rewritten(copy, **fields)
        assert part in refusal(model, copy)
        rewritten(copy, **content)
    other = tiny.save(tmp_path / "m", seed=1, num_key_value_heads=4, num_attention_heads=8, head_dim=16)
    assert "is of other weights" in refusal(other, copy)


def test_prompts_that_do_not_begin_with_it_are_refused(model, snapshot):
    first, second = PROMPTS
    changed = [*first[:700], first[700] ^ 1, *first[701:], 5]
    message = refusal(model, snapshot, "4bit", [changed, second])
    assert f"prompt 0 differs at token 700 ({first[700]} there, {changed[700]} here)" in message
    message = refusal(model, snapshot, "4bit", [first, second[:-1]])
    assert "prompt 1 ends at token 89, where the snapshot goes on to 90" in message
    assert "holds 2 sequences" in refusal(model, snapshot, "4bit", [first])


def test_the_end_has_no_logits_of_its_prompt(model, tmp_path):
    run = saved_at(1, model, tmp_path / "s", "4bit", PROMPTS[:1], "end")
    said = PROMPTS[0] + run["tokens"][0]
    assert "whose logits were not saved" in refusal(model, tmp_path / "s", "4bit", [said[:-1]])
    assert "ends at token 1300, where the snapshot goes on to 1305" in refusal(model, tmp_path / "s", "4bit", PROMPTS[:1])
    assert loaded_at(2, model, tmp_path / "s", "4bit", [said])["read"] == 1


def test_what_the_report_promises(snapshot):
    manifest = Manifest.read(snapshot)
    here = dict(manifest.computed)
    assert manifest.promise(here | {"sp": 7}) == "bit-identical"
    for other in ({"tp": 2}, {"device": "NVIDIA H200"}, {"kernel": "reference"}, {"torch": "9"}):
        assert manifest.promise(here | other) == "identical while the logit margin exceeds 0.02"
    assert "identical" not in manifest.promise(here | {"dtype": "bfloat16"})
    assert manifest.promise(here | {"exchange": "allreduce"}) == manifests.TURNED
    helix = replace(manifest, computed=here | {"layout": "helix", "exchange": "alltoall"})
    assert helix.promise(dict(helix.computed)) == manifests.IDENTICAL
    assert helix.promise(helix.computed | {"sp": 7}) == manifests.TURNED == helix.promise(here)
    half = replace(manifest, computed=here | {"dtype": "bfloat16"})
    assert half.promise(half.computed) == "bit-identical"
    assert half.promise(half.computed | {"tp": 2}) == "the same sealed bytes; 16-bit rounding moves logits by more than 1e-3"


def test_a_bfloat16_checkpoint_loads_in_either_dtype(model, tmp_path):
    """Its weights have one fingerprint in float32 and bfloat16; the sealed bytes are those of the run that saved."""
    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")

    def run(mesh, dtype, cache, first):
        served = models.load(str(tmp_path / "half"), dtype=dtype, device=torch.device("cpu"))
        engine = Engine(served, CACHES[cache], mesh, GenerateConfig(max_new_tokens=NEW))
        if first:
            engine.generate(PROMPTS, on_filled=lambda logits: save(engine, tmp_path / cache, logits))
            return engine.cache_digest()
        start = load(engine, tmp_path / cache, Manifest.read(tmp_path / cache), PROMPTS)
        found = engine.cache_digest(), start.promise
        engine.generate(PROMPTS, fill=start.fill)
        return found

    (digest,) = simulated.run(1, run, torch.float32, "4bit", True)
    for dtype, promise in ((torch.float32, manifests.IDENTICAL), (torch.bfloat16, manifests.BYTES)):
        assert simulated.run(2, run, dtype, "4bit", False) == [(digest, promise)] * 2
    simulated.run(1, run, torch.float32, "exact", True)
    with pytest.raises(ValueError, match="codec exact keeps pages in the model's dtype, float32; use --dtype float32"):
        simulated.run(1, run, torch.bfloat16, "exact", False)


def test_another_kernel_is_within_the_promise(model, tmp_path):
    """Saved with the C++ kernels, repeated in plain torch: the same bytes, logits within 1e-3."""
    from bitkv_dist.kernels import dispatch

    class Steps(Engine):
        def choose(self, logits, *args):
            self.seen.append(logits)
            return super().choose(logits, *args)

    def logits(mesh, first):
        engine = Steps(served(model, 0), CACHES["4bit"], mesh, GenerateConfig(max_new_tokens=NEW))
        engine.seen = []
        if first:
            result = engine.generate(PROMPTS, on_filled=lambda logits: save(engine, tmp_path / "s", logits))
        else:
            start = load(engine, tmp_path / "s", Manifest.read(tmp_path / "s"), PROMPTS)
            assert start.promise == "identical while the logit margin exceeds 0.02"
            result = engine.generate(PROMPTS, fill=start.fill)
        return torch.stack(engine.seen), engine.cache_digest(), result.token_ids

    ((before, digest, tokens),) = simulated.run(1, logits, True)
    with dispatch.forced("reference"):
        ((after, digest_now, tokens_now),) = simulated.run(1, logits, False)
    assert digest == digest_now and tokens == tokens_now
    assert 0 < (before - after).abs().max() < 1e-3
