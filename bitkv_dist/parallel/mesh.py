"""How the ranks talk: `start` joins the world that a launcher made, `Mesh` is its grid SP (outer) x TP (inner).

torch.distributed is initialised directly: on a CPU deepspeed.init_distributed() compiles a shared-memory operator for a minute.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bitkv_dist.config import ParallelConfig
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel.alarm import Alarm
from bitkv_dist.parallel.world import (
    Place,
    World,
    choose_device,
    choose_grid,
    discover,
    env_address,
    slurm_address,
    threads_per_rank,
)


def start(parallel: ParallelConfig, *, check_shapes: bool = False) -> Mesh:
    """Join the world that the launcher made. ValueError (one line) for everything a user can put right.

    `check_shapes` verifies before every gather that all ranks bring the same shape and dtype (gloo would return wrong numbers).
    """
    global _current
    # Without it MKL rounds a product of 5 to 11 rows differently with 2 threads than with 1; it costs nothing measurable.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    dispatch.use(parallel.cpu_isa)
    place = discover()
    if place.launcher == "mpirun" and place.size > 1:
        place, address, store = _mpi_rendezvous(parallel)
    tp, sp = choose_grid(parallel.tp, parallel.sp, place.size)
    gpus = torch.cuda.device_count() if parallel.device != "cpu" else 0
    device, backend = choose_device(parallel.device, place, gpus)
    threads = threads_per_rank(place)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(*place[:4], socket.gethostname(), place.launcher, backend, device, torch.get_num_threads())
    alarm = None
    if place.size > 1:
        if place.launcher != "mpirun":
            address, store = _env_rendezvous(place, parallel)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job must not read the keys of the dead one
        store = dist.PrefixStore(f"bitkv/{attempt}", store)
        _join(store, world, parallel)
        watched = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
        alarm = Alarm(store, dist.PrefixStore(f"bitkv/{attempt}", watched), place.rank)
    _current = Mesh(world, tp, sp, parallel, alarm, check_shapes=check_shapes)
    return _current


def _join(store: dist.Store, world: World, parallel: ParallelConfig) -> None:
    # Small objects and digests travel over gloo, also where the tensors travel over nccl.
    backend = "gloo" if world.backend == "gloo" else "cpu:gloo,cuda:nccl"
    device_id = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            device_id=device_id,
            timeout=timedelta(seconds=parallel.start_timeout_s),
        )
    except dist.DistStoreError as error:
        raise ValueError(
            f"start_timeout_s {parallel.start_timeout_s:g}: not all {world.size} ranks came up in that time; "
            "look at the messages of the others, or raise it"
        ) from error


def _env_rendezvous(place: Place, parallel: ParallelConfig) -> tuple[tuple[str, int], dist.TCPStore]:
    address = slurm_address() if place.launcher == "slurm" else env_address()
    # The torchrun agent may already serve a store there for its workers.
    serve = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return address, _store(*address, serve, parallel.start_timeout_s)


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


def _mpi_rendezvous(parallel: ParallelConfig) -> tuple[Place, tuple[str, int], dist.TCPStore]:
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


class Mesh:
    """The grid of ranks, `rank = sp_rank * tp + tp_rank`, and the collectives over it; in a world of one they are all local.

    `gathers` and `gathered_bytes` count the calls of gather_sp and the bytes that this rank received through it.
    """

    def __init__(
        self,
        world: World,
        tp: int,
        sp: int,
        parallel: ParallelConfig,
        alarm: Alarm | None = None,
        *,
        check_shapes: bool = False,
    ):
        self.world, self.tp, self.sp = world, tp, sp
        self.sp_rank, self.tp_rank = divmod(world.rank, tp)
        self.gathers = self.gathered_bytes = 0
        self._parallel, self._alarm, self._check_shapes = parallel, alarm, check_shapes
        self._groups = [dist.group.WORLD] if world.size > 1 else []
        ranks = torch.arange(world.size).view(sp, tp)
        self._sp_group = self._subgroup(ranks.T) if sp > 1 else None
        self.tp_mesh = None
        if tp > 1:
            self.tp_mesh = DeviceMesh.from_group(self._subgroup(ranks), world.device.type, mesh_dim_names=("tp",))

    def _subgroup(self, rows: Tensor) -> dist.ProcessGroup:
        """This rank's group among the rows of a table of world ranks."""
        timeout = timedelta(seconds=self._parallel.start_timeout_s)
        mine, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        self._groups.append(mine)
        return mine

    def ready(self) -> None:
        """Loading is over: wait for all ranks; from here a collective may take step_timeout_s, no longer start_timeout_s."""
        self.gather_objects(None)
        for group in self._groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._parallel.step_timeout_s), group)

    def gather_sp(self, t: Tensor) -> Tensor:
        """[*s] on every rank of the SP group -> [sp, *s] in order of sp_rank; any dtype. s and dtype are the same on all."""
        self.gathers += 1
        if self.sp == 1:
            return t.unsqueeze(0)
        if self._check_shapes:
            self._require_equal_shapes(t)
        mine = t.contiguous().view(-1).view(torch.uint8)  # bytes, because gloo does not know every dtype
        out = mine.new_empty(self.sp * mine.numel())
        if mine.numel():
            dist.all_gather_single(out, mine, group=self._sp_group)
        self.gathered_bytes += out.numel() - mine.numel()
        return out.view(t.dtype).view(self.sp, *t.shape)

    def _require_equal_shapes(self, t: Tensor) -> None:
        described: list = [None] * self.sp
        dist.all_gather_object(described, (tuple(t.shape), str(t.dtype)), group=self._sp_group)
        if len(set(described)) > 1:
            raise RuntimeError(f"gather_sp: the SP ranks bring different tensors: {described}")

    def broadcast(self, obj):
        """A small python object of world rank 0, on every rank."""
        if self.world.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def broadcast_tensor(self, t: Tensor) -> Tensor:
        """The CPU tensor of world rank 0, on every rank; same shape and dtype everywhere."""
        if self.world.size > 1:
            dist.broadcast(t, src=0)
        return t

    def gather_objects(self, obj) -> list:
        """One small python object per world rank, on every rank."""
        gathered = [obj] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(gathered, obj)
        return gathered

    def all_equal(self, digests: Tensor) -> bool:
        """True where int64 [n] is the same on all ranks (n must be): one all_reduce, because max(~d) is ~min(d)."""
        if self.world.size == 1:
            return True
        both = torch.stack([digests, ~digests]).cpu()
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return torch.equal(both[0], ~both[1])

    def fail(self, message: str, code: int = 1) -> bool:
        """End the job: every other rank exits with `code` within a second. True: this rank is the one to print `message`.

        After printing call `linger`, then exit without `close`.
        """
        return self._alarm is None or self._alarm.raise_alarm(message, code)

    def linger(self) -> None:
        """Let the others see the alarm before this rank goes, and perhaps the store with it."""
        if self._alarm is not None:
            self._alarm.linger()

    def close(self) -> None:
        """All ranks together, after a run that went well."""
        global _current
        _current = None
        if self._alarm is not None:
            self.gather_objects(None)  # nobody may still need the others, or the store that rank 0 serves
            self._alarm.stop()
            self._alarm = self._sp_group = self.tp_mesh = None
            self._groups.clear()  # gloo's threads end with their group, which must be before the interpreter does
            dist.destroy_process_group()


_current: Mesh | None = None


def current() -> Mesh | None:
    """The mesh of this process once `start` has returned: whoever handles a failure needs it."""
    return _current
