"""benchmarks/gpu_check: every stage runs to its end without a GPU, and one that fails or hangs does not lose the rest."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FLASHINFER = '''
import torch

def single_decode_with_kv_cache(q, k, v, kv_layout, use_tensor_cores):
    assert kv_layout == "NHD" and use_tensor_cores and k.shape == v.shape
    k, v = (x.to(q.dtype).repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    return torch.softmax(torch.einsum("hd,thd->ht", q.float(), k.float()), -1).to(q.dtype) @ v.transpose(0, 1)[0]
'''


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", BENCHMARKS / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STAGES = ["correctness", "decode sdpa", "decode flashinfer", "encode"]
SLOW_STAGES = ["decode tiered4", "decode tailored", "step"]


@pytest.mark.parametrize("stage", [*STAGES, *(pytest.param(stage, marks=pytest.mark.slow) for stage in SLOW_STAGES)])
def test_dry_run_of_a_stage(stage, tmp_path):
    """The decode stage of another kind of cache, or the step of a larger model, is the same lines."""
    (tmp_path / "flashinfer.py").write_text(FLASHINFER)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(BENCHMARKS / "gpu_check.sh"), "--dry-run", "--only", stage, "--json", str(tmp_path / "lines")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()] == lines
    assert lines[0]["stage"] == "environment" and lines[0]["versions"]["torch"] and lines[0]["gpu"] is None
    assert lines[-1]["stage"] == "summary" and lines[-1]["dry_run"] and not lines[-1]["failed"]
    found = lines[1:-1]
    assert found and all("failed" not in line and "skipped" not in line for line in found)
    if stage == "correctness":
        assert {line["kernel"] for line in found} == {
            "encode", "attend", "words", "tree", "exact", "ends", "prompt"
        }  # fmt: skip
        assert all(line["ok"] for line in found)
    elif stage.startswith("decode"):
        assert all(line["ms"] > 0 and line["bytes"] > 0 and line["share"] > 0 for line in found)
    elif stage == "step":
        assert all(line["same_tokens"] and line["graph_ms"] > 0 for line in found)


def test_what_a_stage_printed_before_it_failed_is_kept(check, tmp_path, monkeypatch, capsys):
    """A stage that raises, one that hangs and one that is killed by a signal; the last still runs."""
    for name, last in (("raises", "raise ValueError('no such thing')"), ("hangs", "time.sleep(60)"),
                       ("dies", "os.kill(os.getpid(), 9)"), ("works", "pass")):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(f'import os, time\nprint(\'{{"stage": "{name}"}}\', flush=True)\n{last}\n')
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(check, "STAGES", [(name, f"{name}.py", (), 2) for name in ("raises", "hangs", "dies", "works")])
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    began = time.perf_counter()
    assert check.main() == 1
    assert time.perf_counter() - began < 30
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["stage"] for line in lines if set(line) == {"stage"}] == ["raises", "hangs", "dies", "works"]
    assert lines[-1]["failed"] == {
        "raises": "exit status 1: ValueError: no such thing",
        "hangs": "took more than 2 s",
        "dies": "exit status -9: no message",
    }


def test_the_limits_of_all_stages_stay_below_nine_minutes(check):
    """With some seconds for the versions of what is installed."""
    assert sum(limit for *_, limit in check.STAGES) <= 525


def test_targets_are_judged_at_their_context(check):
    def line(kind: str, ms: float, read: int, context: int = 131072) -> dict:
        return {"stage": "decode", "kind": kind, "context": context, "ms": ms, "bytes": read, "copy_gb_s": 1000.0}

    flash = line("sdpa bf16", 0.6, 512_000_000)  # the bytes of fp8 take 0.256 ms
    found = check.targets([flash, line("1", 0.1, 40_000_000), line("1", 9.0, 1, 4096)])
    assert [target["result"] for target in found.values()] == ["pass", "pass"]
    found = check.targets([flash, line("1", 0.11, 40_000_000)])
    assert [target["result"] for target in found.values()] == ["pass", "miss"]
    assert {target["result"] for target in check.targets([flash]).values()} == {"not measured"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_stage_starts_without_a_gpu_unless_asked(check):
    found, failure = check.run_stage("gpu_decode.py", ("--kind", "sdpa"), 60)
    assert not found and "there is no GPU; --dry-run" in failure
