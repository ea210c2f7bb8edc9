"""The kernels compile ahead of time, without a GPU, and keep the rules of the report."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPORT = Path(__file__).parents[1] / "benchmarks" / "aot_report.py"


def report(tmp_path: Path, *flags: str) -> list[dict]:
    """Its rows; a process of its own, because this one's kernels are the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, REPORT, "--json", file, *flags], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["rows"]


def test_decode_at_sm_90(tmp_path):
    """One bit at D = 128, G = 4 is predicted memory-bound on an H100: at most 1.15 instructions per stored element."""
    rows = report(tmp_path, "--arch", "sm_90", "--dim", "128", "--kernel", "decode")
    assert {(row["bits"], row["G"]) for row in rows} == {(1, 4), (2, 4), (3, 4), (4, 4), (1, 1), (1, 2), (1, 8), (1, 16)}
    assert all(row["spills"] == 0 and row["load_bits"] == 128 and row["mma"] >= 64 for row in rows)
    main = next(row for row in rows if row["bits"] == 1 and row["G"] == 4)
    assert main["instr_per_element"] <= 1.15 and main["limit"] == "memory"


def test_rows_go_by_the_names_of_the_steps(tmp_path):
    """Parts of one step share its name; AMD's rows have the same keys."""
    rows = report(tmp_path, "--arch", "gfx942", "--dim", "64", "--kernel", "merge", "--kernel", "query", "--kernel", "conclude")
    parts = {(row["kernel"], row["function"], row["variant"]) for row in rows}
    assert {("merge", "fill_lanes", "lanes"), ("merge", "halve_lanes", "256 leaves")} <= parts
    assert {("query", "quantize_rows", ""), ("conclude", "conclude_rows", "")} <= parts
    promised = {"kernel", "bits", "D", "arch", "regs", "spills", "shared", "load_bits", "mma", "instr_per_element", "limit"}
    assert all(promised <= set(row) for row in rows)


def test_what_is_a_fault():
    judge = (
        "from aot_report import faults; good = dict(kernel='scan', spills=0, load_bits=64, mma=8); "
        "print([len(faults(good | bad)) for bad in ({}, {'spills': 1}, {'load_bits': 32}, {'mma': 0}, "
        "{'mma': 0, 'load_bits': 8, 'kernel': 'refine'}, {'mma': 0, 'kernel': 'decode'})])"
    )
    environment = os.environ | {"PYTHONPATH": str(REPORT.parent)}
    done = subprocess.run([sys.executable, "-c", judge], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0, 1, 1, 1, 0, 1]", done.stderr


@pytest.mark.slow
def test_every_kernel_on_every_target(tmp_path):
    rows = report(tmp_path)
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    kernels = {"decode", "scan", "select", "tail", "refine", "words", "encode", "exact", "merge", "query", "conclude"}
    assert {row["kernel"] for row in rows} == kernels


def test_code_cached_by_another_checkout_is_read_by_its_own(tmp_path):
    """Triton's cache goes by the text of a kernel, and the checkout that filled it may be gone."""
    spec = importlib.util.spec_from_file_location("aot_machine", REPORT.with_name("aot_machine.py"))
    machine = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(machine)
    lines = (machine.KERNELS / "decode.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.startswith("def decode("))
    assert machine.function_at(str(tmp_path / "gone" / "kernels" / "triton" / "decode.py"), line + 3) == "decode"
    assert machine.function_at(str(tmp_path / "kernel.c"), 3) == ""
