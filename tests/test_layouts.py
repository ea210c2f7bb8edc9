"""Dry runs of benchmarks/layouts.py and benchmarks/exchange_overlap.py with real ranks, and their refusal of other answers."""

from __future__ import annotations

import json
import runpy
import sys
from types import SimpleNamespace

import pytest
import tiny
from ranks import ROOT, run_command

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: SimpleNamespace(**runpy.run_path(str(BENCHMARKS / f"{name}.py")))


def last_line(name: str, flags: dict) -> dict:
    argv = [sys.executable, BENCHMARKS / f"{name}.py", *(f"--{flag}={value}" for flag, value in flags.items())]
    ended = run_command(argv, PYTHONPATH=str(BENCHMARKS))
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("grids", ["sp1,helix2", "sp1,sp2,sp2-gathered,tp2"])
def test_layouts_of_a_tiny_model(grids, tmp_path):
    folder = tiny.save_tokenizer(tiny.save(tmp_path / "model", vocab_size=257))
    (tmp_path / "text").write_text("Pages are sealed once they are old. " * 40)
    flags = {"grids": grids, "model": folder, "text": tmp_path / "text", "tokens": 1100, "steps": 2, "rounds": 1}
    found = last_line("layouts", flags)["grids"]
    assert list(found) == grids.split(",")
    for name, row in found.items():
        assert row["prefill_s"]["compute"] > 0 and row["speedup"] > 0 and min(row["peak_bytes"]) > 0
        for parts in (row["prefill_s"], row["decode_ms"]):
            assert (parts["exchange"] > 0) == (name != "sp1")
            assert abs(sum(parts.values()) - 2 * parts["total"]) < 1e-6 * parts["total"]


def test_grids_with_another_answer_show_no_time(script):
    check = script("layouts").require_one_answer
    rows = {name: [{"tp": 1, "layout": layout, "ids": [1, 2], "digest": "a"}]
            for name, layout in (("sp1", "replicated"), ("sp2", "replicated"), ("helix2", "helix"))}  # fmt: skip
    check(rows)
    rows["helix2"][0]["digest"] = "b"  # sums in another order may turn codes over
    check(rows)
    rows["sp2"][0]["digest"] = "b"
    with pytest.raises(SystemExit, match="sp2: other digest than sp1; no time is shown"):
        check(rows)
    rows["sp2"][0] |= {"digest": "a", "ids": [1, 3]}
    with pytest.raises(SystemExit, match="sp2: other ids than sp1"):
        check(rows)


def test_waiting_is_for_the_ranks_of_the_group_alone(script):
    """Rank 0 meets rank 1, which comes 2 s later; the third is in neither call, and rank 1 leaves the second at once."""
    split = script("scaling").split
    marks = [[(10.0, 13.0, [0, 1]), (14.0, 15.0, [0])], [(12.0, 13.0, [0, 1]), (16.0, 16.5, [0])], [(90.0, 91.0, [2])] * 2]
    everyone = [([10.0], [own]) for own in marks]
    assert split(everyone, 0) == {"total": 10e3, "compute": 6e3, "exchange": 2e3, "wait": 2e3}
    assert split(everyone, 1) == {"total": 10e3, "compute": 8.5e3, "exchange": 1.5e3, "wait": 0}


@pytest.mark.slow
def test_overlapped_exchanges_of_a_tiny_model():
    """Whether they pay is not asked; that logits keep their bits is, by the benchmark."""
    flags = {"layers": 2, "tokens": "1024,2048,600", "steps": 2, "at-once": "1,2", "config": "1bit"}
    found = last_line("exchange_overlap", flags)
    assert found["logits_equal"] and len(found["ways"]) == 3
    assert all(row["ms"] > 0 for row in found["ways"].values())
