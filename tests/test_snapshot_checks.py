"""What of a snapshot is refused, in one line on all ranks, and what is promised of one that is taken."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import simulated
import tiny
import torch
from safetensors import safe_open
from snapshots import CACHES, NEW, PROMPTS, loaded_at, refusal, saved_at, served, tiny_model
from transformers import AutoModelForCausalLM

from bitkv_dist import model as models
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot import manifest as manifests
from bitkv_dist.snapshot.folder import MANIFEST
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def snapshot(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "s"
    saved_at(2, model, place)
    return place


@pytest.fixture
def copy(snapshot, tmp_path):
    return shutil.copytree(snapshot, tmp_path / "copy")


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
