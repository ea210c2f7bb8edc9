"""`bitkv plan`: its JSON, its sentences, and one line for what it cannot plan."""

from __future__ import annotations

import json

import pytest
import tiny
from transformers import AutoConfig

from bitkv_dist import model
from bitkv_dist.launch import plan as command
from bitkv_dist.plan.models import from_config


def plan(tmp_path, flags: str) -> dict:
    """The JSON of `bitkv plan` with these flags."""
    assert command.main([*flags.split(), "--json", str(tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text())


def printed(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_json_of_the_command_in_the_issue(tmp_path, capsys):
    found = plan(tmp_path, "--model llama-3.1-8b --context 1M --gpus 8 --gpu h200 --config 1bit")
    parts = found["bytes_per_rank"]
    assert parts["total"] == parts["weights"] + parts["cache"] + parts["exact"] + parts["prefill_peak"]
    assert 0 < parts["slack"] < parts["cache"]
    times = found["ms_per_token"]
    assert times["total"] == times["weights"] + times["cache"] + times["collectives"] + times["fixed"]
    assert found["fits"] is True and found["max_context"] > found["context"] == 1 << 20
    assert found["grid"] == found["best_grid"] == {"tp": 8, "sp": 1}
    assert found["sharding_pays_above_tokens"] > 1 << 20
    assert found["warnings"] == ["context 1,048,576: llama-3.1-8b has 131,072 positions; generate refuses more"]
    assert found["other_caches"]["bf16"]["bytes_per_rank"]["cache"] == pytest.approx(parts["cache"] * 12.8, rel=1e-3)
    said = printed(capsys)
    assert "in the whole range up to 1,048,576 more ranks help only capacity" in said and "Times are estimates" in said


def test_a_given_grid_has_the_figures_on_top(tmp_path):
    best = plan(tmp_path, "--model llama-3.1-8b --context 128K --gpus 8 --gpu h200")
    given = plan(tmp_path, "--model llama-3.1-8b --context 128K --gpus 8 --gpu h200 --sp 4")
    assert given["grid"] == {"tp": 2, "sp": 4} and given["best_grid"] == best["best_grid"] == best["grid"]
    (row,) = [row for row in best["grids"] if (row["tp"], row["sp"]) == (2, 4)]
    for name in ("fits", "max_context", "bytes_per_rank", "ms_per_token", "sharding_pays_above_tokens"):
        assert given[name] == row[name]
    alone = plan(tmp_path, "--model smollm2-135m --gpu a100")
    assert alone["grid"] == {"tp": 1, "sp": 1} and alone["context"] == 8192


def test_written_whether_it_fits_or_not(tmp_path, capsys):
    asked = "--model llama-3.1-70b --gpus 4 --memory 80 --bandwidth 3350 --config exact --context"
    found = plan(tmp_path, f"{asked} 4M")
    assert found["fits"] is False and found["headroom_bytes"] < 0 and 0 < found["max_context"] < 1 << 22
    assert "does not fit" in printed(capsys)
    assert plan(tmp_path, f"{asked} {found['max_context']}")["fits"]


def test_packed_prefill_is_offered(tmp_path, capsys):
    found = plan(tmp_path, "--model qwen3-8b --context 8M --gpu h200 --config 1bit")
    assert not found["fits"]
    assert "It fits with --prefill packed." in printed(capsys)


def test_the_example_of_two_nodes(tmp_path):
    found = plan(tmp_path, "--config 1m_2x8 --context 1M --gpu h200")
    assert found["grid"] == {"tp": 8, "sp": 2} and found["gpus"] == 16
    assert found["fits"] and not found["warnings"]


def test_a_model_directory(tmp_path):
    folder = tiny.save(tmp_path / "model", "llama")
    found = plan(tmp_path, f"--model {folder} --memory 1 --bandwidth 20 --dtype float32 --context 2K")
    config = AutoConfig.from_pretrained(folder)
    shape = from_config("tiny", config, model.head_dim_of(config), 4096)
    assert found["bytes_per_rank"]["weights"] == shape.elements() * 4
    assert found["model"] == str(folder) and found["context"] == 2048


def test_plot(tmp_path):
    plan(tmp_path, f"--model llama-3.1-70b --gpus 4 --gpu h100 --context 128K --plot {tmp_path}/plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


UNITS = {"131072": 131072, "128K": 131072, "128k": 131072, "1M": 1048576, "1.5M": 1572864}


@pytest.mark.parametrize(("text", "tokens"), UNITS.items())
def test_units_of_a_context(text, tokens):
    assert command._tokens(text) == tokens


H200 = "--model llama-3.1-8b --gpu h200"
REFUSED = {
    "--model llama-3.1-8c --gpu h200": "model 'llama-3.1-8c': neither a directory nor in the table; did you mean llama-3.1-8b?",
    "--model llama-3.1-8b": "gpu: none given",
    "--model llama-3.1-8b --memory 80": "gpu: none given",
    "--model llama-3.1-8b --gpu h201": "gpu h201: not in the table",
    f"{H200} --memory 0": "memory 0: must be above 0",
    f"{H200} --gpus 6 --tp 3": "tp 3: must divide the 8 KV heads of llama-3.1-8b, or be a multiple of them",
    f"{H200} --gpus 8 --tp 2 --sp 3": "tp 2 x sp 3: the product must be the number of GPUs, 8",
    f"{H200} --gpus 8 --tp 8 --node-size 4": "tp 8: must fit into a node of 4 GPUs",
    f"{H200} --gpus 4096": "gpus 4096: llama-3.1-8b can use at most 2048",
    f"{H200} --link nvlnk": "link 'nvlnk': must be GB/s[:us]",
    f"{H200} --link 0:3": "link '0:3': rate must be above 0",
    f"{H200} --bits 5": "cache.kv_bits 5",
    f"{H200} --prefill exact --prefill-memory 0.001": "generate.prefill_memory_gb 0.001: keys and values of one layer take",
    f"{H200} --config tiered9": "config 'tiered9': no such preset or file",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_are_one_line(line):
    with pytest.raises(ValueError) as caught:
        command.main(line.split())
    message = str(caught.value)
    assert message.startswith(REFUSED[line]) and "\n" not in message and len(message) < 200


@pytest.mark.parametrize("flag", ["--context=12Q", "--context=0", "--context=1.5", "--context=K", "--gpus=0", "--batch=two"])
def test_flags_that_are_no_numbers(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["--model", "llama-3.1-8b", "--gpu", "h200", flag])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and flag.partition("=")[0] in error
