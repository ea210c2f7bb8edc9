"""Sequence ranks as threads of this process: the engine's real code for any number of ranks, without starting processes.

`run(size, function, *args)` is called like `ranks.run_ranks`: `function(mesh, *args)` of every rank, results in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bitkv_dist.parallel.world import World


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


class SimulatedMesh:
    """The part of `Mesh` that an engine calls, for `size` sequence ranks."""

    tp, tp_rank, tp_mesh = 1, 0, None

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.sp, self.sp_rank = meeting.size, rank
        self.world = World(rank, meeting.size, rank, meeting.size, "here", "python", "threads", torch.device("cpu"), 1)
        self.gathers = 0

    def gather_sp(self, t: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        tensors = self.gather_objects(t.clone())
        described = {(tuple(other.shape), other.dtype) for other in tensors}
        assert len(described) == 1, f"the ranks bring different tensors: {described}"
        return torch.stack(tensors)

    def gather_objects(self, thing: Any) -> list[Any]:
        return self._meeting.exchange(self.sp_rank, thing)

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


def run(size: int, function: Callable, *args: Any) -> list[Any]:
    """The first failure of a rank is raised; the others are released from what they wait for."""
    meeting = _Meeting(size)

    def rank_main(rank: int) -> Any:
        try:
            return function(SimulatedMesh(meeting, rank), *args)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    failures = [future.exception() for future in futures if future.exception()]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure
    return [future.result() for future in futures]
