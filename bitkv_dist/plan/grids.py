"""Every TP x SP grid of a number of GPUs, with its memory and time; the best of them, and what other caches would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bitkv_dist.cache_config import LANES
from bitkv_dist.plan.latency import StepMs, pays_above, step_ms
from bitkv_dist.plan.machines import Machine
from bitkv_dist.plan.memory import Job, RankBytes, dense_page, gathered_heads, rank_bytes
from bitkv_dist.split import check_tp, tp_choices

MOST_TOKENS = 1 << 36  # where the search for the largest context ends
BASELINES = {"bf16": 2, "fp8": 1}  # bytes per element


@dataclass(frozen=True)
class Grid:
    """One way to split a job. `max_context`: the most tokens per sequence that fit, 0 if not even one does."""

    tp: int
    sp: int
    prefill: str
    bytes: RankBytes
    headroom_bytes: int
    max_context: int
    ms: StepMs
    sharding_pays_above_tokens: int | None

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def ranks(self) -> dict[str, int]:
        return {"tp": self.tp, "sp": self.sp}

    def as_dict(self) -> dict[str, Any]:
        parts = asdict(self.bytes) | {"total": self.bytes.total}
        times = asdict(self.ms) | {"total": self.ms.total}
        return self.ranks | {
            "prefill": self.prefill,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "max_context": self.max_context,
            "bytes_per_rank": parts,
            "ms_per_token": times,
            "sharding_pays_above_tokens": self.sharding_pays_above_tokens,
        }


@dataclass(frozen=True)
class Plan:
    """All grids of a job, the best one, the chosen one (the best if none was asked for), and the chosen one with other caches.

    `others`: the job with these caches.
    """

    job: Job
    machine: Machine
    grids: list[Grid]
    best: Grid
    chosen: Grid
    others: dict[str, Job]
    baselines: dict[str, Grid]


def plan(job: Job, machine: Machine, tp: int | None = None, sp: int | None = None) -> Plan:
    """tp, sp: the grid to look at; one of them alone leaves the other to the number of GPUs. ValueError if it is impossible, or
    cannot read the prompt exactly as it is told to."""
    choices = grid_choices(job, machine)
    asked = asked_grid(job, machine, tp, sp)
    grids = [grid(job, machine, *choice) for choice in choices]
    best = best_grid(grids)
    chosen = next((found for found in grids if (found.tp, found.sp) == asked), best)
    if chosen.prefill == "exact":
        gathered_heads(job, chosen.tp, chosen.sp)
    others = {name: replace(job, page=dense_page(job, size)) for name, size in BASELINES.items()}
    baselines = {name: grid(other, machine, chosen.tp, chosen.sp) for name, other in others.items()}
    return Plan(job, machine, grids, best, chosen, others, baselines)


def grid_choices(job: Job, machine: Machine) -> list[tuple[int, int]]:
    """All (tp, sp) with tp x sp = the GPUs, tp inside a node."""
    served = tp_choices(job.shape.heads, job.shape.kv_heads)
    if job.config.codec == "tailored":  # one scale for all KV heads
        served = [1]
    sizes = [tp for tp in served if machine.gpus % tp == 0 and tp <= machine.node_size]
    found = [(tp, machine.gpus // tp) for tp in sizes if machine.gpus // tp <= LANES]
    if not found:
        most = f"{LANES * max(sizes)}, tp {max(sizes)} x sp {LANES}"
        raise ValueError(f"gpus {machine.gpus}: {job.shape.name} can use at most {most}; take fewer")
    return found


def asked_grid(job: Job, machine: Machine, tp: int | None, sp: int | None) -> tuple[int, int] | None:
    """The grid that --tp and --sp name, completed and checked; None where neither is given."""
    if tp is None and sp is None:
        return None
    if tp is None:
        tp = machine.gpus // sp if machine.gpus % sp == 0 else 1
    check_tp(job.shape.name, tp, job.shape.heads, job.shape.kv_heads, machine.gpus)
    sp = sp or max(1, machine.gpus // tp)
    if tp * sp != machine.gpus:
        rule = f"the product must be the number of GPUs, {machine.gpus}"
        raise ValueError(f"tp {tp} x sp {sp}: {rule}; take --gpus {tp * sp} or another grid")
    if tp > machine.node_size:
        raise ValueError(f"tp {tp}: must fit into a node of {machine.node_size} GPUs; take at most so many, or set --node-size")
    if sp > LANES:
        raise ValueError(f"sp {sp}: 1 to {LANES} sequence ranks are served; use more tensor-parallel ranks instead")
    return tp, sp


def grid(job: Job, machine: Machine, tp: int, sp: int) -> Grid:
    """Memory and time of one grid. Where a sequence has one rank, sharding is weighed with two."""
    memory = machine.gpu.memory_bytes

    def bytes_at(tokens: int) -> tuple[str, RankBytes]:
        longer = replace(job, context=tokens)
        prefill = choose_prefill(longer, memory, tp, sp)
        return prefill, rank_bytes(replace(longer, prefill=prefill), tp, sp)

    prefill, found = bytes_at(job.context)
    largest = largest_context(lambda tokens: bytes_at(tokens)[1].total <= memory)
    pays = pays_above(job, machine, tp, max(sp, 2))
    return Grid(tp, sp, prefill, found, memory - found.total, largest, step_ms(job, machine, tp, sp), pays)


def choose_prefill(job: Job, memory_bytes: int, tp: int, sp: int) -> str:
    """What `auto` means: exact where it fits, else packed."""
    if job.prefill != "auto":
        return job.prefill
    try:
        gathered_heads(job, tp, sp)
    except ValueError:
        return "packed"
    return "exact" if rank_bytes(replace(job, prefill="exact"), tp, sp).total <= memory_bytes else "packed"


def best_grid(grids: list[Grid]) -> Grid:
    """The fastest that fits; if none does, the one that comes nearest to it."""
    fitting = [found for found in grids if found.fits]
    return min(fitting, key=lambda found: found.ms.total) if fitting else max(grids, key=lambda found: found.headroom_bytes)


def largest_context(fits: Callable[[int], bool]) -> int:
    """The most tokens for which `fits` holds; it does for all fewer."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
