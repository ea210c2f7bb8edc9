"""--save-cache and --load-cache of `generate`: repeat, go on, longer prompts, conversations; what is refused, in one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import commands
import pytest
import tiny
from ranks import ROOT, launched, run_command

from bitkv_dist.launch import generate

TEXT = "It was the best of times, it was the worst of times. " * 5  # 265 tokens, a byte each: a page is sealed
ARGS = ("--max-new-tokens", "8", "--sink-tokens", "0", "--recent-tokens", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tiny.save(tmp_path_factory.mktemp("model"), vocab_size=257)
    return str(tiny.save_tokenizer(place))


def run_of(folder: str, report: Path, *argv: str | Path) -> dict:
    """Calls main in this process, as a world of one; returns the report."""
    commands.call(generate, "--model", folder, "--device", "cpu", "--json", report, *ARGS, *argv)
    return json.loads(report.read_text())


@pytest.fixture
def run(folder, tmp_path, capsys):
    """`run_of` this folder, with what was said on stderr as `said`."""
    return lambda *argv: run_of(folder, tmp_path / "report.json", *argv) | {"said": capsys.readouterr().err}


def test_saved_and_repeated(run, tmp_path):
    place = tmp_path / "s"
    first = run("--prompt", TEXT, "--save-cache", place, "--digest")
    assert first["snapshot"]["saved"] == str(place) and first["snapshot"]["loaded"] is None
    assert first["snapshot"]["saved_bytes"] == sum(path.stat().st_size for path in place.glob("*.safetensors"))
    for prompt in (("--prompt", TEXT), ()):
        again = run("--load-cache", place, "--digest", *prompt)
        for name in ("text", "token_ids", "prompt_tokens", "digest"):
            assert again[name] == first[name]
        found = again["snapshot"]
        assert (found["loaded"], found["saved"], found["promise"]) == (str(place), None, "bit-identical")
        assert (found["prefix_tokens"], found["prefilled_tokens"], found["prefill"]) == (265, 0, None)
        assert again["timing"]["prefill_tokens_per_s"] is None
        assert f"265 tokens loaded from {place}, no prefill is left; tokens: bit-identical" in again["said"]
    assert "snapshot" not in run("--prompt", "x")


def test_saved_at_the_end_and_gone_on(run, tmp_path):
    save = ("--ignore-eos", "--save-cache", tmp_path / "s", "--save-cache-at", "end")
    whole = run("--prompt", TEXT, "--prompt", "short", "--max-new-tokens", "20", "--ignore-eos")["token_ids"]
    first = run("--prompt", TEXT, "--prompt", "short", *save)
    more = ("--max-new-tokens", "6", "--load-cache", tmp_path / "s", *save)
    parts = [first, run(*more), run(*more)]  # each replaces the snapshot that it has loaded
    assert [[token for part in parts for token in part["token_ids"][i]] for i in range(2)] == whole
    assert parts[2]["prompt_tokens"] == [265 + 14, 5 + 14] and parts[2]["snapshot"]["prefilled_tokens"] == 0


def test_only_the_rest_of_a_longer_prompt_is_read(run, tmp_path):
    run("--prompt", TEXT, "--save-cache", tmp_path / "s", "--max-new-tokens", "0")
    found = run("--load-cache", tmp_path / "s", "--prompt", TEXT + "And then?", "--prompt", TEXT + "Why?")
    assert found["prompt_tokens"] == [274, 269]
    snapshot = found["snapshot"]
    assert (snapshot["prefix_tokens"], snapshot["prefilled_tokens"], snapshot["prefill"]) == (530, 13, "packed")
    assert "530 tokens loaded" in found["said"] and "13 more are read packed" in found["said"]
    assert found["timing"]["prefill_tokens_per_s"] == pytest.approx(13 / found["timing"]["prefill_s"])


def test_a_conversation_goes_on(run, tmp_path, monkeypatch):
    def talk(turns: str, *argv):
        monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
        return run("--interactive", "--no-chat", *argv)

    end = ("--save-cache", tmp_path / "s", "--save-cache-at", "end")
    whole = talk(" and then\n the end\n", "--prompt", TEXT)
    first = talk(" and then\n", "--prompt", TEXT, *end)
    rest = talk(" the end\n", "--load-cache", tmp_path / "s")
    assert first["token_ids"] + rest["token_ids"] == whole["token_ids"] and len(whole["token_ids"]) == 3
    assert rest["snapshot"]["prefix_tokens"] == 265 + 8 + 9 + 7


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--prompt", "x", "--save-cache-at", "end"], "generate.save_cache_at 'end': nothing is saved without save_cache"),
        (["--prompt", "x", "--save-cache", "D/s", "--save-cache-at", "middle"], "generate.save_cache_at 'middle'"),
        (["--prompt", "x", "--save-cache", ""], "generate.save_cache ''"),
        (["--prompt", "x", "--save-cache", "D/no/s"], "save-cache D/no/s: its folder"),
        (["--prompt", "x", "--save-cache", "D/mine"], "is not empty and holds no snapshot"),
        (["--prompt", "x", "--load-cache", "D/no"], "load-cache D/no: no such snapshot"),
        (["--prompt", "x", "--load-cache", "D/mine"], "has no manifest.json"),
        (["--prompt", "x", "--load-cache", "D/s"], "prompt 0 differs at token 0 (40 there, 87 here)"),
        (["--prompt", TEXT[:99], "--load-cache", "D/s"], "prompt 0 ends at token 99, where the snapshot goes on to 265"),
        (["--prompt", TEXT, "--load-cache", "D/s", "--kv-bits", "2"], "cache.key_bits is 4 there and 2 in this run"),
        (["--load-cache", "D/s", "--config", "tiered4"], "cache.scan_bits is None there and 1 in this run"),
        (["--load-cache", "D/end", "--save-cache", "D/t"], "without prompts there is no prefill; use --save-cache-at end"),
        (["--load-cache", "D/two", "--interactive"], "holds 2 sequences, a conversation has one"),
        (["--load-cache", "D/two", "--prompt", "x"], "holds 2 sequences, for 2 prompts in the same order, not 1"),
        (["--load-cache", "D/cut"], "logits.safetensors is truncated or another file"),
        (["--load-cache", "D/stopped"], "all its sequences have ended"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_refused_before_weights_load(folder, snapshots, monkeypatch, capsys, argv, part):
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    words = [word.replace("D/", f"{snapshots}/") for word in argv]
    message = commands.refused(generate, capsys, "--model", folder, "--device", "cpu", *ARGS, *words)
    assert part.replace("D/", f"{snapshots}/") in message


@pytest.fixture(scope="module")
def snapshots(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("snapshots")

    def save(name: str, *argv: str) -> dict:
        return run_of(folder, place / "report.json", "--save-cache", place / name, *argv)

    answer = save("s", "--prompt", TEXT)["text"][0]
    save("end", "--prompt", TEXT, "--save-cache-at", "end")
    save("two", "--prompt", TEXT, "--prompt", "x")
    save("cut", "--prompt", "y")
    save("stopped", "--prompt", TEXT, "--save-cache-at", "end", "--stop", answer[0])
    content = (place / "cut" / "logits.safetensors").read_bytes()
    (place / "cut" / "logits.safetensors").write_bytes(content[:-1])
    (place / "mine").mkdir()
    (place / "mine" / "x").write_text("x")
    return place


@pytest.mark.slow
def test_two_real_ranks_save_and_one_repeats(folder, run, tmp_path):
    """Through the launcher: two ranks write, the report of rank 0 tells, and this process repeats the run."""
    path, place = tmp_path / "two.json", tmp_path / "s"
    words = ["--model", folder, "--device", "cpu", "--json", path, *ARGS, "--prompt", TEXT * 3, "--save-cache", place]
    ended = run_command(launched("torchrun", 2, ROOT / "launch" / "generate.py", *map(str, words)))
    assert ended.status == 0, ended.err
    first = json.loads(path.read_text())
    assert len(list(place.glob("rank*"))) == 2 and first["snapshot"]["saved"] == str(place)
    again = run("--load-cache", place)
    assert again["token_ids"] == first["token_ids"] and again["snapshot"]["promise"] == "bit-identical"
    (place / "rank0001-layers0000-0001.safetensors").write_bytes(b"x")
    ended = run_command(launched("torchrun", 2, ROOT / "launch" / "generate.py", *map(str, words[:-2]), "--load-cache", place))
    assert ended.status != 0 and len(ended.messages()) == 1
    assert "rank0001-layers0000-0001.safetensors is truncated or another file" in ended.messages()[0]
