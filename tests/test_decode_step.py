"""benchmarks/decode_step.py runs to its end on a tiny model, whatever has changed in the engine that it takes apart."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tiny
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decode_step.py"


@pytest.mark.parametrize("config", ["4bit", "tiered4"])
def test_a_short_run(config, tmp_path, monkeypatch, capsys):
    folder = tiny.save_tokenizer(tiny.save(tmp_path / "model"))
    (tmp_path / "text").write_text("Pages are sealed once they are old. " * 20)
    flags = {"model": folder, "config": config, "text": tmp_path / "text", "tokens": 400}
    flags |= {"new-tokens": 2, "turn": 1, "prefills": 1}
    monkeypatch.setattr(sys, "argv", ["decode_step", *(f"--{name}={value}" for name, value in flags.items())])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["prompt_tokens"] == 400 and line["decoded_tokens"] == 2 and line["exact_ids_equal"]
    assert line["ours_ms"] > 0 and line["kv_ratio"] > 1 and set(line["peers_ms"]) == {"hf-fp32", "hf-bf16"}
    assert line["dtype"] == "float32" and line["other_prefill_ratio"]["ours-bf16"] > 0 and line["other_ms"]["ours-bf16"] > 0
    for parts in (line["prompt_parts_s"][name] for name in ("ours", "ours-bf16")):
        assert all(parts[part] > 0 for part in ("linear", "attention", "between", "sealing"))
    parts = line["breakdown_ms"]
    assert set(parts) == {"linear", "lm_head", "attention", "sealing", "torch", "exchange", "python"}
    assert all(parts[part] > 0 for part in ("linear", "lm_head", "attention", "torch", "python"))
    assert parts["exchange"] == 0  # a world of one sends nothing
