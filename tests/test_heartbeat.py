"""The roll call, the signs of life and what is concluded from them, without processes: every rank is a view of one store."""

import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from bitkv_dist.parallel import alarm as alarms
from bitkv_dist.parallel import parents, roll
from bitkv_dist.parallel.heartbeat import BEAT_S, Heart, Pulse

ENTRY = roll.Entry(0, "a", 1, 0, "cpu", 1, 3, 1, 3, "gloo")
ROLL = [replace(ENTRY, rank=rank, host="ab"[rank // 2]) for rank in range(3)]


def called(entries: list[roll.Entry], timeout_s: float = 5) -> list:
    """What each rank gets from the roll call, or the message that it is refused with."""
    store = dist.HashStore()

    def call(entry):
        try:
            return roll.call(store, entry, timeout_s)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(entries)) as pool:
        return list(pool.map(call, entries))


def test_everybody_gets_the_list():
    assert called(ROLL) == [ROLL] * 3


def test_a_rank_of_another_grid_is_named():
    common = "in a world of 3 over gloo, layout"
    for other, said in (
        ({"tp": 3, "sp": 1}, f"tp 3 x sp 1 {common} replicated, exchange auto"),
        ({"layout": "helix"}, f"tp 1 x sp 3 {common} helix, exchange auto"),
        ({"exchange": "allreduce"}, f"tp 1 x sp 3 {common} replicated, exchange allreduce"),
    ):
        first = f"rank 0 (host a): tp 1 x sp 3 {common} replicated, exchange auto; start all ranks with the same command line"
        assert called([*ROLL[:2], replace(ROLL[2], **other)]) == [f"rank 2 (host b): {said}, but {first}"] * 3


def test_missing_ranks_are_named():
    (said,) = called(ROLL[:1], timeout_s=0.2)
    assert said.startswith("start_timeout_s 0.2: not all 3 ranks came up in that time, missing: 1, 2; ")


def hearts(store) -> list[Heart]:
    made = [Heart(Pulse("step 7", exchanges=40, history=5), rank) for rank in range(3)]
    for heart in made:
        heart.roll = ROLL
        heart.beat(store)
    return made


def beating(alive: list[Heart], store):
    """A wait in which only these hearts go on."""
    return lambda seconds: [heart.beat(store) for heart in alive]


def test_who_has_died():
    store = dist.HashStore()
    made = hearts(store)
    said = made[0].who_is_missing(store, beating(made[:2], store))
    assert said == "rank 2 (host b, last in step 7): no sign of life; killed, stopped, out of memory or cut off"
    assert made[0].who_is_missing(store, beating(made, store)) is None
    said = made[1].who_is_missing(store, beating([made[1]], store))
    assert said.startswith("rank 0 (host a, last in step 7), rank 2 (host b, last in step 7): no sign of life")


def test_who_hangs_and_since_when():
    store = dist.HashStore()
    made = hearts(store)
    for heart in made[:2]:
        heart.pulse.exchanges += 1
    assert made[0].who_is_missing(store, beating(made, store)) is None  # it may come any moment
    made[2]._moved = (40, time.monotonic() - 9)
    said = made[0].who_is_missing(store, beating(made, store))
    assert said.startswith("rank 2 (host b, step 7): for 9 s not in exchange 41, where others wait; ")
    assert made[2].who_is_missing(store, beating(made, store)) is None


def test_a_neighbour_is_silent_after_as_many_looks_as_asked_for():
    store = dist.HashStore()
    made = hearts(store)
    assert [made[1].next_is_silent(store, 3 * BEAT_S) for _ in range(4)] == [False, False, False, True]
    made[2].beat(store)
    assert not made[1].next_is_silent(store, 3 * BEAT_S)
    assert made[2].next_is_silent(store, 0)  # rank 0 is the last one's neighbour


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_whose_tokens_differ(odd):
    store = dist.HashStore()
    made = hearts(store)
    made[odd].pulse.history = 2**63 + 1
    said = made[1].who_differs(store, beating(made, store))
    assert said == f"rank {odd} (host {'aab'[odd]}, step 7)"


def test_who_waits_for_the_report_is_not_missing(monkeypatch):
    """All ranks of a launcher that is gone end the job at once; the first of them looks for the others before it reports."""
    monkeypatch.setattr(alarms, "WATCH_S", 1000)  # the watching thread has better things to do: it is the one that waits
    store = dist.HashStore()
    made = hearts(store)
    with ThreadPoolExecutor(2) as pool:  # not the main thread, whose signals stay as they are
        others = list(pool.map(lambda heart: alarms.Alarm(store, store, heart, None, print), made[1:]))
        waiting = [pool.submit(other._leave, store, 143, False) for other in others]
        assert made[0].who_is_missing(store) is None and made[0].given_up == []
        store.set("alarm", "143")
        for other in waiting:
            other.result(timeout=5)
    for other in others:
        other.stop()


def test_a_launcher_that_is_gone(tmp_path):
    """A child of a process that goes by a launcher's name; a shell is none, so a job may outlive the one that started it."""
    script = tmp_path / "torchrun"
    child = "import time; from bitkv_dist.parallel.parents import Parents; p = Parents(); print(p.gone(), flush=True);"
    child += "time.sleep(1.5); print(p.gone(), flush=True)"
    script.write_text(f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(100)")
    runner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert runner.stdout.readline() == "False\n"
    runner.kill()
    runner.wait()
    assert runner.stdout.readline() == "True\n"
    command = f"{sys.executable} -c {shlex.quote(child)}; true"
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert shell.stdout.readline() == "False\n"
    shell.kill()
    shell.wait()
    assert shell.stdout.readline() == "False\n"


def test_only_the_very_process_is_ended():
    stopped = subprocess.Popen(["sleep", "100"])
    stopped.send_signal(signal.SIGSTOP)
    born = parents.birth(stopped.pid)
    for pid, began in ((stopped.pid, born + 1), (stopped.pid, 0), (os.getpid(), parents.birth(os.getpid()))):
        parents.end(pid, began)
    assert stopped.poll() is None and born > 0
    parents.end(stopped.pid, born)
    assert stopped.wait(timeout=5) == -signal.SIGKILL
    parents.end(stopped.pid, born)  # nobody of that number
