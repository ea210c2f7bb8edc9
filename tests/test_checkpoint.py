"""--checkpoint: the same command, started again after whatever ended it, gives the answer that it would have given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import tiny
from ranks import environment, free_port, launched

from bitkv_dist.launch import generate
from bitkv_dist.launch.checkpoints import Checkpoints
from bitkv_dist.snapshot import pieces
from bitkv_dist.snapshot.folder import MANIFEST

FAULTY = Path(__file__).with_name("faulty.py")
PROMPTS = ["a tale of two ranks " * 20, "and another"]
NEW = 12


class Died(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoint")
    tiny.save_tokenizer(tiny.save(place / "model", vocab_size=257))
    (place / "run.yaml").write_text(
        "cache: {codec: planes, key_bits: 2, value_bits: 2, page_tokens: 64, sink_tokens: 64, recent_tokens: 32}\n"
        "parallel: {device: cpu, start_timeout_s: 100, step_timeout_s: 15}\n"
    )
    return place


def flags(folder: Path, *argv: object, prompts: list[str] = PROMPTS) -> list[str]:
    named = ["--model", folder / "model", "--config", folder / "run.yaml", "--max-new-tokens", NEW, *argv]
    return [*map(str, named), *(word for prompt in prompts for word in ("--prompt", prompt))]


@pytest.fixture
def run(folder, tmp_path):
    """The report of a run in this process."""

    def call(*argv: object, prompts: list[str] = PROMPTS) -> dict:
        report = tmp_path / "report.json"
        commands.call(generate, *flags(folder, "--json", report, *argv, prompts=prompts))
        return json.loads(report.read_text())

    return call


@pytest.fixture
def cut(run, monkeypatch):
    """A run that dies after so many tokens of its answer."""

    def call(tokens: int, *argv: object, prompts: list[str] = PROMPTS) -> None:
        kept = Checkpoints.step

        def step(self, engine, done):
            if done > tokens:
                raise Died
            kept(self, engine, done)

        with monkeypatch.context() as patch, pytest.raises(Died):
            patch.setattr(Checkpoints, "step", step)
            run(*argv, prompts=prompts)

    return call


@pytest.mark.parametrize("chosen", [["--ignore-eos"], ["--ignore-eos", "--temperature", "1", "--sampling-seed", "7"]])
@pytest.mark.parametrize(("cut_after", "resumed"), [(0, 0), (7, 6), (9, 9)])
def test_the_same_command_goes_on(run, cut, tmp_path, chosen, cut_after, resumed):
    whole = run(*chosen)
    assert "checkpoint" not in whole
    chosen = [*chosen, "--checkpoint", tmp_path / "kept", "--checkpoint-every", 3]
    cut(cut_after, *chosen)
    cut(cut_after, *chosen)  # what dies a second time leaves the checkpoint as it was
    again = run(*chosen)
    assert (again["token_ids"], again["text"]) == (whole["token_ids"], whole["text"])
    assert again["finish_reason"] == whole["finish_reason"] and again["prompt_tokens"] == whole["prompt_tokens"]
    assert again["checkpoint"]["resumed_tokens"] == resumed
    assert again["checkpoint"]["saved"] == (NEW - 1) // 3 - resumed // 3
    assert list(tmp_path.glob("kept*")) == []  # the answer is complete


def test_what_has_not_changed_is_not_written_again(run, cut, tmp_path, monkeypatch):
    """Neither by the run that saved it, nor by the one that goes on from it."""
    monkeypatch.setattr(pieces, "FILE_GRANULES", 1)
    prompts, place = [PROMPTS[0] * 5], tmp_path / "kept"
    kept = ["--ignore-eos", "--checkpoint", place, "--checkpoint-every", 4]
    cut(5, *kept, prompts=prompts)
    pages = [path.stat().st_size for path in place.glob("*granules*")]
    (rest,) = (path.stat().st_size for path in place.glob("*.safetensors") if "granules" not in path.name)
    again = run(*kept, prompts=prompts)["checkpoint"]
    assert len(pages) == 3 and (again["resumed_tokens"], again["saved"]) == (4, 1)
    assert 0.9 * rest < again["new_bytes"] < 1.1 * rest
    whole = run(*kept, prompts=prompts)["checkpoint"]
    assert whole["saved"] == 3 and sum(pages) + 2.7 * rest < whole["new_bytes"] < sum(pages) + 3.3 * rest


def test_a_seed_that_was_drawn_is_kept(run, cut, tmp_path):
    chosen = ["--temperature", 1, "--ignore-eos"]
    kept = [*chosen, "--checkpoint", tmp_path / "kept", "--checkpoint-every", 4]
    cut(5, *kept)
    seed = json.loads((tmp_path / "kept" / MANIFEST).read_text())["sampling_seed"]
    assert run(*kept)["token_ids"] == run(*chosen, "--sampling-seed", seed)["token_ids"]


def test_a_text_that_has_ended_stays_ended(run, cut, tmp_path):
    first = run("--ignore-eos")["text"][0]
    chosen = ["--ignore-eos", "--stop", first[2:4]]
    whole = run(*chosen)
    assert whole["finish_reason"] == ["stop", "length"]
    kept = [*chosen, "--checkpoint", tmp_path / "kept", "--checkpoint-every", 4]
    cut(8, *kept)
    again = run(*kept)
    assert (again["text"], again["finish_reason"]) == (whole["text"], whole["finish_reason"])
    assert again["checkpoint"]["resumed_tokens"] == 8


def test_what_is_no_checkpoint_of_this_run_is_refused(run, cut, tmp_path, monkeypatch):
    place = tmp_path / "kept"
    kept = ["--ignore-eos", "--checkpoint", place, "--checkpoint-every", 4]
    cut(5, *kept)
    monkeypatch.setattr("bitkv_dist.model.load", None)  # refused before weights load
    for argv, prompts, message in [
        (["--temperature", 1], PROMPTS, "a run with temperature 0.0, here it is 1.0; start that run again as it was"),
        ([], PROMPTS[:1], "a run with 2 prompts, here are 1"),
        ([], [PROMPTS[0], "and a third"], "a run with another prompt 1"),
        (["--recent-tokens", 64], PROMPTS, "cache.recent_tokens is 32 there and 64"),
        (["--interactive"], PROMPTS[:1], "use --save-cache DIR --save-cache-at end"),
        (["--load-cache", place], [], "belongs to prompts"),
    ]:
        with pytest.raises(ValueError, match=f"^checkpoint {place}: .*{message}"):
            run(*kept, *argv, prompts=prompts)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no snapshot"):
        run("--checkpoint", foreign)
    with pytest.raises(ValueError, match=r"generate\.checkpoint_every 0"):
        run(*kept, "--checkpoint-every", 0)
    with pytest.raises(ValueError, match=r"generate\.checkpoint_every 8: nothing is kept without checkpoint"):
        run("--checkpoint-every", 8)


def test_a_snapshot_is_not_overwritten(run, tmp_path):
    run("--save-cache", tmp_path / "mine")
    with pytest.raises(ValueError, match="holds a snapshot that --save-cache has made"):
        run("--checkpoint", tmp_path / "mine")


def test_a_snapshot_beside_it_is_that_of_the_prefill(run, cut, tmp_path):
    """A run that goes on neither replaces it by a later state, nor removes it with the checkpoint."""
    whole = run("--ignore-eos")
    kept = ["--ignore-eos", "--checkpoint", tmp_path / "kept", "--checkpoint-every", 3, "--save-cache", tmp_path / "snap"]
    cut(7, *kept)
    assert run(*kept)["token_ids"] == whole["token_ids"]
    assert run("--ignore-eos", "--load-cache", tmp_path / "snap")["token_ids"] == whole["token_ids"]
    with pytest.raises(ValueError, match="--save-cache names it too; give another folder"):
        run("--checkpoint", tmp_path / "snap", "--save-cache", tmp_path / "snap")


def test_a_checkpoint_that_cannot_be_written_is_no_reason_to_stop(run, monkeypatch, tmp_path, capsys):
    from bitkv_dist.snapshot import save as saving

    whole, write = run("--ignore-eos"), saving.write_tensors
    calls = []

    def full(*args):
        calls.append(args)
        if len(calls) > 2:  # the first checkpoint: pages and logits
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(saving, "write_tensors", full)
    found = run("--ignore-eos", "--checkpoint", tmp_path / "kept", "--checkpoint-every", 4)
    assert found["token_ids"] == whole["token_ids"] and found["checkpoint"]["saved"] == 1
    assert "what was there is unchanged: rank 0 failed (No space left on device); the run goes on" in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_goes_on_for_two_of_which_one_was_killed(run, folder, tmp_path):
    whole = run("--ignore-eos")
    kept = ["--ignore-eos", "--checkpoint", tmp_path / "kept", "--checkpoint-every", 2]
    argv = [sys.executable, str(FAULTY), "kill-decode", "1", *flags(folder, *kept)]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(argv, env=environment() | place | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.DEVNULL)
        for rank in "01"
    ]
    try:
        assert all(rank.wait(timeout=60) != 0 for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    again = run(*kept)
    assert again["token_ids"] == whole["token_ids"]
    assert again["checkpoint"]["resumed_tokens"] == 2


@pytest.mark.slow
def test_torchrun_starts_it_again_by_itself(run, folder, tmp_path):
    whole = run("--ignore-eos")
    report = tmp_path / "again.json"
    kept = ["--ignore-eos", "--checkpoint", tmp_path / "kept", "--checkpoint-every", 2, "--json", report]
    argv = launched("torchrun", 2, FAULTY, "kill-decode-once", "1", *flags(folder, *kept))
    argv.insert(argv.index(str(FAULTY)), "--max-restarts=1")
    ended = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    again = json.loads(report.read_text())
    assert again["token_ids"] == whole["token_ids"]
    assert again["checkpoint"]["resumed_tokens"] == 2
