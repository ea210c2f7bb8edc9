"""Which process am I among how many, and what of this machine is mine: functions of the environment that a launcher made."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

DEFAULT_PORT = 29500


class Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


@dataclass(frozen=True)
class World:
    """One process among all. `backend` is "none" in a world of one; `threads` are this rank's CPU threads."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    launcher: str  # deepspeed | torchrun | mpirun | slurm | python
    backend: str  # gloo | nccl | none
    device: torch.device
    threads: int


_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MPI = (  # rank, size, local rank, local size
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def discover(env: Mapping[str, str] = os.environ) -> Place:
    """Place of this process, from the environment alone. ValueError (one line) when the environment contradicts itself.

    Order: deepspeed / torchrun variables, then MPI, then a Slurm *step* (a batch script alone is no step), else a world of one.
    Under mpirun the local rank is a guess here; `start` asks MPI itself.
    """
    if any(name in env for name in _LAUNCHED[:2]):
        rank, size, local_rank = (_integer(env, name) for name in _LAUNCHED)
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed"
        local_name = next((n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if n in env), None)
        local_size = _integer(env, local_name) if local_name else size
        return _checked(Place(rank, size, local_rank, local_size, launcher))

    mpi = next((names for names in _MPI if names[0] in env), None)
    if mpi and not _is_slurm_step(env, mpi):
        rank, size = _integer(env, mpi[0]), _integer(env, mpi[1])
        local_rank = _integer(env, mpi[2]) if mpi[2] in env else rank
        local_size = _integer(env, mpi[3]) if mpi[3] in env else size
        return _checked(Place(rank, size, local_rank, local_size, "mpirun"))

    if all(name in env for name in _SLURM):
        rank, size, local_rank = (_integer(env, name) for name in _SLURM)
        return _checked(Place(rank, size, local_rank, _slurm_local_size(env, size), "slurm"))

    return Place(0, 1, 0, 1, "python")


def _integer(env: Mapping[str, str], name: str) -> int:
    if name not in env:
        present = next(n for n in (*_LAUNCHED, *(n for names in _MPI for n in names), *_SLURM) if n in env)
        raise ValueError(
            f"{name} is not set although {present} is: a launcher sets them together; "
            f"start with deepspeed, torchrun, mpirun or srun, or unset {present}"
        )
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name} {env[name]!r}: must be an integer; a launcher sets it, leave it alone") from None


def _checked(place: Place) -> Place:
    rank, size, local_rank, local_size, _ = place
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ValueError(
            f"rank {rank} of {size} (local rank {local_rank} of {local_size}): must satisfy 0 <= rank < size and "
            "0 <= local rank < local size <= size; unset the variables of an earlier launcher"
        )
    return place


def _is_slurm_step(env: Mapping[str, str], mpi: tuple[str, ...]) -> bool:
    """srun --mpi=pmi2 sets PMI variables beside its own; it needs no mpi4py then. mpirun inside a step counts differently."""
    return all(n in env for n in _SLURM) and (env[_SLURM[0]], env[_SLURM[1]]) == (env.get(mpi[0]), env.get(mpi[1]))


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """SLURM_STEP_TASKS_PER_NODE reads like `4(x2),3`: nodes 0 and 1 run 4 tasks, node 2 runs 3."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else size


def slurm_address(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """First host of the step, and a port that differs between jobs; MASTER_ADDR / MASTER_PORT win."""
    nodes = env.get("SLURM_STEP_NODELIST", "localhost")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    step = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))
    return env.get("MASTER_ADDR", first[1] + (first[2] or "")), int(env.get("MASTER_PORT", 20000 + step % 10000))


def choose_device(wanted: str, place: Place, gpus: int) -> tuple[torch.device, str]:
    """(device, backend) for `--device auto|cpu|cuda` on a host where this process sees `gpus` GPUs."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted}: must be auto, cpu or cuda; the launcher chooses which GPU a rank uses")
    if wanted == "cuda" and not gpus:
        raise ValueError("device cuda: this process sees no GPU; use --device cpu or check the driver and CUDA_VISIBLE_DEVICES")
    if wanted == "cpu" or not gpus:
        return torch.device("cpu"), "gloo" if place.size > 1 else "none"
    one_each = place.launcher == "slurm" and gpus == 1  # bound by srun: number 0 for every task
    if place.local_size > gpus and not one_each:
        raise ValueError(
            f"{place.local_size} ranks on host {socket.gethostname()}: more than its {gpus} GPUs; "
            f"start {gpus} ranks there or use --device cpu"
        )
    index = 0 if one_each else place.local_rank
    return torch.device("cuda", index), "nccl" if place.size > 1 else "none"


def threads_per_rank(place: Place, env: Mapping[str, str] = os.environ) -> int | None:
    """max(1, cores // ranks on this host); None where the user chose with OMP_NUM_THREADS. More threads than cores collapse."""
    if "OMP_NUM_THREADS" in env and not (place.launcher == "torchrun" and _torchrun_chose_threads()):
        return None
    return max(1, len(os.sched_getaffinity(0)) // place.local_size)


def _torchrun_chose_threads() -> bool:
    """torchrun sets OMP_NUM_THREADS=1 for its workers unless the user set it: its own initial environment tells."""
    try:
        return b"OMP_NUM_THREADS=" not in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False


def choose_grid(tp: int, sp: int | None, size: int) -> tuple[int, int]:
    """(tp, sp) with sp = size / tp by default; the product must be the world size."""
    if tp < 1 or (sp is not None and sp < 1):
        raise ValueError(f"tp {tp}, sp {sp}: both must be at least 1; leave --sp away to use all ranks")
    if tp * (sp or size // tp) != size or size < tp:
        raise ValueError(
            f"tp {tp} x sp {sp or 'world/tp'}: the product must be the number of ranks, {size}; "
            f"start {tp * (sp or 1)} ranks or change --tp / --sp"
        )
    return tp, sp or size // tp


def env_address(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    if "MASTER_ADDR" not in env:
        raise ValueError(
            "MASTER_ADDR is not set although RANK is: a launcher sets both; use deepspeed, torchrun, mpirun or srun"
        )
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else DEFAULT_PORT
    return env["MASTER_ADDR"], port
