"""`diagnose` on real ranks: agreement, an injected flip, sealed pages, bad flags."""

import json
import re
import sys

import pytest
import torch
from ranks import ROOT, free_port, launched, run_command
from transformers import LlamaConfig, LlamaForCausalLM

from bitkv_dist.launch.diagnose import main
from bitkv_dist.parallel import mesh

DIAGNOSE = ROOT / "launch" / "diagnose.py"
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama: 3 layers, 4 query and 2 KV heads of 16."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def diagnose(launcher, size, model, tmp_path, *args):
    """(how it ended, the JSON report)."""
    report = tmp_path / "report.json"
    ended = run_command(launched(launcher, size, DIAGNOSE, "--model", str(model), "--json", str(report), *args), timeout_s=180)
    return ended, json.loads(report.read_text()) if report.exists() else None


def test_two_ranks_agree_on_seeds_and_sealed_bytes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "_current", None)
    alone = tmp_path / "alone.json"
    assert main(["--model", str(model), "--device", "cpu", "--cache", "--json", str(alone)]) == 0
    expected = json.loads(alone.read_text())
    ended, report = diagnose("mpirun", 2, model, tmp_path, "--cache")
    assert (ended.status, ended.messages()) == (0, []), ended.err
    assert report["ok"] and report["world"]["sp"] == 2
    assert [row["rank"] for row in report["world"]["ranks"]] == [0, 1]
    for part in ("rotation", "cache"):  # one answer, whatever the world size
        assert report[part] == expected[part] and report[part]["mismatches"] == []
    assert report["cache"]["pages"] == LAYERS * 2 * 4
    assert ended.out.count("all ranks agree") == 2
    check_hosts_links_and_first_step(report, ended.out)
    assert expected["network"]["pairs"] == [] and expected["dry_run"]["token_ids"] == report["dry_run"]["token_ids"]


def check_hosts_links_and_first_step(report, shown):
    ranks = report["world"]["size"]
    for row in report["world"]["ranks"]:
        assert row["available_bytes"] > 0 and abs(row["clock_skew_ms"]) < 1000 and len(row["config"]) == 16
        assert {"torch", "transformers", "bitkv_dist"} <= row["versions"].keys()
    assert report["versions"]["mismatches"] == [] == report["warnings"]
    network = report["network"]
    assert len(network["pairs"]) == ranks * (ranks - 1) // 2
    assert network["exchange_bytes"] == 4 * (2 + 16) * 4  # heads of m, l and o[D], one slot of fp32
    assert network["step_ms"] > 0 and network["exchange_us"] > 0 and network["broadcast_us"] > 0
    assert len(report["dry_run"]["token_ids"]) == 3 and report["dry_run"]["mismatches"] == []
    assert "network: exchange of a layer (allgather)" in shown and "dry run: 3 tokens, the same everywhere" in shown


@pytest.mark.slow
def test_eight_ranks_in_a_minute(model, tmp_path):
    ended, report = diagnose("torchrun", 8, model, tmp_path, "--cache")
    assert ended.status == 0, ended.err
    check_hosts_links_and_first_step(report, ended.out)
    assert ended.seconds < 60


def test_an_injected_flip_is_found_and_named(model, tmp_path):
    ended, report = diagnose("mpirun", 2, model, tmp_path, "--inject", "1:2")
    assert ended.status == 1, ended.err
    assert not report["ok"]
    (found,) = report["rotation"]["mismatches"]
    assert (found["rank"], found["layer"], found["cause"]) == (1, 2, "rotation words")
    assert found["digest"] in ended.out and "rotation words" in ended.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--inject", "1:0"], "--inject 1:0: must name one of 1 ranks"),
        (["--inject", f"0:{LAYERS}"], f"--inject 0:{LAYERS}: must name one of 1 ranks and one of {LAYERS} layers"),
        (["--tp", "2"], "tp 2 x sp world/tp: the product must be the number of ranks, 1"),
        (["--cache", "--recent-tokens", "2048"], "--cache: needs 2692 positions to seal 4 pages, the model has 2048"),
    ],
)
def test_what_the_run_cannot_do_is_refused(model, monkeypatch, args, said):
    monkeypatch.setattr(mesh, "_current", None)  # put back to this afterwards
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        main(["--model", str(model), "--device", "cpu", *args])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--inject", "1"], "argument --inject: '1': must be RANK:LAYER, for example 1:7; see --help"),
        (
            ["--json", "/nowhere/report.json"],
            "argument --json: '/nowhere/report.json': must be a file in an existing folder; see --help",
        ),
        (["--kv-bits", "3.5"], "argument --kv-bits: invalid int value: '3.5'; see --help"),
    ],
)
def test_bad_flags_are_refused_in_one_line(args, said):
    ended = run_command([sys.executable, "-O", DIAGNOSE, *args])
    assert (ended.status, ended.out, ended.err) == (2, "", f"bitkv diagnose: {said}\n")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_what_bitkv_launch_starts(launcher, model, tmp_path):
    report = tmp_path / "report.json"
    where = ["--ranks", "2", "--launcher", launcher]
    if launcher != "mpirun":
        where += ["--master-port", str(free_port())]
    command = ["diagnose", "--model", str(model), "--device", "cpu", "--json", str(report)]
    ended = run_command([sys.executable, ROOT / "launch" / "launch.py", *where, *command])
    assert ended.status == 0 and f"2 ranks on 1 hosts (localhost: 2), tp 1 x sp 2, by {launcher}" in ended.err, ended.err
    assert json.loads(report.read_text())["world"]["launcher"] == launcher


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_under_other_launchers(launcher, model, tmp_path):
    ended, report = diagnose(launcher, 2, model, tmp_path, "--cache", "--tp", "2")
    assert ended.status == 0 and report["ok"] and report["world"]["tp"] == 2, ended.err
    ended, report = diagnose(launcher, 2, model, tmp_path, "--inject", "0:1")
    assert ended.status != 0 and [m["layer"] for m in report["rotation"]["mismatches"]] == [1]
