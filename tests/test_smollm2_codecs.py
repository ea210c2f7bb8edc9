"""The built-in model's own codebooks, fitted and measured by the command line: what tailored and residual are for."""

import argparse
import json
import pydoc_data.topics
from pathlib import Path

import pytest
from commands import call

from bitkv_dist.launch import calibrate, evaluate

DATA = Path(__file__).parent / "data"
TEXTS = (str(DATA / "handbook.txt"), argparse.__file__, str(DATA / "tale.txt"))
QUICK = ("--tokens", "6144", "--window", "2048", "--vectors", "4096", "--iterations", "3", "--device", "cpu")
UNIFORM = "cache: {codec: minmax, key_bits: 2, value_bits: 2, key_group_tokens: 128, value_group_channels: 64}\n"


@pytest.mark.slow
def test_codebooks_beat_the_sign_code_and_uniform_codes(tmp_path):
    """Fitted to a little of a manual and measured on three other texts. Words of 1.25 bits: at most half of the sign code's KL,
    which takes 1.375. Residual codebooks of 2 bits: at most 0.8 of that of one-stage uniform codes without rotation, which take
    2.375. (Figures of a whole calibration: benchmarks/NOTES.md.)
    """
    manual, results, uniform = tmp_path / "manual.txt", tmp_path / "results.json", tmp_path / "uniform.yaml"
    topics = pydoc_data.topics.topics
    manual.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    uniform.write_text(UNIFORM)
    files = [str(tmp_path / f"{codec}.safetensors") for codec in ("tailored", "residual")]
    for codec, file in zip(("tailored", "residual"), files, strict=True):
        call(calibrate, "--codec", codec, "--text", str(manual), "--output", file, *QUICK)
    columns = ",".join(("exact", "1bit", str(uniform), *files))
    window = ("--task", "ppl", "--positions", "512:1024", "--device", "cpu")
    call(evaluate, *window, "--text", *TEXTS, "--compare", columns, "--json", str(results))
    rows = json.loads(results.read_text())["rows"]
    kl = {(row["codec"], row["text"]): row["kl"] for row in rows}
    bits = {row["codec"]: row["stored_bits"] for row in rows}
    assert bits["tailored"] < bits["1bit"] < bits["residual"] < bits["uniform"]
    for text in map(Path, TEXTS):
        assert kl["tailored", text.name] < 0.5 * kl["1bit", text.name], kl
        assert kl["residual", text.name] < 0.8 * kl["uniform", text.name], kl
