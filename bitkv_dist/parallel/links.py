"""How fast the ranks reach each other: between two of them, all together, and how far their clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from bitkv_dist.parallel.mesh import Mesh

WARM_UP, REPEATS = 3, 15
BULK_BYTES, BULK_REPEATS = 4 << 20, 3


def pairs(mesh: Mesh, payload_bytes: int) -> list[dict]:
    """For every pair of ranks {a, b, latency_us of the payload one way, gb_s of 4 MiB}; the same list on every rank.

    Disjoint pairs measure at the same time, so that it takes as many rounds as there are ranks.
    """
    found = []
    for table in tournament(mesh.world.size):
        mesh.gather_objects(None)  # nobody starts a round while others are in the one before
        mine = next((pair for pair in table if mesh.world.rank in pair), None)
        row = None
        if mine is not None:
            partner = sum(mine) - mesh.world.rank
            leads = mesh.world.rank == mine[0]
            small = _ping_pong(mesh, partner, leads, payload_bytes, REPEATS)
            bulk = _ping_pong(mesh, partner, leads, BULK_BYTES, BULK_REPEATS)
            if leads:
                row = {"a": mine[0], "b": mine[1], "latency_us": small * 1e6, "gb_s": BULK_BYTES / bulk / 1e9}
        found += [row for row in mesh.gather_objects(row) if row]
    return sorted(found, key=lambda row: (row["a"], row["b"]))


def tournament(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (a < b) in which each pair meets once: the circle method, one stays, the others move on."""
    places = list(range(ranks + ranks % 2))
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        table = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([tuple(sorted(pair)) for pair in table if max(pair) < ranks])  # whoever meets the extra place rests
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _ping_pong(mesh: Mesh, partner: int, leads: bool, size_bytes: int, repeats: int) -> float:
    """Seconds that `size_bytes` take one way: the median of half round trips."""
    buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=mesh.world.device)
    steps = (dist.send, dist.recv) if leads else (dist.recv, dist.send)

    def round_trip() -> None:
        for step in steps:
            step(buffer, partner)

    return _timed(round_trip, repeats, buffer.device) / 2


def collective_s(mesh: Mesh, call: Callable[[], object]) -> float:
    """Median seconds of a collective that all ranks call together; the slowest rank's."""
    mesh.gather_objects(None)
    return max(mesh.gather_objects(_timed(call, REPEATS, mesh.world.device)))


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    seconds = []
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[WARM_UP:])


def clock_skew_s(mesh: Mesh) -> list[float]:
    """Each rank's clock minus rank 0's, on every rank: from the quickest of some round trips, right to half of that."""
    if mesh.world.size == 1:
        return [0.0]
    skews = [0.0] * mesh.world.size
    clock = torch.zeros(1, dtype=torch.float64)
    for other in range(1, mesh.world.size):
        if mesh.world.rank == other:
            for _ in range(WARM_UP + REPEATS):
                dist.recv(clock, 0)
                clock[0] = time.time()
                dist.send(clock, 0)
        elif mesh.world.rank == 0:
            trips = []
            for _ in range(WARM_UP + REPEATS):
                asked = time.time()
                dist.send(clock, other)
                dist.recv(clock, other)
                answered = time.time()
                trips.append((answered - asked, clock.item() - (asked + answered) / 2))
            skews[other] = min(trips)[1]
    return mesh.broadcast(skews)
