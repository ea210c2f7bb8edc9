"""Start a command on several hosts, or show what would start it.

bitkv launch --hostfile hosts --launcher deepspeed --print generate --config 1m_2x8 --prompt-file library.txt

The flags of `launch` stand before the command, the command's own flags behind it. The number of ranks follows from the hostfile
or from the Slurm allocation; the grid that fits it is passed on as --tp and --sp, so that a job which comes up with fewer ranks
(a launcher that fell back to one node) ends at once. Without --print the command replaces this process.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from pathlib import Path

from bitkv_dist.launch import shell
from bitkv_dist.launch.commands import LAUNCHERS, Job, command_line
from bitkv_dist.launch.flags import DEFAULT_PRESET
from bitkv_dist.launch.hostfile import Host, read_hostfile

NAME = "launch"
PROGRAMS = ("generate", "diagnose")
RUNNERS = ("pdsh", "openmpi", "mpich")
DEFAULT_PORT = 29500  # of deepspeed and torchrun
_READ_BY = {  # what only some launchers read
    "master_addr": ("deepspeed", "torchrun"),
    "master_port": ("deepspeed", "torchrun"),
    "runner": ("deepspeed",),
    "node_rank": ("torchrun",),
}


def main(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    if asked.program not in PROGRAMS:
        raise ValueError(f"command {asked.program!r}: cannot be launched on several ranks; use one of {', '.join(PROGRAMS)}")
    launcher, hosts = _where(asked)
    _refuse_unread(asked, launcher)
    ranks = sum(host.slots for host in hosts)
    tp, sp, arguments = _grid(asked.arguments, ranks)
    script = Path(__file__).resolve().with_name(f"{asked.program}.py")
    address = (asked.master_addr or hosts[0].name, asked.master_port or DEFAULT_PORT)
    job = Job(hosts, asked.hostfile, *address, script, arguments, asked.runner or RUNNERS[0])
    shell.say(f"bitkv launch: {ranks} ranks on {len(hosts)} hosts ({_listed(hosts)}), tp {tp} x sp {sp}, by {launcher}")
    if asked.print:
        for node in range(len(hosts)) if launcher == "torchrun" else (0,):
            if launcher == "torchrun" and len(hosts) > 1:
                print(f"# on {hosts[node].name}:")
            print(shlex.join(command_line(launcher, job, node)))
        return 0
    words = command_line(launcher, job, _this_node(hosts, asked.node_rank) if launcher == "torchrun" else 0)
    sys.stdout.flush()
    os.environ["PYTHONSAFEPATH"] = "1"  # the folder that a script is in holds names that other packages look for
    try:
        os.execvp(words[0], words)
    except OSError as error:
        reason = f"{words[0]} cannot be started ({error.strerror})"
        raise ValueError(f"launcher {launcher}: {reason}; install it or use another") from None


def _parser() -> shell.Parser:
    parser = shell.Parser(NAME, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hostfile", metavar="FILE", help="HOST slots=N lines; without it a Slurm allocation, or this host")
    parser.add_argument("--ranks", type=_count, metavar="N", help="ranks on each host of an allocation, or on this host")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="srun in a Slurm allocation, deepspeed elsewhere")
    parser.add_argument("--runner", choices=RUNNERS, help=f"how deepspeed reaches other hosts ({RUNNERS[0]})")
    parser.add_argument("--master-addr", "--master_addr", metavar="HOST", help="where rank 0 runs: the first host")
    parser.add_argument("--master-port", "--master_port", type=_count, metavar="PORT", help=f"a free one ({DEFAULT_PORT})")
    parser.add_argument("--node-rank", type=int, metavar="I", help="torchrun: this host's number, if not found by its name")
    parser.add_argument("--print", action="store_true", help="show the command instead of running it")
    parser.add_argument("program", metavar="COMMAND", help=", ".join(PROGRAMS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own flags")
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def _where(asked: argparse.Namespace) -> tuple[str, list[Host]]:
    """(launcher, hosts with their ranks)."""
    allocation = "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NUM_NODES" in os.environ
    if asked.hostfile:
        if asked.ranks:
            raise ValueError(f"ranks {asked.ranks} and hostfile: the slots of the hosts are the ranks; leave --ranks out")
        if asked.launcher == "srun":
            raise ValueError("launcher srun and hostfile: srun knows its hosts; leave --hostfile out")
        return asked.launcher or "deepspeed", read_hostfile(asked.hostfile)
    if allocation and asked.launcher in (None, "srun"):
        return "srun", _allocation(asked.ranks)
    if asked.launcher == "srun":
        raise ValueError("launcher srun: there is no Slurm allocation; use salloc or sbatch, or another launcher")
    if not asked.ranks:
        raise ValueError("hostfile: none given; use --hostfile FILE, --ranks N for this host alone, or a Slurm allocation")
    return asked.launcher or "deepspeed", [Host("localhost", asked.ranks)]


def _refuse_unread(asked: argparse.Namespace, launcher: str) -> None:
    for name, readers in _READ_BY.items():
        value = getattr(asked, name)
        if value is not None and launcher not in readers:
            known = " and ".join(readers) if len(readers) > 1 else f"{readers[0]} alone"
            raise ValueError(f"{name.replace('_', '-')} {value}: read by {known}, not by {launcher}; leave it out")


def _allocation(ranks: int | None) -> list[Host]:
    """One entry per node of the Slurm allocation; their names are srun's business."""
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    each = ranks or next(
        (
            int(os.environ[name].partition("(")[0])
            for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
            if os.environ.get(name, "").partition("(")[0].isdecimal()
        ),
        None,
    )
    if not each:
        raise ValueError("ranks: the allocation says neither tasks nor GPUs per node; give --ranks N, the ranks of each node")
    return [Host(f"node {i} of the allocation", each) for i in range(nodes)]


def _grid(arguments: list[str], ranks: int) -> tuple[int, int, list[str]]:
    """(tp, sp, the command's flags with both), from the flags and the preset; ValueError when the ranks do not make it."""
    from bitkv_dist.config import build

    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", default=DEFAULT_PRESET)
    reader.add_argument("--tp", type=_count)
    reader.add_argument("--sp", type=_count)
    try:
        given, others = reader.parse_known_args(arguments)
    except SystemExit:
        raise ValueError("tp, sp: must be whole numbers above 0; correct the command's flags") from None
    chosen = {f"parallel.{name}": getattr(given, name) for name in ("tp", "sp") if getattr(given, name)}
    grid = build(given.config, chosen).parallel
    sp = grid.sp or ranks // grid.tp
    if grid.tp * sp != ranks:
        raise ValueError(
            f"tp {grid.tp} x sp {grid.sp or 'ranks/tp'}: the product must be the number of ranks, {ranks}; "
            "change --tp / --sp or the slots of the hostfile"
        )
    config = [] if given.config == DEFAULT_PRESET else ["--config", given.config]
    return grid.tp, sp, [*config, "--tp", str(grid.tp), "--sp", str(sp), *others]


def _this_node(hosts: list[Host], given: int | None) -> int:
    """Which line of the hostfile is this host: torchrun starts the ranks of one host, so each runs its own command."""
    if given is not None:
        if not 0 <= given < len(hosts):
            raise ValueError(f"node-rank {given}: the hosts are numbered 0 to {len(hosts) - 1}; give this host's line")
        return given
    found = [i for i, host in enumerate(hosts) if host.is_here]
    if not found:
        raise ValueError(
            f"launcher torchrun: host {socket.gethostname()} is not in the hostfile, and torchrun starts one host's ranks; "
            "run this on each host with --node-rank I, or use --launcher deepspeed"
        )
    return found[0]


def _listed(hosts: list[Host]) -> str:
    shown = ", ".join(f"{host.name}: {host.slots}" for host in hosts[:4])
    return shown + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


if __name__ == "__main__":
    shell.run(main, NAME)
