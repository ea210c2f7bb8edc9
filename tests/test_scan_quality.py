"""benchmarks/scan_quality.py runs to its end on a tiny model, and what it says of planes and words is what they are."""

import json
import runpy
import sys
from pathlib import Path

import calibrations
import pytest
import tiny
import torch

from bitkv_dist import model as models
from bitkv_dist.calibrated import read_origin

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scan_quality.py"
TEXT = Path(__file__).parent / "data" / "handbook.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    return tiny.save_tokenizer(tiny.save(place, vocab_size=257, max_position_embeddings=4096, head_dim=32))


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """Fitted to bytes of the same text behind those that are measured."""
    served = models.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    ids = list(TEXT.read_bytes()[4096 : 4096 + 2048])
    place = tmp_path_factory.mktemp("files")
    return {codec: calibrations.fitted_to(served, place, codec, ids) for codec in ("tailored", "residual")}


def run(monkeypatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scan_quality", *argv])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def test_a_short_run(folder, files, monkeypatch, capsys):
    argv = ("--model", str(folder), "--text", str(TEXT), "--tokens", "1600", "--every", "1")
    run(monkeypatch, *argv, "--calibration", files["tailored"])
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["tokens"], found["calibrations"]) == (1600, [read_origin(files["tailored"]).digest])
    rows = {row["scan"]: row for row in found["scans"]}
    name = "words (tailored-of-model, attended)"
    assert list(rows) == ["sign plane", "2 planes", name] and len(lines) == 3
    assert all(row["text"] == "handbook.txt" and 0 < row["found"] <= 1 and 0 < row["mass"] <= 1 for row in rows.values())
    assert rows["2 planes"]["bits"] == rows["sign plane"]["bits"] + 1 and rows[name]["bits"] < rows["sign plane"]["bits"]
    for better in ("2 planes", name):
        assert rows[better]["error"] < rows["sign plane"]["error"] and rows[better]["found"] > rows["sign plane"]["found"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"--tokens": "1500"}, "--tokens 1500: must be at least 1536"),
        ({"--text": "no.txt"}, "--text 'no.txt': cannot be read"),
        ({"--text": "short.txt"}, "--text short.txt: has 100 tokens; give a text of at least 1536"),
        ({"--calibration": "residual"}, "is of codec residual; give files of codec tailored"),
        ({"--calibration": "none.safetensors"}, "--calibration none.safetensors: cannot be read"),
    ],
)
def test_refused_in_one_line(folder, files, tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("x" * 100)
    asked = {"--model": str(folder), "--text": str(TEXT), "--tokens": "1600", "--calibration": "tailored"} | flags
    asked["--calibration"] = files.get(asked["--calibration"], asked["--calibration"])
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *(word for pair in asked.items() for word in pair))
    message = capsys.readouterr().err or str(caught.value)
    assert said in message and "Traceback" not in message
