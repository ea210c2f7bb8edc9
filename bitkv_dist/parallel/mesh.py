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

from bitkv_dist.config import ParallelConfig
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel import roll
from bitkv_dist.parallel.alarm import Alarm, Say
from bitkv_dist.parallel.binding import bind, listed
from bitkv_dist.parallel.heartbeat import Heart, Pulse
from bitkv_dist.parallel.parents import birth
from bitkv_dist.parallel.rendezvous import agent_serves, env_rendezvous, interruptible, mpi_rendezvous
from bitkv_dist.parallel.world import World, choose_device, choose_grid, discover, threads_per_rank
from bitkv_dist.split import Split


def start(parallel: ParallelConfig, *, check_shapes: bool = False, say: Say = lambda message, mine: None) -> Mesh:
    """Join the world that the launcher made. ValueError (one line) for everything a user can put right.

    `check_shapes` verifies before every gather that all ranks bring the same shape and dtype (gloo would return wrong numbers).
    `say` prints for a rank whose main thread is stuck: see Alarm.
    """
    global _current
    # Without it MKL rounds a product of 5 to 11 rows differently with 2 threads than with 1; it costs nothing measurable.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    dispatch.use(parallel.cpu_isa)
    place = discover()
    if place.launcher == "mpirun" and place.size > 1:
        place, address, store = mpi_rendezvous(parallel)
    tp, sp = choose_grid(parallel.tp, parallel.sp, place.size)
    gpus = torch.cuda.device_count() if parallel.device != "cpu" else 0
    device, backend = choose_device(parallel.device, place, gpus)
    threads = threads_per_rank(place)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cores = bind(place, device, torch.get_num_threads()) if parallel.bind == "auto" else None
    world = World(*place[:4], socket.gethostname(), place.launcher, backend, device, torch.get_num_threads())
    process = (os.getpid(), birth(os.getpid()))
    me = roll.Entry(place.rank, world.host, *process, str(device), world.threads, place.size, tp, sp, backend,
                    parallel.layout, parallel.exchange, listed(cores or ()))  # fmt: skip
    heart, alarm = Heart(Pulse(), place.rank), None
    heart.roll = [me]
    if place.size > 1:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job must not read the keys of the dead one
        with interruptible():
            if place.launcher != "mpirun":
                address, store = env_rendezvous(place, parallel)
            store = dist.PrefixStore(f"bitkv/{attempt}", store)
            heart.beat(store)
            heart.roll = roll.call(store, me, parallel.start_timeout_s)
            _join(store, world, parallel)
        watched = dist.PrefixStore(f"bitkv/{attempt}", dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30)))
        alarm = Alarm(store, watched, heart, f"torchrun's agent at {address[0]}" if agent_serves() else None, say)
    _current = Mesh(world, tp, sp, parallel, heart, alarm, check_shapes=check_shapes)
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


class Mesh:
    """The grid of ranks, `rank = sp_rank * tp + tp_rank`, and the collectives over it; in a world of one they are all local.

    `gathers` counts the calls of gather_sp, `sp_bytes` the bytes that this rank received from its SP group. `roll` lists all
    ranks. `exchange`: see exchange.py.
    """

    def __init__(
        self,
        world: World,
        tp: int,
        sp: int,
        parallel: ParallelConfig,
        heart: Heart,
        alarm: Alarm | None = None,
        *,
        check_shapes: bool = False,
    ):
        self.world, self.tp, self.sp = world, tp, sp
        self.sp_rank, self.tp_rank = divmod(world.rank, tp)
        self.split = Split(tp, sp, self.tp_rank, self.sp_rank, parallel.layout)
        auto = "alltoall" if self.split.helix else "allgather"
        self.exchange = auto if sp == 1 or parallel.exchange == "auto" else parallel.exchange
        self.gathers = self.sp_bytes = 0
        self.roll, self._pulse = heart.roll, heart.pulse
        self._parallel, self._alarm, self._check_shapes = parallel, alarm, check_shapes
        self._groups = [dist.group.WORLD] if world.size > 1 else []
        ranks = torch.arange(world.size).view(sp, tp)
        self._sp_group = self._subgroup(ranks.T) if sp > 1 else None
        self._tp_group = self._subgroup(ranks) if tp > 1 else None

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
        if self._alarm is not None:
            self._alarm.step_timeout_s = self._parallel.step_timeout_s

    @property
    def where(self) -> str:
        """What this rank is doing, as the messages of a failure say it: start-up, prefill, step 7."""
        return self._pulse.where

    def mark(self, where: str) -> None:
        """Say what this rank does from here on."""
        self._pulse.where = where

    def gather_sp(self, t: Tensor) -> Tensor:
        """[*s] on every rank of the SP group -> [sp, *s] in order of sp_rank; any dtype. s and dtype are the same on all."""
        self.gathers += 1
        self.sp_bytes += (self.sp - 1) * t.nbytes
        return self._gather(t, self._sp_group, self.sp)

    def gather(self, t: Tensor, everyone: bool) -> Tensor:
        """[*s] on every rank (`everyone`), or of the TP group -> [ranks, *s] in order of rank; any dtype."""
        return self._gather(t, *self._among(everyone))

    def sum(self, t: Tensor, everyone: bool) -> Tensor:
        """The sum over every rank (`everyone`), or over the TP group, in place of t; the same bits on all of them."""
        return self._reduce(t, *self._among(everyone), dist.ReduceOp.SUM)

    def sum_sp(self, t: Tensor) -> Tensor:
        """The sum over the SP group, in place of t."""
        return self._reduce_sp(t, dist.ReduceOp.SUM)

    def largest_sp(self, t: Tensor) -> Tensor:
        """The element-wise maximum over the SP group, in place of t; over gloo a NaN may get lost."""
        return self._reduce_sp(t, dist.ReduceOp.MAX)

    def _reduce_sp(self, t: Tensor, op: dist.ReduceOp) -> Tensor:
        self.sp_bytes += 2 * (self.sp - 1) * t.nbytes // self.sp  # as a ring: parts are reduced, then gathered
        return self._reduce(t, self._sp_group, self.sp, op)

    def _reduce(self, t: Tensor, group: dist.ProcessGroup | None, size: int, op: dist.ReduceOp) -> Tensor:
        if size > 1:
            t = t.contiguous()
            self._prepare(t, group, size)
            dist.all_reduce(t, op=op, group=group)
        return t

    def swap_sp(self, t: Tensor) -> Tensor:
        """[sp, *s], t[i] for SP rank i -> [sp, *s], t[i] from SP rank i; any dtype."""
        if self.sp == 1:
            return t
        self.sp_bytes += (self.sp - 1) * t.nbytes // self.sp
        self._prepare(t, self._sp_group, self.sp)
        mine = as_bytes(t)
        out = torch.empty_like(mine)
        if mine.numel():
            dist.all_to_all_single(out, mine, group=self._sp_group)
        return out.view(t.dtype).view(t.shape)

    def _among(self, everyone: bool) -> tuple[dist.ProcessGroup | None, int]:
        return (dist.group.WORLD, self.world.size) if everyone else (self._tp_group, self.tp)

    def _gather(self, t: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
        if size == 1:
            return t.unsqueeze(0)
        self._prepare(t, group, size)
        mine = as_bytes(t)
        out = mine.new_empty(size * mine.numel())
        if mine.numel():
            dist.all_gather_single(out, mine, group=group)
        return out.view(t.dtype).view(size, *t.shape)

    def _prepare(self, t: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        """What comes before each collective on tensors. Those of a TP group are not counted where others go on without it."""
        self._pulse.exchanges += self.sp == 1 or group is not self._tp_group
        if self._check_shapes:
            described: list = [None] * size
            dist.all_gather_object(described, (tuple(t.shape), str(t.dtype)), group=group)
            if len(set(described)) > 1:
                raise RuntimeError(f"the ranks bring different tensors: {described}")

    def broadcast(self, obj):
        """A small python object of world rank 0, on every rank."""
        if self.world.size == 1:
            return obj
        self._pulse.exchanges += 1
        box = [obj]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def broadcast_tensor(self, t: Tensor) -> Tensor:
        """The CPU tensor of world rank 0, on every rank; same shape and dtype everywhere."""
        if self.world.size > 1:
            self._pulse.exchanges += 1
            dist.broadcast(t, src=0)
        return t

    def broadcast_checked(self, t: Tensor, digest: int) -> Tensor:
        """`broadcast_tensor` of int64 t [*s], which carries along a 64-bit digest of what must be the same on every rank.

        RuntimeError, on a rank whose digest is not rank 0's, that names the rank which most others disagree with.
        """
        self._pulse.history = digest
        if self.world.size == 1:
            return t
        word = digest - (digest >> 63 << 64)  # the same 64 bits as a signed integer
        sent = self.broadcast_tensor(torch.cat((torch.tensor([word]), t.flatten())))
        if sent[0].item() != word:
            odd = (self._alarm and self._alarm.who_differs()) or f"rank {self.world.rank} (host {self.world.host})"
            raise RuntimeError(f"{odd}: has other tokens or shapes than the others since {self.where}")
        return sent[1:].view(t.shape)

    def gather_objects(self, obj) -> list:
        """One small python object per world rank, on every rank."""
        gathered = [obj] * self.world.size
        if self.world.size > 1:
            self._pulse.exchanges += 1
            dist.all_gather_object(gathered, obj)
        return gathered

    def all_equal(self, digests: Tensor) -> bool:
        """True where int64 [n] is the same on all ranks (n must be): one all_reduce, because max(~d) is ~min(d)."""
        if self.world.size == 1:
            return True
        self._pulse.exchanges += 1
        both = torch.stack([digests, ~digests]).cpu()
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return torch.equal(both[0], ~both[1])

    def claim(self) -> bool | None:
        """This rank fails: whether it is the one to report, None if nobody can know. Then call `leave`, and exit without
        `close`."""
        return self._alarm is None or self._alarm.claim()

    def who_is_missing(self) -> str:
        """For a failure that only says that others went away: which, where and since when, or an empty text. Takes seconds."""
        return self._alarm.who_is_missing() if self._alarm else ""

    def leave(self, code: int, mine: bool | None) -> None:
        """End the job: every other rank exits with `code` within a second; `mine`: what `claim` said."""
        if self._alarm is not None:
            self._alarm.leave(code, mine)

    def close(self) -> None:
        """All ranks together, after a run that went well."""
        global _current
        if self._alarm is not None:
            self.gather_objects(None)  # nobody may still need the others, or the store that rank 0 serves
            self._alarm.stop()
        _current = None  # not before: what fails, or a signal that comes, until then is reported once for all ranks
        if self._alarm is not None:
            self._alarm = self._sp_group = self._tp_group = None
            self._groups.clear()  # gloo's threads end with their group, which must be before the interpreter does
            dist.destroy_process_group()


def as_bytes(t: Tensor) -> Tensor:
    """The content as uint8 [bytes]: gloo does not know every dtype."""
    return t.contiguous().view(-1).view(torch.uint8)


_current: Mesh | None = None


def current() -> Mesh | None:
    """The mesh of this process once `start` has returned: whoever handles a failure needs it."""
    return _current
