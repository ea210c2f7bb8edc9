"""A dry run of benchmarks/scaling.py with two real ranks, and its refusal of token ids that differ."""

from __future__ import annotations

import json
import runpy
import sys
from types import SimpleNamespace

import pytest
from ranks import ROOT, run_command

SCRIPT = ROOT / "benchmarks" / "scaling.py"
SMALL = {"layers": 2, "hidden": 64, "intermediate": 64, "vocabulary": 256, "heads": 4, "kv-heads": 2, "head-dim": 32}
TOKENS = 4096


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("scaling")
    flags = [str(word) for name, value in SMALL.items() for word in (f"--{name}", value)]
    flags += ["--ranks", "1,2", "--tokens", str(TOKENS), "--steps", "3"]
    flags += ["--plot", str(place / "x.png"), "--json", str(place / "x.json")]
    ended = run_command([sys.executable, SCRIPT, *flags], PYTHONPATH=str(SCRIPT.parent))  # also under PYTHONSAFEPATH
    assert ended.status == 0, ended.err
    assert (place / "x.png").read_bytes()[:4] == b"\x89PNG" and (place / "x.json").read_text() in ended.out
    return json.loads(ended.out.splitlines()[-1]) | {"out": ended.out}


def test_measured_steps_are_taken_apart(found):
    rows = found["measured"]
    shown = {(kind, row["ranks"], row["tokens"], row["batch"]) for row in rows for kind in row["kinds"]}
    assert {("strong", 1, TOKENS, 1), ("strong", 2, TOKENS, 1)} < shown
    assert {("weak", 1, TOKENS // 4, 1), ("weak", 2, TOKENS // 2, 1)} < shown
    assert {("batch", ranks, TOKENS, batch) for ranks in (1, 2) for batch in (1, 2, 4)} < shown
    for row in rows:
        assert len(row["ids"]) == 5 and len(row["ids"][0]) == row["batch"]
        ms = row["ms"]
        assert min(ms.values()) >= 0 and ms["compute"] > 0
        assert (ms["exchange"] > 0) == (row["ranks"] > 1)
    assert len({token for row in rows for step in row["ids"] for token in step}) > 1


def test_the_simulation_is_the_planners_and_says_so(found):
    rows = found["simulated"]
    assert max(row["ranks"] for row in rows) == 64 and max(row["tokens"] for row in rows) == 10 << 20
    for row in rows:
        assert row["ms"]["wait"] is None and abs(row["ms"]["compute"] + row["ms"]["exchange"] - row["ms"]["total"]) < 1e-9
    strong = {row["ranks"]: row for row in rows if row["kinds"] == ["strong"] and row["layout"] == "sp"}
    assert strong[64]["ms"]["compute"] < strong[1]["ms"]["compute"] / 4
    assert not strong[1]["fits"] and strong[64]["fits"]
    assert "SIMULATED with the planner's model, not run" in found["out"] and "MEASURED here" in found["out"]


def test_other_token_ids_show_no_time(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    check = SimpleNamespace(**runpy.run_path(str(SCRIPT))).require_equal_ids
    rows = [{"ranks": ranks, "tokens": 4096, "batch": 1, "ids": [[1], [2]]} for ranks in (1, 2)]
    check(rows)
    rows[1]["ids"] = [[1], [3]]
    with pytest.raises(SystemExit, match="1 and 2 ranks give other token ids"):
        check(rows)
