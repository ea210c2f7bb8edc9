"""Real ranks for tests: gloo processes on this machine, one thread each, that cannot outlive a time limit.

`run_ranks` starts the ranks once and calls a function of the test file in all of them; `run_command` runs a command line and
times it. Both end only what they started.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("deepspeed", "torchrun", "mpirun")
_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_ranks(size: int, function: Callable, *args: Any, tp: int = 1, timeout_s: float = 120, **parallel: Any) -> list[Any]:
    """`function(mesh, *args)` of every rank, in rank order. It must stand at the top level of its file, its values must pickle.

    parallel: other fields of ParallelConfig. Ranks check the shapes that they gather. A rank that raises fails the test with
    the tracebacks of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "task")
        settings = {"tp": tp} | parallel
        task.write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, args, settings)))
        port = free_port()
        ranks = [_start_rank(rank, size, port, Path(folder)) for rank in range(size)]
        try:
            _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(process.returncode for process in ranks):
            logs = [f"rank {rank}: exit status {process.returncode}\n{Path(folder, f'log{rank}').read_text()}"
                    for rank, process in enumerate(ranks)]  # fmt: skip
            raise AssertionError(f"ranks failed or took over {timeout_s:g} s\n" + "\n".join(logs))
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(size)]


def _start_rank(rank: int, size: int, port: int, folder: Path) -> subprocess.Popen:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = environment() | {name: str(value) for name, value in place.items()}
    with Path(folder, f"log{rank}").open("w") as log:
        return subprocess.Popen([sys.executable, __file__, folder, str(rank)], env=env, stdout=log, stderr=log)


def _wait(ranks: Sequence[subprocess.Popen], deadline: float) -> None:
    """Until all have ended, or one has failed and the others had time to notice, or the deadline."""
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.05)


def _rank_main(folder: Path, rank: int) -> None:
    file, name, args, parallel = pickle.loads(Path(folder, "task").read_bytes())
    spec = spec_from_file_location(Path(file).stem, file)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)

    from bitkv_dist.config import ParallelConfig
    from bitkv_dist.parallel.mesh import start

    mesh = start(ParallelConfig(device="cpu", start_timeout_s=100, step_timeout_s=100, **parallel), check_shapes=True)
    result = getattr(module, name)(mesh, *args)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    mesh.close()


@dataclass(frozen=True)
class Ended:
    """A command that has ended, with all that it printed."""

    status: int
    out: str
    err: str
    seconds: float

    def messages(self) -> list[str]:
        """The lines on stderr that are ours, not a launcher's."""
        return [line for line in self.err.splitlines() if line.startswith("bitkv")]


def run_command(argv: Sequence[str | Path], timeout_s: float = 120, **env: str) -> Ended:
    """Run in a session of its own, which is killed as a whole at the time limit: then the test fails."""
    started = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in argv], env=environment() | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{argv} took over {timeout_s:g} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err, time.monotonic() - started)


def launched(launcher: str, size: int, script: str | Path, *args: str) -> list[str]:
    """The command line that starts `size` ranks of a script with one of LAUNCHERS, or with plain python."""
    tools = Path(sys.executable).parent
    port = str(free_port())
    start = {
        "python": [sys.executable],
        "deepspeed": [tools / "deepspeed", "--num_gpus", size, "--master_port", port],
        "torchrun": [tools / "torchrun", "--nproc-per-node", size, "--master-port", port],
        "mpirun": [tools / "mpirun", "-n", size, sys.executable],
    }[launcher]
    return [str(word) for word in (*start, script, *args)]


def environment() -> dict[str, str]:
    """This process's environment without the traces of a launcher, one thread per rank, this folder importable."""
    kept = {name: value for name, value in os.environ.items() if name not in _INHERITED}
    return kept | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parent)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]), int(sys.argv[2]))
