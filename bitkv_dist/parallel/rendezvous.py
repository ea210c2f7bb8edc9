"""Where the ranks meet: the store that rank 0 (or torchrun's agent) serves, at an address from the environment or from MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from bitkv_dist.config import ParallelConfig
from bitkv_dist.parallel.world import Place, discover, env_address, slurm_address


def env_rendezvous(place: Place, parallel: ParallelConfig) -> tuple[tuple[str, int], dist.TCPStore]:
    address = slurm_address() if place.launcher == "slurm" else env_address()
    return address, _store(*address, place.rank == 0 and not agent_serves(), parallel.start_timeout_s)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once: Python's own handler would wait until the store answers, for minutes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def agent_serves() -> bool:
    """Whether torchrun's agent already serves a store there for its workers: one that outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(host: str, port: int, serve: bool, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        if serve:
            raise ValueError(
                f"port {port} on {socket.gethostname()}: already in use, perhaps by another job; "
                "choose another with --master_port"
            ) from error
        raise ValueError(
            f"rank 0 at {host}:{port}: did not answer within {timeout_s:g} s; "
            "check the address, the firewall and rank 0's own message, or choose another --master_port"
        ) from error


def mpi_rendezvous(parallel: ParallelConfig) -> tuple[Place, tuple[str, int], dist.TCPStore]:
    """Rank, size and local rank from MPI itself; rank 0 serves a store on a port the system picks and broadcasts its address.

    MPI is finalised at once: from here on torch.distributed does the talking, and no exit can hang in MPI_Finalize.
    """
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError(
            "mpirun without mpi4py: it is needed to find the other ranks; pip install mpi4py, "
            "or start with torchrun or deepspeed"
        ) from None
    comm = MPI.COMM_WORLD
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = Place(comm.rank, comm.size, local.rank, local.size, "mpirun")
    if place.size == 1 < discover().size:
        raise ValueError(
            f"mpirun started {discover().size} ranks but mpi4py sees one: it was built for another MPI; "
            "install mpi4py for this one, or use torchrun or deepspeed"
        )
    same_host = comm.bcast(place.local_size if place.rank == 0 else None) == place.size
    host = "127.0.0.1" if same_host else os.environ.get("MASTER_ADDR", socket.gethostname())
    store = _store(host, 0, True, parallel.start_timeout_s) if place.rank == 0 else None
    address = comm.bcast((host, store.port) if store else None)
    if store is None:
        store = _store(*address, False, parallel.start_timeout_s)
    local.Free()
    MPI.Finalize()
    return place, address, store
