"""Ctrl-C during a long prefill: over within seconds, with one line, whatever the ranks are doing."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest
import tiny
from ranks import free_port
from test_faults import FAULTY, INTERRUPT_ENDS_WITHIN_S, job

LONG = 300_000  # tokens: minutes of attention


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("interrupted")
    tiny.save_tokenizer(tiny.save(place / "model", vocab_size=257, max_position_embeddings=1 << 20))
    (place / "long.txt").write_text("a tale of " * (LONG // 10))
    return place


def reading(size: int, prefill: str, folder, logs):
    """Ranks that read a prompt which takes them minutes, as a launcher would start them."""
    flags = ["--model", folder / "model", "--prompt-file", folder / "long.txt", "--prefill", prefill, "--max-new-tokens", "1"]
    argv = [str(word) for word in (sys.executable, FAULTY, "none", "0", *flags)]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [place | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return job([(argv, {name: str(value) for name, value in place.items()} if size > 1 else {}) for place in places], logs)


@pytest.mark.parametrize(
    ("size", "prefill"),
    [(1, "exact"), pytest.param(2, "exact", marks=pytest.mark.slow), pytest.param(1, "packed", marks=pytest.mark.slow)],
)
def test_a_long_prefill_is_interrupted(size, prefill, folder, tmp_path):
    with reading(size, prefill, folder, tmp_path / "logs") as running:
        running.wait_for("rotation digest")
        time.sleep(2)  # in the middle of it
        for process in running.processes:
            process.send_signal(signal.SIGINT)
        assert set(running.ends(INTERRUPT_ENDS_WITHIN_S, size)) == {130}
        who = r"bitkv: interrupted, prefill" if size == 1 else rf"bitkv: rank \d of {size} \(host .*, prefill\): interrupted"
        assert len(running.messages()) == 1 and re.fullmatch(who, running.messages()[0]), running.said
