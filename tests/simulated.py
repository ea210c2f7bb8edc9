"""Ranks as threads of this process: the engine's real code for any grid, without starting processes.

`run(size, function, *args, tp=, layout=)` is called like `ranks.run_ranks`: `function(mesh, *args)` of every rank, results in
rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bitkv_dist.parallel.world import World
from bitkv_dist.split import Split


class _Meeting:
    """Where the ranks leave what they bring to a collective."""

    def __init__(self, size: int) -> None:
        self.size, self.brought = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self.brought[rank] = thing
        self.barrier.wait()
        everything = list(self.brought)
        self.barrier.wait()  # nobody brings the next thing before all have taken these
        return everything


class _Meetings:
    """Of all ranks, of each TP group by its sp_rank, of each SP group by its tp_rank."""

    def __init__(self, size: int, tp: int) -> None:
        self.size, self.world = size, _Meeting(size)
        self.tp, self.sp = [_Meeting(tp) for _ in range(size // tp)], [_Meeting(size // tp) for _ in range(tp)]

    def abort(self) -> None:
        for meeting in (self.world, *self.tp, *self.sp):
            meeting.barrier.abort()


def alike(tensors: list[torch.Tensor]) -> torch.Tensor:
    described = {(tuple(t.shape), t.dtype) for t in tensors}
    assert len(described) == 1, f"the ranks bring different tensors: {described}"
    return torch.stack(tensors)


class SimulatedMesh:
    """The part of `Mesh` that an engine and a sharded model call."""

    def __init__(self, meetings: _Meetings, rank: int, tp: int, layout: str, exchange: str | None) -> None:
        self.tp, self.sp = tp, meetings.size // tp
        self.sp_rank, self.tp_rank = divmod(rank, tp)
        self._world, self._tp, self._sp = meetings.world, meetings.tp[self.sp_rank], meetings.sp[self.tp_rank]
        self.split = Split(self.tp, self.sp, self.tp_rank, self.sp_rank, layout)
        self.world = World(rank, self.tp * self.sp, rank, meetings.size, "here", "python", "threads", torch.device("cpu"), 1)
        self.gathers = self.sp_bytes = 0
        self.exchange = exchange or ("alltoall" if self.split.helix else "allgather")

    def gather_sp(self, t: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        self.sp_bytes += (self.sp - 1) * t.nbytes
        return alike(self._sp.exchange(self.sp_rank, t.clone()))

    def gather(self, t: torch.Tensor, everyone: bool) -> torch.Tensor:
        return alike(self.gather_objects(t.clone()) if everyone else self._tp.exchange(self.tp_rank, t.clone()))

    def sum(self, t: torch.Tensor, everyone: bool) -> torch.Tensor:
        return self.gather(t, everyone).sum(0)

    def sum_sp(self, t: torch.Tensor) -> torch.Tensor:
        return alike(self._sp.exchange(self.sp_rank, t.clone())).sum(0)

    def largest_sp(self, t: torch.Tensor) -> torch.Tensor:
        return alike(self._sp.exchange(self.sp_rank, t.clone())).amax(0)

    def swap_sp(self, t: torch.Tensor) -> torch.Tensor:
        self.sp_bytes += (self.sp - 1) * t.nbytes // self.sp
        return alike(self._sp.exchange(self.sp_rank, t.clone()))[:, self.sp_rank]

    def gather_objects(self, thing: Any) -> list[Any]:
        return self._world.exchange(self.world.rank, thing)

    def broadcast(self, thing: Any) -> Any:
        return self.gather_objects(thing)[0]

    def broadcast_tensor(self, t: torch.Tensor) -> torch.Tensor:
        return t.copy_(self.gather_objects(t.clone())[0])

    def broadcast_checked(self, t: torch.Tensor, digest: int) -> torch.Tensor:
        assert len(set(self.gather_objects(digest))) == 1, "the ranks were fed different tokens"
        return self.broadcast_tensor(t)

    def mark(self, where: str) -> None:
        pass

    def all_equal(self, digests: torch.Tensor) -> bool:
        return all(torch.equal(digests, other) for other in self.gather_objects(digests.clone()))


def run(
    size: int, function: Callable, *args: Any, tp: int = 1, layout: str = "replicated", exchange: str | None = None
) -> list[Any]:
    """The first failure of a rank is raised; the others are released from what they wait for."""
    meetings = _Meetings(size, tp)

    def rank_main(rank: int) -> Any:
        try:
            return function(SimulatedMesh(meetings, rank, tp, layout, exchange), *args)
        except BaseException:
            meetings.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    failures = [future.exception() for future in futures if future.exception()]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure
    return [future.result() for future in futures]
