"""The exact command line of each launcher for a job: pure functions from hosts and arguments to words."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from bitkv_dist.launch.hostfile import Host

LAUNCHERS = ("deepspeed", "torchrun", "mpirun", "srun")


@dataclass(frozen=True)
class Job:
    """What is started where. `arguments` are the script's own flags: all settings travel in them, none by environment alone."""

    hosts: list[Host]
    hostfile: str | None
    master_addr: str
    master_port: int
    script: Path
    arguments: list[str]
    runner: str = "pdsh"  # how deepspeed reaches other hosts

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(self.script), *self.arguments]


def command_line(launcher: str, job: Job, node: int = 0) -> list[str]:
    """The words that start `job`; with torchrun, its part on host number `node`. ValueError for what a launcher cannot do."""
    if launcher == "torchrun":
        return _torchrun(job, node)
    return {"deepspeed": _deepspeed, "mpirun": _mpirun, "srun": _srun}[launcher](job)


def tool(name: str) -> str:
    """A launcher that is installed beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def _deepspeed(job: Job) -> list[str]:
    if job.hostfile is None:
        where = ["--num_gpus", str(job.ranks), "--master_port", str(job.master_port)]
        return [tool("deepspeed"), *where, str(job.script), *job.arguments]
    if job.runner == "mpich":
        _require_equal_slots(job, "deepspeed's mpich runner")
    where = ["--hostfile", job.hostfile, "--launcher", job.runner]
    where += ["--master_addr", job.master_addr, "--master_port", str(job.master_port)]
    remote = len(job.hosts) > 1 or not job.hosts[0].is_here
    if remote and len(job.hosts) == 1:
        where.append("--force_multi")  # else deepspeed starts the ranks here, whichever host the file names
    arguments = [_through_pdsh(word) for word in job.arguments] if remote and job.runner == "pdsh" else job.arguments
    return [tool("deepspeed"), *where, str(job.script), *arguments]


def _through_pdsh(word: str) -> str:
    """deepspeed joins the arguments for a remote shell; it only puts double quotes around those with a blank, \\ before ".

    pdsh replaces %h, %n and %u in what it passes on, and %% by %.
    """
    if "\n" in word:
        raise ValueError(f"argument {word!r}: a line break does not survive pdsh; use --launcher torchrun or a file")
    word = word.replace("%", "%%")
    if " " not in word:
        return shlex.quote(word)
    return "".join(f"\\{letter}" if letter in "\\$`" else letter for letter in word)


def _torchrun(job: Job, node: int) -> list[str]:
    slots = str(_require_equal_slots(job, "torchrun"))
    where = ["--nproc-per-node", slots, "--master-port", str(job.master_port)]
    if len(job.hosts) > 1:
        where = ["--nnodes", str(len(job.hosts)), "--node-rank", str(node), "--master-addr", job.master_addr, *where]
    return [tool("torchrun"), *where, str(job.script), *job.arguments]


def _mpirun(job: Job) -> list[str]:
    """Words that Open MPI and MPICH both understand."""
    where = ["-n", str(job.ranks)]
    if job.hostfile is not None:
        where += ["-host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    return [tool("mpirun"), *where, *job.program]


def _srun(job: Job) -> list[str]:
    slots = _require_equal_slots(job, "srun")
    where = ["--nodes", str(len(job.hosts)), "--ntasks", str(job.ranks), "--ntasks-per-node", str(slots)]
    return ["srun", *where, "--kill-on-bad-exit=1", *job.program]


def _require_equal_slots(job: Job, who: str) -> int:
    counts = {host.slots for host in job.hosts}
    if len(counts) > 1:
        few, many = min(job.hosts, key=lambda host: host.slots), max(job.hosts, key=lambda host: host.slots)
        raise ValueError(
            f"hostfile: {few.name} has {few.slots} slots and {many.name} {many.slots}, but {who} starts the same number "
            "everywhere; give all hosts the same slots or use another launcher"
        )
    return counts.pop()
