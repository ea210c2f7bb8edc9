"""Other processes of this job on this host: the launchers above this one, and ranks beside it.

A runner that is killed does not always take its ranks along (SIGTERM to `deepspeed` does not even reach them): they must notice
by themselves that nobody waits for them any more. And a rank that was stopped ends by no signal of a launcher's but SIGKILL,
which comes half a minute late.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_LAUNCHERS = {
    *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torchrun", "torch.distributed.run"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orted", "prted", "prterun", "srun", "slurmstepd"),
}
_LOOKED_AT_WORDS = 4  # python -u -m MODULE: the name of a launcher stands among the first words


class Parents:
    """The chain of launchers from this process upwards, as it was at the start."""

    def __init__(self) -> None:
        self._chain: list[tuple[int, int]] = []  # (child, its parent, which is a launcher)
        child, parent = os.getpid(), os.getppid()
        while parent > 1 and _is_launcher(parent):
            self._chain.append((child, parent))
            child, parent = parent, _parent_of(parent)

    def gone(self) -> bool:
        """Whether one of them has ended: its child belongs to another process now."""
        return any(_parent_of(child) != parent for child, parent in self._chain)


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:_LOOKED_AT_WORDS]
    except OSError:
        return False
    return any(os.path.basename(word.decode(errors="replace")) in _LAUNCHERS for word in words)


def _parent_of(pid: int) -> int:
    """0 when there is no such process, or no /proc."""
    if pid == os.getpid():
        return os.getppid()
    return _status(pid, 1)


def birth(pid: int) -> int:
    """When a process of this host began, in clock ticks since the host did; 0 when there is none, or no /proc."""
    return _status(pid, 19)


def end(pid: int, born: int) -> None:
    """Kill a rank that was given up, if the process of that number is still the one that began then."""
    if born and birth(pid) == born and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)


def _status(pid: int, field: int) -> int:
    """A number behind the name in /proc/PID/stat."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field])
    except (OSError, ValueError):
        return 0
