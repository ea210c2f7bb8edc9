"""Models that come as one GGUF file are converted once, into the cache folder; what cannot be converted is refused by name."""

import shutil
import threading
from pathlib import Path

import pytest

from bitkv_dist import checkpoint, model


def test_gguf_is_converted_once_by_ranks_that_start_together(tmp_path, monkeypatch):
    monkeypatch.setenv("BITKV_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.Q4_0.gguf"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    conversions = []

    def convert(source, folder, progress):
        conversions.append(source)
        threading.Event().wait(0.2)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoint, "_convert", convert)
    places = []
    threads = [threading.Thread(target=lambda: places.append(checkpoint.localise(str(gguf)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversions == [gguf]
    assert len(set(places)) == 1
    assert (places[0] / "config.json").is_file()
    moved = tmp_path / "elsewhere" / gguf.name
    moved.parent.mkdir()
    shutil.copy(gguf, moved)
    assert checkpoint.localise(str(moved)) == places[0]
    gguf.write_bytes(b"GGUF" + bytes(999) + b"\1")
    assert checkpoint.localise(str(gguf)) != places[0]


def test_interrupted_conversion_leaves_nothing_that_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("BITKV_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")

    def fail(source, folder, progress):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.localise(str(gguf))
    monkeypatch.setattr(checkpoint, "_convert", lambda source, folder, progress: (folder / "config.json").touch())
    place = checkpoint.localise(str(gguf))
    assert [file.name for file in place.iterdir()] == ["config.json"]


def test_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    monkeypatch.setenv("BITKV_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="set BITKV_CACHE"):
        checkpoint.localise(str(gguf))


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("BITKV_CACHE", "/a")
    assert checkpoint.cache_folder() == Path("/a")
    monkeypatch.delenv("BITKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert checkpoint.cache_folder() == Path("/b/bitkv_dist")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.cache_folder() == Path.home() / ".cache" / "bitkv_dist"


@pytest.mark.parametrize("mark", [b"llama.rope.scaling.type", b"rope_freqs.weight"])
def test_gguf_with_scaled_positions_is_refused(tmp_path, mark):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20) + mark + bytes(20))
    with pytest.raises(ValueError, match="scaled rotary positions"):
        model.check(str(gguf))


def test_damaged_gguf_is_one_line(tmp_path):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"tiny\.gguf: the GGUF metadata cannot be read"):
        model.check(str(gguf))
