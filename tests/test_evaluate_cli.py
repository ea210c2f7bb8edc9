"""The command line of `evaluate`: four tasks on a tiny random model, results that are found again, refusals in one line."""

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import commands
import pytest
import tiny

from bitkv_dist.codec.interface import make_codec
from bitkv_dist.config import build
from bitkv_dist.evaluate.drift import drift
from bitkv_dist.launch import evaluate

DATA = Path(__file__).parent / "data"
HANDBOOK, TALE, CODE = str(DATA / "handbook.txt"), str(DATA / "tale.txt"), argparse.__file__
WINDOW = ("--page-tokens", "64", "--sink-tokens", "64", "--recent-tokens", "64")
PPL_ROW = ["codec", "text", "tokens", "ppl", "ppl_ratio", "kl", "top1", "stored_bits", "read_bits", "ratio", "refined_share",
           "kept_share"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("a model's folder")
    return str(tiny.save_tokenizer(tiny.save(place, vocab_size=257, head_dim=64, max_position_embeddings=2048)))


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Calls main in this process; returns (stdout, the file of results)."""

    def call(*argv: str) -> tuple[str, dict]:
        path = tmp_path / "results.json"
        commands.call(evaluate, "--model", folder, "--device", "cpu", "--json", path, *WINDOW, *argv)
        return capsys.readouterr().out, json.loads(path.read_text())

    return call


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))


refused = partial(commands.refused, evaluate)


# ------------------------------------------------------------------------------------------------------------- ppl


def test_bits_of_all_columns(run, tmp_path):
    """--kv-bits is read as `generate` reads it, leaves exact columns exact, and a preset with these very bits as it is."""
    argv, plain = ("--task", "ppl", "--text", HANDBOOK, "--positions", "200:300"), tmp_path / "plain.yaml"
    plain.write_text("cache: {codec: minmax, key_bits: 4, value_bits: 4}\n")
    _, found = run(*argv, "--compare", f"exact,2bit,{plain}", "--kv-bits", "2")
    assert [(row["codec"], round(row["stored_bits"], 3)) for row in found["rows"]] == [
        ("exact", 32.0), ("2bit", 2.5), ("plain", 2.75)
    ]  # fmt: skip


def test_bits_that_make_two_columns_one(capsys, folder, no_model, tmp_path):
    for name, bits in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"cache: {{key_bits: {bits}, value_bits: {bits}}}\n")
    argv = ("--model", folder, "--device", "cpu", "--text", HANDBOOK, "--task", "ppl", "--kv-bits", "3")
    message = refused(capsys, *argv, "--compare", f"{tmp_path}/one.yaml,{tmp_path}/two.yaml")
    assert message == "compare one,two: are the same cache with cache.kv_bits 3; leave one of them out"


def test_ppl_rows_and_table(run, tmp_path):
    plot = tmp_path / "p.png"
    argv = ("--task", "ppl", "--text", HANDBOOK, CODE, "--positions", "200:400", "--compare", "exact,2bit,tiered4")
    out, found = run(*argv, "--plot", str(plot))
    rows = found["rows"]
    assert [(row["codec"], row["text"]) for row in rows] == [
        (codec, text) for text in ("handbook.txt", "argparse.py") for codec in ("exact", "2bit", "tiered4")
    ]
    assert all(list(row) == PPL_ROW and row["tokens"] == 200 for row in rows)
    exact, two, tiered = rows[:3]
    assert (exact["ppl_ratio"], exact["kl"], exact["top1"], exact["refined_share"]) == (1, 0, 1, 0)
    assert two["kl"] > 0 and two["ppl_ratio"] == two["ppl"] / exact["ppl"] and two["ratio"] == 16 / two["stored_bits"]
    assert tiered["read_bits"] < two["read_bits"] < tiered["stored_bits"] and 0.05 <= tiered["refined_share"] < 0.08
    assert "the first 64 tokens and the last 64 to 127" in out and "pages of 64" in out
    assert all(out.count(name) >= 2 for name in ("exact", "2bit", "tiered4"))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_finished_cells_are_skipped(run, monkeypatch):
    argv = ("--task", "ppl", "--text", HANDBOOK, "--positions", "200:300", "--compare")
    _, first = run(*argv, "exact,2bit")
    out, again = run(*argv, "2bit,1bit")
    assert again["rows"][:2] == first["rows"] and again["rows"][2]["codec"] == "1bit"
    assert out.index("2bit") < out.index("1bit") and "exact │" not in out
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    shown, last = run(*argv, "1bit,exact")
    assert last == again and "1bit" in shown
    with pytest.raises(ValueError, match=r"holds results of positions \[200, 300\], not \[200, 301\]"):
        run("--task", "ppl", "--text", HANDBOOK, "--positions", "200:301", "--compare", "2bit")
    with pytest.raises(ValueError, match="holds results of window"):
        run(*argv, "2bit", "--recent-tokens", "128")


def test_a_text_that_ends_early_keeps_the_others_rows(run):
    """What is found before a failure stays: the second text is too short, and nothing has been measured."""
    short = Path(HANDBOOK).parent / "tale.txt"
    with pytest.raises(ValueError, match=r"positions 200:30000: the text has 2\d{4} tokens"):
        run("--task", "ppl", "--text", str(short), "--positions", "200:30000", "--compare", "2bit")


def test_one_window_for_all_columns(run, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("cache: {key_bits: 2, value_bits: 2, recent_tokens: 256, page_tokens: 128}\n")
    _, found = run("--task", "ppl", "--text", HANDBOOK, "--positions", "200:300", "--compare", f"2bit,{other}")
    two, same = found["rows"]
    assert same["codec"] == "other" and all(same[name] == two[name] for name in PPL_ROW[2:])


# ------------------------------------------------------------------------------------------------------- retrieval


def test_retrieval_rows_and_table(run):
    argv = ("--task", "retrieval", "--text", TALE, "--context", "500,700", "--depths", "0.2,0.8", "--kinds", "passkey,keyvalue")
    out, found = run(*argv, "--compare", "exact,1bit")
    assert [tuple(row.values()) for row in found["rows"]] == [
        (codec, context, depth, kind, 0.0)  # random weights know nothing
        for context in (500, 700)
        for depth in (0.2, 0.8)
        for kind in ("passkey", "keyvalue")
        for codec in ("exact", "1bit")  # the columns read a prompt together
    ]
    assert list(found["rows"][0]) == ["codec", "context", "depth", "task", "score"]
    assert "0.2" in out and "0.8" in out and out.count("keyvalue") == 4


# ----------------------------------------------------------------------------------------------- drift, sensitivity


def test_drift_rows_and_table(run, monkeypatch):
    out, found = run("--task", "drift", "--text", HANDBOOK, "--config", "tiered4", "--context", "600")
    heads = [(row["layer"], row["head"], row["kv_head"]) for row in found["rows"]]
    assert heads == [(layer, head, head // 2) for layer in range(2) for head in range(4)]
    assert {row["verdict"] for row in found["rows"]} <= {"ok", "noisy"}
    assert "tiered4 on 600 tokens of handbook.txt" in out and "0 off" in out and "of the sealed mass" in " ".join(out.split())
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    assert run("--task", "drift", "--text", HANDBOOK, "--config", "tiered4", "--context", "600")[0] == out
    for change in (("--text", TALE), ("--config", "2bit"), ("--context", "601")):
        argv = {"--task": "drift", "--text": HANDBOOK, "--config": "tiered4", "--context": "600"} | dict([change])
        with pytest.raises(ValueError, match="holds results of"):
            run(*itertools.chain(*argv.items()))


def test_drift_names_a_planted_fault(run, monkeypatch):
    def make(config, heads, index):
        codec = make_codec(config, heads, index)
        if index == 1:
            codec.encode = make_codec(replace(config, seed=1), heads, index).encode
        return codec

    monkeypatch.setattr("bitkv_dist.evaluate.drift.drift", partial(drift, make=make))
    out, found = run("--task", "drift", "--text", HANDBOOK, "--config", "4bit", "--context", "600")
    cause = "rotation (keys), rotation (values)"
    assert {(row["layer"], row["cause"]) for row in found["rows"] if row["verdict"] == "off"} == {(1, cause)}
    assert f"head 0, 1, 2, 3: {cause}" in " ".join(out.replace("│", " ").split())


def test_sensitivity_writes_a_schedule_that_generate_takes(run, folder, tmp_path):
    from bitkv_dist.launch import generate

    schedule = tmp_path / "schedule.yaml"
    argv = ("--task", "sensitivity", "--text", HANDBOOK, "--positions", "200:300")
    argv += ("--budget-bits", "2.2", "--output", str(schedule))
    out, found = run(*argv)
    base, first, second, whole = found["rows"]
    assert base["step"] == "base"
    assert [row["step"] for row in (first, second)] == [f"layer {layer}, keys and values at 2 bits" for layer in range(2)]
    assert base["kl"] > min(first["kl"], second["kl"]) and whole["stored_bits"] <= 2.2
    assert "yes" in out and f"KL {whole['kl']:.4f}" in out
    cache = build(str(schedule), {}).cache
    assert cache.layers and (cache.page_tokens, cache.recent_tokens) == (64, 64)
    again, _ = run(*argv)
    assert again == out
    report = tmp_path / "report.json"
    argv = ("--model", folder, "--device", "cpu", "--config", schedule, "--json", report)
    commands.call(generate, *argv, "--prompt", "x" * 400, "--max-new-tokens", 2)
    assert json.loads(report.read_text())["kv"]["stored_bits_per_element"] == whole["stored_bits"]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ((), "--task"),
        (("--task", "speed"), "speed"),
        (("--task", "ppl", "--positions", "10"), "must be A:B"),
        (("--task", "ppl", "--positions", "0:10"), "positions 0:10"),
        (("--task", "ppl", "--positions", "1000:3000"), "tiny model has 2048 positions"),
        (("--task", "ppl", "--compare", "2bits"), "did you mean 2bit"),
        (("--task", "ppl", "--compare", "2bit,2bit"), "must be different names"),
        (("--task", "ppl", "--depths", "0.5"), "--depths: task ppl does not read it; leave it out or use --task retrieval"),
        (("--task", "ppl", "--recent-tokens", "-1"), "cache.recent_tokens -1"),
        (("--task", "ppl", "--compare", "exact,2bit", "--kv-bits", "5"), "cache.kv_bits 5: codec planes stores 1"),
        (("--task", "ppl", "--compare", "1bit,exact", "--kv-bits", "3"), "compare 1bit: the name says its bits, and with"),
        (("--task", "ppl", "--compare", "tiered4", "--kv-bits", "4"), "compare tiered4: the name says its bits"),
        (("--task", "retrieval", "--compare", "exact,minmax4", "--key-bits", "2"), "compare minmax4: the name says its bits"),
        (("--task", "drift", "--config", "minmax2", "--key-bits", "3"), "cache.key_bits 3: codec minmax stores 2, 4, 8"),
        (("--task", "ppl", "--plot", "/no/such/folder/p.png"), "/no/such/folder/p.png"),
        (("--task", "retrieval", "--depths", "1.5"), "depths 1.5: must be between 0"),
        (("--task", "retrieval", "--kinds", "poem"), "kinds poem"),
        (("--task", "retrieval", "--trials", "0"), "trials 0"),
        (("--task", "retrieval", "--context", "2048"), "context 2048"),
        (("--task", "retrieval", "--context", "50"), "context 50"),
        (("--task", "retrieval", "--context", "a"), "must be numbers"),
        (("--task", "drift", "--context", "5000"), "context 5000: must be one number up to 2048"),
        (("--task", "drift", "--context", "300,400"), "context 300,400"),
        (("--task", "drift", "--compare", "2bit"), "--compare: task drift does not read it"),
        (("--task", "sensitivity", "--by", "head"), "by head: must be layer or side"),
        (("--task", "sensitivity", "--budget-bits", "2"), "budget-bits and output"),
        (("--task", "sensitivity", "--budget-bits", "1", "--output", "x.yaml"), "budget-bits 1: the cache takes"),
        (("--task", "sensitivity", "--raise-bits", "5"), "raise-bits 5"),
        (("--task", "sensitivity", "--config", "exact"), "nothing to raise"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_refused_before_weights_load(capsys, folder, no_model, argv, part):
    argv = ("--model", folder, "--device", "cpu", "--text", HANDBOOK, *argv)
    assert part.replace("tiny model", folder) in refused(capsys, *argv)


def test_texts_are_refused_too(capsys, folder, no_model, tmp_path):
    argv = ("--model", folder, "--device", "cpu")
    for task in ("ppl", "retrieval", "drift", "sensitivity"):
        where = "--text '/no/such/file.txt': cannot be read"
        assert where in refused(capsys, *argv, "--task", task, "--text", "/no/such/file.txt")
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"ab\xff\x00")
    empty.touch()
    assert f"--text '{binary}': not UTF-8 (byte 2)" in refused(capsys, *argv, "--task", "ppl", "--text", str(binary))
    assert f"--text '{empty}': is empty; write text into it" in refused(capsys, *argv, "--task", "ppl", "--text", str(empty))
    assert "two files have the same name" in refused(capsys, *argv, "--task", "ppl", "--text", HANDBOOK, HANDBOOK)
    assert "takes one text" in refused(capsys, *argv, "--task", "drift", "--text", HANDBOOK, TALE)
    short = tmp_path / "short.txt"
    short.write_text("x" * 100)
    assert "the text has 100 tokens" in refused(capsys, *argv, "--task", "ppl", "--text", str(short), "--positions", "50:200")
    results = tmp_path / "results.json"
    results.write_text("{}")
    assert "not a file of results" in refused(capsys, *argv, "--task", "ppl", "--text", HANDBOOK, "--json", str(results))


def test_one_process_only():
    """Under a launcher with more ranks: one line, from rank 0, before anything is loaded."""
    launched = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    argv = [sys.executable, "-O", "-m", "bitkv_dist.launch.evaluate", "--task", "ppl", "--text", HANDBOOK]
    done = subprocess.run(argv, env=launched, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("bitkv evaluate: world size 2: evaluate runs in one process")


def test_a_schedule_for_a_deeper_model_is_refused(capsys, folder, no_model, tmp_path):
    schedule = tmp_path / "deep.yaml"
    schedule.write_text("cache: {key_bits: 2, value_bits: 2, layers: [{layers: 1-2, key_bits: 4}]}\n")
    argv = ("--model", folder, "--device", "cpu", "--text", HANDBOOK)
    message = "cache.layers 2: the model has layers 0 to 1"
    assert message in refused(capsys, *argv, "--task", "ppl", "--compare", f"2bit,{schedule}")
    assert message in refused(capsys, *argv, "--task", "drift", "--config", str(schedule))
