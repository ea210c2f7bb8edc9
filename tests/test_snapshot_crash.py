"""A save that is cut short at any step, or fails on any rank, leaves the old snapshot or the new one; never half of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import simulated
import tiny
import torch
from safetensors import SafetensorError
from snapshots import engine_of, loaded_at, saved_at, tiny_model

from bitkv_dist.snapshot import folder as folders
from bitkv_dist.snapshot import pieces
from bitkv_dist.snapshot import save as saving
from bitkv_dist.snapshot.folder import MANIFEST, Replacement, discard, find
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save

PROMPTS = [tiny.prompt(700)]


class Crash(BaseException):
    """The machine has stopped: nobody catches it."""


class Power:
    """Counts what changes the disk. Step number `last` happens by half and raises Crash; so do all after it, without happening:
    no clean-up reaches the disk."""

    def __init__(self, monkeypatch, last: int) -> None:
        self.steps, self.last = 0, last
        for owner, name, half in (
            (saving, "save_file", lambda tensors, path, *_: path.write_bytes(b"\0" * 100)),
            (Path, "write_text", lambda path, text, **_: path.write_bytes(text.encode()[: len(text) // 2])),
            (Path, "mkdir", None),
            (Path, "unlink", None),
            (Path, "rmdir", None),
            (Path, "chmod", None),
            (folders.os, "rename", None),
            (folders.os, "link", None),
            (folders.os, "fsync", None),
        ):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name), half))

    def counted(self, real, half):
        def step(*args, **options):
            self.steps += 1
            if self.steps == self.last and half is not None:
                half(*args, **options)
            if self.steps >= self.last:
                raise Crash(real.__name__)
            return real(*args, **options)

        return step


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != folders.LOCK}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "before", ["nothing", "a snapshot", "a half removed one beside it", "only the one put aside", "one that it goes on from"]
)
def test_a_crash_at_every_step_leaves_the_old_or_the_new(model, tmp_path, monkeypatch, before):
    place = tmp_path / "s"
    monkeypatch.setattr(pieces, "FILE_GRANULES", 1)  # a file with links to it
    old = saved_at(1, model, tmp_path / "old", "4bit", PROMPTS)["tokens"]

    def prepare() -> None:
        for path in tmp_path.iterdir():
            if path.name != "old":
                shutil.rmtree(path)
        if before != "nothing":
            shutil.copytree(tmp_path / "old", place)
        if before == "a half removed one beside it":
            (tmp_path / "s.old").mkdir()
            shutil.copy(place / MANIFEST, tmp_path / "s.old")
        if before == "only the one put aside":
            place.rename(tmp_path / "s.old")

    def attempt(mesh, last: int) -> int:
        engine = engine_of(mesh, model)
        start = load(engine, place, Manifest.read(place), longer) if before == "one that it goes on from" else None
        engine.generate(longer, fill=start and start.fill)
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            power = Power(patch, last)
            new = save(engine, place, before=start and start.saved)
            assert (new.new_bytes < new.bytes) == (start is not None)
        return power.steps

    longer = [PROMPTS[0] + tiny.prompt(100)]
    found, steps, last = [], 0, 0
    while steps >= last:  # until one is not cut short
        prepare()
        last += 1
        (steps,) = simulated.run(1, attempt, last)
        try:
            there = find(place)
        except ValueError:
            found.append("nothing")
            continue
        manifest = Manifest.read(there)
        manifest.check_files(there)
        found.append(manifest.at)
        if manifest.at == "prefill":
            assert contents(there) == contents(tmp_path / "old")
    assert last > 10
    first = "nothing" if before == "nothing" else "prefill"
    new = found.index("end")
    assert found == [first] * new + ["end"] * (len(found) - new) and 5 < new < len(found)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "s"}
    assert loaded_at(2, model, place)["prefix"] > 800
    assert loaded_at(1, model, tmp_path / "old")["tokens"] == old


def test_the_next_save_clears_what_a_crash_has_left(model, tmp_path, monkeypatch):
    def crashed(mesh):
        engine = engine_of(mesh, model)
        engine.generate(PROMPTS)
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            Power(patch, 4)
            save(engine, tmp_path / "s")

    simulated.run(1, crashed)
    assert [path.name for path in tmp_path.iterdir()] == ["s.writing"]
    (tmp_path / "s.writing" / "rank0007-layers0000-0001.safetensors").write_bytes(b"of a larger job")
    saved_at(2, model, tmp_path / "s", "4bit", PROMPTS)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert len(list((tmp_path / "s").iterdir())) == 4 and loaded_at(1, model, tmp_path / "s")["prefix"] == 700


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(28, "No space left on device", "x.safetensors"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_any_rank_keeps_the_old_and_ends_all(model, tmp_path, monkeypatch, error, failing):
    """Disk full or out of memory in the second file of one rank: every rank raises the same line, nothing lies about."""
    place = tmp_path / "s"
    saved_at(2, model, place, "4bit", PROMPTS)
    old = contents(place)
    monkeypatch.setattr(pieces, "FILE_BYTES", 1)
    real = saving.save_file

    def full(tensors, path, metadata):
        if path.name.startswith(f"rank{failing:04d}-layers0001"):
            path.write_bytes(b"half")
            raise error
        real(tensors, path, metadata)

    monkeypatch.setattr(saving, "save_file", full)

    def attempt(mesh):
        engine = engine_of(mesh, model)
        engine.generate(PROMPTS)
        with pytest.raises(RuntimeError, match=f"save-cache .*what was there is unchanged: rank {failing} failed") as failure:
            save(engine, place)
        return str(failure.value)

    (message,) = set(simulated.run(2, attempt))
    assert ("\n" not in message and type(error).__name__ in message) or "No space left" in message
    assert contents(place) == old and [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_rename_that_fails_puts_the_old_one_back(model, tmp_path, monkeypatch):
    place = tmp_path / "s"
    saved_at(1, model, place, "4bit", PROMPTS)
    old, rename = contents(place), os.rename

    def attempt(mesh):
        engine = engine_of(mesh, model)
        engine.generate(PROMPTS)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="rank 0 failed"):
            patch.setattr(os, "rename", lambda a, b: rename(a, b) if not str(a).endswith(".writing") else os.stat("/no/such"))
            save(engine, place)

    simulated.run(1, attempt)
    assert contents(place) == old and [path.name for path in tmp_path.iterdir()] == ["s"]


def test_space_is_checked_before_anything_is_written(model, tmp_path, monkeypatch):
    place = tmp_path / "s"
    saved_at(1, model, place, "4bit", PROMPTS)
    old = contents(place)
    written = sum(len(content) for name, content in old.items() if name.startswith("rank"))
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    monkeypatch.setattr(saving, "save_file", lambda *_: pytest.fail("something was written"))

    def attempt(mesh):
        engine = engine_of(mesh, model, max_new_tokens=0)
        engine.generate(PROMPTS)
        with pytest.raises(ValueError, match="free some or save elsewhere") as refused:
            save(engine, place)
        with pytest.raises(ValueError, match="free some or save elsewhere"):
            saving.check_room(engine, place, [700])
        saving.check_room(engine, place, [150])  # nothing of it is sealed
        return str(refused.value)

    (message,) = set(simulated.run(2, attempt))
    needed = float(message.split("needs ")[1].split(" MB")[0]) * 1e6
    assert abs(needed - written) < 0.06e6 and "0.0 MB are free there" in message
    assert contents(place) == old and [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_really_full(model, small_disk, monkeypatch):
    """Without the check of free space, as when another program takes the space meanwhile."""
    saved_at(1, model, small_disk / "s", "4bit", [tiny.prompt(400)])
    old = contents(small_disk / "s")
    monkeypatch.setattr(saving, "require_space", lambda *_: None)

    def attempt(mesh):
        engine = engine_of(mesh, model)
        engine.generate([tiny.prompt(2000)])
        with pytest.raises(RuntimeError, match="No space left on device"):
            save(engine, small_disk / "s")

    simulated.run(2, attempt)
    assert contents(small_disk / "s") == old and os.listdir(small_disk) == ["s"]
    assert loaded_at(2, model, small_disk / "s")["prefix"] == 400


# ------------------------------------------------------------------------------------------------------------ what is replaced


def test_only_a_snapshot_is_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    (tmp_path / "file").write_text("x")
    (tmp_path / "s.old").mkdir()
    (tmp_path / "s.old" / "notes").write_text("x")
    for name, part in (
        ("mine", "is not empty and holds no snapshot"),
        ("file", "is a file"),
        ("s", f"{tmp_path / 's.old'} is not empty and holds no snapshot"),
        ("no/such/folder", f"its folder {tmp_path / 'no/such'} does not exist"),
    ):
        with pytest.raises(ValueError, match=part):
            Replacement(tmp_path / name).begin()
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "s.old"]


def test_files_of_others_are_never_removed(model, tmp_path):
    """A manifest of another program, notes beside a snapshot, a folder with the name of our unfinished one."""
    web, kept, own = tmp_path / "web", tmp_path / "s", tmp_path / "t.writing"
    for folder in (web, own):
        folder.mkdir()
    (web / MANIFEST).write_text('{"name": "an app"}')
    (web / "index.html").write_text("x")
    (own / "thesis.tex").write_text("all of it")
    saved_at(1, model, kept, "4bit", PROMPTS)
    (kept / "notes.txt").write_text("x")
    for name, part in (
        ("web", "is not empty and holds no snapshot"),
        ("s", "holds notes.txt, which is no part of a snapshot; move that, or save elsewhere"),
        ("t", "t.writing holds thesis.tex, which is no part of a snapshot"),
    ):
        with pytest.raises(ValueError, match=part):
            Replacement(tmp_path / name).begin()
    for folder in (web, kept):
        discard(folder)
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    assert (web / "index.html").exists() and (own / "thesis.tex").exists()


def test_an_empty_folder_and_a_link_are_replaced_where_they_point(model, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        saved_at(1, model, tmp_path / "link", "4bit", PROMPTS)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / MANIFEST).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_two_at_a_time_are_refused(tmp_path):
    first, second = Replacement(tmp_path / "s"), Replacement(tmp_path / "s")
    first.begin()
    with pytest.raises(ValueError, match="another run is saving there"):
        second.begin()
    first.abandon()
    second.begin()
    second.abandon()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_snapshot_is_not_found(tmp_path):
    for name in ("no", "empty", "mine"):
        if name != "no":
            (tmp_path / name).mkdir()
        if name == "mine":
            (tmp_path / name / "x").write_text("x")
        with pytest.raises(ValueError, match="no such snapshot" if name != "mine" else "has no manifest.json"):
            find(tmp_path / name)


def test_nothing_is_pickled(model, tmp_path):
    saved_at(1, model, tmp_path / "s", "fitted", PROMPTS)
    for name, content in contents(tmp_path / "s").items():
        if name == MANIFEST:
            json.loads(content)
        else:
            header = int.from_bytes(content[:8], "little")
            assert json.loads(content[8 : 8 + header])["__metadata__"]["snapshot"]
