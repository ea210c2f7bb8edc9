"""Whatever goes wrong on one rank, the whole job ends in time, with one message that names rank, host, step and likely cause.

Real ranks of the real `generate`, most without a launcher, which would help by ending them: that is a launcher's own business.
CASES.md C32, C35.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from ranks import environment, free_port, launched

FAULTY = Path(__file__).with_name("faulty.py")
ENDS_WITHIN_S, INTERRUPT_ENDS_WITHIN_S = 35, 10
STARTS_WITHIN_S = 120
RANKS = 3
HOST = re.escape(socket.gethostname())
SURVIVOR = rf"bitkv: rank [02] of 3 \(host {HOST}, step \d+\): "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models that differ in their weights only, and a configuration with a short step timeout."""
    place = tmp_path_factory.mktemp("faults")
    for seed in (0, 1):
        tiny.save_tokenizer(tiny.save(place / f"model{seed}", seed=seed, vocab_size=257))
    (place / "run.yaml").write_text(
        "cache: {codec: planes, key_bits: 2, value_bits: 2, page_tokens: 64, sink_tokens: 64, recent_tokens: 32}\n"
        "parallel: {device: cpu, start_timeout_s: 100, step_timeout_s: 15}\n"
    )
    return place


def flags(folder: Path, tokens: int = 400) -> list[str]:
    prompt = ["--prompt", "a tale of two ranks " * 60, "--max-new-tokens", str(tokens), "--ignore-eos"]
    return ["--model", str(folder / "model0"), "--config", str(folder / "run.yaml"), *prompt]


@dataclass
class Job:
    """Processes that this test started, and what they have written."""

    processes: list[subprocess.Popen]
    logs: list[Path]

    @property
    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def messages(self) -> list[str]:
        """The lines that tell of a failure."""
        start_up = r"on cpu, backend|world size|rotation digest"
        return [line for line in self.said.splitlines() if line.startswith("bitkv") and not re.search(start_up, line)]

    def wait_for(self, pattern: str, within_s: float = STARTS_WITHIN_S) -> re.Match:
        until = time.monotonic() + within_s
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < until and any(p.poll() is None for p in self.processes), self.said
            time.sleep(0.1)
        return found

    def ends(self, within_s: float, ranks: int = RANKS) -> list[int]:
        """Statuses of the processes, which end in time, and no rank outlives them."""
        until = time.monotonic() + within_s
        pids = {int(pid) for pid in re.findall(r"^pid (\d+)$", self.said, re.M)}
        assert len(pids) == ranks, self.said
        statuses = []
        for process in self.processes:
            try:
                statuses.append(process.wait(max(0.1, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not over after {within_s} s\n{self.said}") from None
        while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < until, f"ranks {alive} outlive the job\n{self.said}"
            time.sleep(0.1)
        return statuses


@contextlib.contextmanager
def job(commands: list[tuple[list[str], dict[str, str]]], logs: Path):
    """Start the commands; whatever is left at the end, ranks included, is killed."""
    logs.mkdir(exist_ok=True)
    running = Job([], [logs / f"log{i}" for i in range(len(commands))])
    try:
        for (argv, env), log in zip(commands, running.logs, strict=True):
            with log.open("w") as out:
                streams = {"stdout": subprocess.DEVNULL, "stderr": out}
                running.processes.append(subprocess.Popen(argv, env=environment() | env, start_new_session=True, **streams))
        yield running
    finally:
        for process in running.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ranks_with(fault: str, folder: Path, logs: Path, rank: int = 1, port: int | None = None):
    """RANKS ranks as a launcher would start them, of which one has the fault."""
    port = port or free_port()
    place = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [sys.executable, str(FAULTY), fault, str(rank), *flags(folder)]
    places = [place | {"RANK": i, "LOCAL_RANK": i} for i in range(RANKS)]
    env = {"OTHER_MODEL": str(folder / "model1")}
    return job([(argv, env | {name: str(value) for name, value in place.items()}) for place in places], logs)


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        ("raise", 1, rf"^bitkv: rank 1 of 3 \(host {HOST}, step 3\): RuntimeError: boom$"),
        ("kill-decode", 1, rf"^{SURVIVOR}lost rank 1 \(host {HOST}, last in .*\): no sign of life; killed"),
        ("kill-decode", 0, rf"^bitkv: rank [12] of 3 .*: lost rank 0 \(host {HOST}\), which keeps the rendez"),
        pytest.param("wander", 1, r"rank 1 \(host .*, step 3\): has other tokens .* since step 3$", marks=pytest.mark.slow),
        pytest.param("wander", 0, r"^bitkv: rank [12] of 3 .*: rank 0 \(host .*\): has other tokens", marks=pytest.mark.slow),
        pytest.param("kill-prefill", 1, r"lost rank 1 \(host .*, last in .*\): no sign of life", marks=pytest.mark.slow),
        pytest.param("stop", 1, r"rank 1 \(host .*, last in .*\): no sign of life; killed, stop", marks=pytest.mark.slow),
        pytest.param("sleep", 1, r"rank 1 \(host .*, step 3\): for \d+ s not in exchange \d+", marks=pytest.mark.slow),
        pytest.param("busy", 2, r"rank 2 \(host .*, step 3\): for \d+ s not in exchange \d+", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails(fault, rank, message, folder, tmp_path):
    with ranks_with(fault, folder, tmp_path / "logs", rank) as running:
        at = float(running.wait_for(r"fault at (\d+\.\d+)")[1])
        assert all(running.ends(ENDS_WITHIN_S - (time.time() - at))), running.said
        assert len(running.messages()) == 1 and re.search(message, running.messages()[0]), running.said


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("seed", rf"rank 1 \(host {HOST}\) differs from the others in layer 0 \(and 1 more\): another configuration; "),
        pytest.param("version", r"rank 1 \(host .*\) differs .* another version of torch; ", marks=pytest.mark.slow),
        pytest.param("config", r"rank 1 \(host .*\) differs .* another configuration; ", marks=pytest.mark.slow),
        pytest.param("model", r"rank 1 \(host .*\) differs .* another .*model; run", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_told_something_else(fault, message, folder, tmp_path):
    with ranks_with(fault, folder, tmp_path / "logs") as running:
        running.wait_for(r"bitkv: rank \d of", STARTS_WITHIN_S)
        assert all(running.ends(ENDS_WITHIN_S)), running.said
        assert len(running.messages()) == 1 and re.search(message, running.messages()[0]), running.said


@pytest.mark.slow
def test_a_prompt_that_rank_0_cannot_read(folder, tmp_path):
    """C32: no other rank reads it, and none waits for it."""
    with ranks_with("prompt", folder, tmp_path / "logs", rank=0) as running:
        running.wait_for("bitkv generate: ")
        assert set(running.ends(ENDS_WITHIN_S)) == {2}
        (message,) = running.messages()
        assert re.search(rf"^bitkv generate: prompt file '/no/such/file.txt'.* \[rank 0 of 3 \(host {HOST}, .*\)\]$", message)


@pytest.mark.parametrize("receivers", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_interrupt(receivers, folder, tmp_path):
    """A terminal sends SIGINT to all, `kill` to one."""
    with ranks_with("none", folder, tmp_path / "logs") as running:
        running.wait_for("rotation digest")
        for process in running.processes[: None if receivers == "all" else 1]:
            process.send_signal(signal.SIGINT)
        assert set(running.ends(INTERRUPT_ENDS_WITHIN_S)) == {130}
        assert len(running.messages()) == 1 and re.search(r"^bitkv: rank \d of 3 .*: interrupted$", running.messages()[0])


@pytest.mark.slow
def test_a_port_that_is_taken(folder, tmp_path):
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        with ranks_with("none", folder, tmp_path / "logs", port=port) as running:
            running.wait_for(rf"bitkv generate: port {port} on {HOST}: already in use.*--master_port")
            running.processes[1].terminate()  # a launcher ends the ranks that still wait for rank 0
            running.processes[2].terminate()
            assert all(running.ends(INTERRUPT_ENDS_WITHIN_S))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_runner_alone(launcher, number, folder, tmp_path):
    argv = launched(launcher, RANKS, FAULTY, "none", "0", *flags(folder, 2000))
    with job([(argv, {})], tmp_path / "logs") as running:
        running.wait_for("rotation digest")
        running.processes[0].send_signal(number)
        (status,) = running.ends(ENDS_WITHIN_S if number == signal.SIGTERM else INTERRUPT_ENDS_WITHIN_S)
        assert status != 0
        assert len(running.messages()) <= 1, running.said  # deepspeed's launcher may be gone before anybody can speak


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_killed_rank_under_a_launcher(launcher, folder, tmp_path):
    """The launcher terminates the others at once; still one of them finds the time to say whom it lost."""
    argv = launched(launcher, RANKS, FAULTY, "kill-decode", "1", *flags(folder))
    with job([(argv, {})], tmp_path / "logs") as running:
        at = float(running.wait_for(r"fault at (\d+\.\d+)")[1])
        assert all(running.ends(ENDS_WITHIN_S - (time.time() - at)))
        assert len(running.messages()) == 1 and "lost rank 1 (host" in running.messages()[0], running.said


@pytest.mark.slow
def test_a_reader_that_goes_away(folder, tmp_path):
    """`deepspeed ... | head -c 1`: the text has no reader any more."""
    log = tmp_path / "log"
    argv = launched("deepspeed", RANKS, FAULTY, "none", "0", *flags(folder, 2000))
    with log.open("w") as err:
        process = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=err, start_new_session=True)
    running = Job([process], [log])
    try:
        running.wait_for("rotation digest")
        process.stdout.read(1)
        process.stdout.close()
        (status,) = running.ends(ENDS_WITHIN_S)
        assert status != 0
        (message,) = running.messages()
        assert re.search(r"rank 0 of 3 .*: the reader of stdout went away$", message)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
