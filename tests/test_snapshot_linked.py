"""A snapshot that replaces one of the same cache: files of pages that have not changed are taken over, all else is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import simulated
import tiny
import torch
from safetensors import safe_open
from snapshots import CACHES, SMALL, refusal, served, tiny_model

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot import pieces
from bitkv_dist.snapshot.folder import find
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save

PROMPTS = [tiny.prompt(2300), tiny.prompt(700)]
TURNS = [tiny.prompt(400, seed=1), tiny.prompt(520, seed=2)]  # they complete a granule of either sequence
ALL = CACHES | {
    "heavy": CacheConfig(**SMALL, scan_bits=1, eviction="heavy", eviction_keep=0.8),
    "window": CacheConfig(**SMALL, scan_bits=1, eviction="window", eviction_keep=0.8),
    "looped": CacheConfig("looped", 2, 2, **SMALL),
}


@pytest.fixture(autouse=True)
def one_granule(monkeypatch):
    monkeypatch.setattr(pieces, "FILE_GRANULES", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def looping(tmp_path_factory):
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "total_ut_steps": 2}
    return tiny.contracting(tmp_path_factory.mktemp("looping"), **sizes)


def engine_of(mesh, model: Path, cache: str) -> Engine:
    return Engine(served(model, mesh.world.rank), ALL[cache], mesh, GenerateConfig(max_new_tokens=0))


def twice(mesh, model: Path, place: Path, cache: str) -> dict:
    """A snapshot of the prompts, and after another turn one that may take over what that has, beside one that may not."""
    engine = engine_of(mesh, model, cache)
    engine.generate(PROMPTS)
    first = save(engine, place / "s")
    mesh.gather_objects(None)
    before = files(place / "s")
    engine.generate(TURNS, keep=True)
    second = save(engine, place / "s", before=first)
    whole = save(engine, place / "whole")
    return {"before": before, "first": first, "second": second, "whole": whole, "digest": engine.cache_digest()}


def files(folder: Path) -> dict[str, os.stat_result]:
    return {path.name: path.stat() for path in folder.glob("*.safetensors")}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("cache", ALL)
def test_what_is_taken_over_is_what_would_be_written(model, looping, tmp_path, cache, size):
    found = simulated.run(size, twice, looping if cache == "looped" else model, tmp_path, cache)[0]
    before, after = found["before"], files(tmp_path / "s")
    assert after.keys() == files(tmp_path / "whole").keys()
    linked = {name for name in before.keys() & after.keys() if before[name].st_ino == after[name].st_ino}
    assert len(linked) >= (1 if cache in ("heavy", "window") else 3)
    for name in after:
        mine, fresh = tensors(tmp_path / "s" / name), tensors(tmp_path / "whole" / name)
        assert mine.keys() == fresh.keys() and all(torch.equal(mine[key], fresh[key]) for key in mine), name
    written = sum(stat.st_size for name, stat in after.items() if name not in linked)
    assert found["second"].new_bytes == written
    assert found["second"].bytes == found["whole"].new_bytes == sum(stat.st_size for stat in after.values())
    for ranks in (1, 2):
        assert loaded(ranks, looping if cache == "looped" else model, tmp_path / "s", cache) == found["digest"]


def loaded(size: int, model: Path, place: Path, cache: str) -> str:
    def run(mesh):
        engine = engine_of(mesh, model, cache)
        load(engine, find(place), Manifest.read(find(place)))
        return engine.cache_digest()

    return simulated.run(size, run)[0]


@pytest.mark.parametrize("size", [1, 2])
def test_only_new_pages_are_written(model, tmp_path, size):
    """To the page: of complete granules those that were none before, the rest of both sequences, and the windows."""
    found = simulated.run(size, twice, model, tmp_path, "4bit")[0]
    new = {name for name, stat in files(tmp_path / "s").items() if found["before"].get(name, stat).st_ino != stat.st_ino}
    new |= files(tmp_path / "s").keys() - found["before"].keys()
    pages: dict[int, set[int]] = {0: set(), 1: set()}
    for name in new:
        for key, index in tensors(tmp_path / "s" / name).items():
            if key.endswith("page_index"):
                pages[int(key.split(".")[1])] |= set(index.tolist())
    per_granule = 8
    ends = [(len(prompt) + len(turn) - 64) // 64 for prompt, turn in zip(PROMPTS, TURNS, strict=True)]
    whole = [(len(prompt) - 64) // (512 * size) * size for prompt in PROMPTS]  # granules in files of their own before
    assert [sorted(pages[s]) for s in (0, 1)] == [list(range(max(1, per_granule * whole[s]), ends[s])) for s in (0, 1)]


def test_nothing_new_costs_the_windows_alone(model, tmp_path):
    def run(mesh):
        engine = engine_of(mesh, model, "4bit")
        engine.generate([tiny.prompt(2000)])
        saved, costs = None, []
        for _ in range(3):
            saved = save(engine, tmp_path / "s", before=saved)
            costs.append(saved.new_bytes)
        return costs

    first, *later = simulated.run(1, run)[0]
    (rest,) = (tmp_path / "s").glob("rank0000-layers0000-0001.safetensors")
    assert later == [rest.stat().st_size] * 2 and first == sum(stat.st_size for stat in files(tmp_path / "s").values())


@pytest.mark.parametrize(("size", "linked"), [(2, True), (1, False), (3, False)])
def test_a_run_that_goes_on_takes_over_what_it_loaded(model, tmp_path, size, linked):
    """On the grid that saved; other ranks have other pages in their files."""
    simulated.run(2, twice, model, tmp_path, "4bit")
    old = files(tmp_path / "s")

    def run(mesh):
        engine = engine_of(mesh, model, "4bit")
        start = load(engine, tmp_path / "s", Manifest.read(tmp_path / "s"))
        assert save(engine, tmp_path / "elsewhere", before=start.saved).bytes > 0
        saved = save(engine, tmp_path / "s", before=start.saved)
        return saved.new_bytes, saved.bytes

    new, size_now = simulated.run(size, run)[0]
    kept = {name for name, stat in files(tmp_path / "s").items() if name in old and old[name].st_ino == stat.st_ino}
    assert (new < size_now / 2) == bool(kept) == linked
    assert all(stat.st_nlink == 1 for stat in files(tmp_path / "elsewhere").values())
    assert loaded(3, model, tmp_path / "s", "4bit") == loaded(1, model, tmp_path / "elsewhere", "4bit")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP])
def test_where_links_are_refused_all_is_written(model, tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    found = simulated.run(2, twice, model, tmp_path, "4bit")[0]
    assert found["second"].new_bytes == found["second"].bytes == found["whole"].bytes
    assert loaded(1, model, tmp_path / "s", "4bit") == found["digest"]


def test_a_file_that_somebody_has_touched_is_written_anew(model, tmp_path):
    """Replaced by another file, or changed in place."""

    def run(mesh):
        engine = engine_of(mesh, model, "4bit")
        engine.generate([tiny.prompt(2000)])
        saved = save(engine, tmp_path / "s")
        first, second, *_ = sorted((tmp_path / "s").glob("*granules*"))
        first.rename(tmp_path / "x")
        first.write_bytes((tmp_path / "x").read_bytes())
        with second.open("r+b") as file:
            file.seek(1000)
            file.write(b"?")
        save(engine, tmp_path / "s", before=saved)
        return {first.name, second.name}, engine.cache_digest()

    touched, digest = simulated.run(1, run)[0]
    manifest = Manifest.read(tmp_path / "s")
    new = {file.name for file in manifest.files if file.granules and file.snapshot == manifest.id}
    assert new == touched and len(manifest.files) > 3
    assert loaded(2, model, tmp_path / "s", "4bit") == digest


def test_a_changed_or_truncated_file_that_was_taken_over_is_refused(model, tmp_path):
    found = simulated.run(2, twice, model, tmp_path, "4bit")[0]
    after = files(tmp_path / "s")
    taken = [name for name in found["before"] if found["before"][name].st_ino == after.get(name, after[max(after)]).st_ino]
    assert len(taken) > 2
    for name in taken[:2]:
        path = tmp_path / "s" / name
        content = path.read_bytes()
        for changed in (content[:-1], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
            path.write_bytes(changed)
            assert "truncated" in (said := refusal(model, tmp_path / "s")) or "does not have its digest" in said
        path.write_bytes((tmp_path / "whole" / name).read_bytes())  # the same pages, written for another snapshot
        assert "belongs to another snapshot" in refusal(model, tmp_path / "s")
        path.unlink()
        assert f"{name} is missing" in refusal(model, tmp_path / "s")
        path.write_bytes(content)
    assert loaded(2, model, tmp_path / "s", "4bit") == found["digest"]
