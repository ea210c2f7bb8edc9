"""How much memory is free here, and what fits into it: which prefill, as `auto` asks before a prompt is read, and what else
after a run for which there was none."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bitkv_dist.cache_config import LANES
from bitkv_dist.config import build
from bitkv_dist.plan.grids import largest_context
from bitkv_dist.plan.memory import Job, every_rank

MEMORY_INFO = Path("/proc/meminfo")
SMALLER_PRESETS = ("4bit", "2bit", "1bit")


def free_bytes(device: torch.device, ranks_on_host: int) -> int | None:
    """What this rank can still allocate: a GPU's free memory, or its part of the host's; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not MEMORY_INFO.exists():
        return None
    free = _kilobytes(MEMORY_INFO, "MemAvailable:") * 1024 // ranks_on_host
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # of the process's addresses, as `ulimit -v` sets it
    if limit == resource.RLIM_INFINITY:
        return free
    return max(0, min(free, limit - _kilobytes(Path("/proc/self/status"), "VmSize:") * 1024))


def _kilobytes(file: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(field))


def fitting_prefill(job: Job, tp: int, sp: int, free: list[int | None]) -> str:
    """exact if every rank has room for it beside its weights, which are loaded; else packed. free: of each world rank."""
    needs = [rank.total - rank.weights for rank in every_rank(job, tp, sp) for _ in range(tp)]
    fits = (room is None or need <= room for need, room in zip(needs, free, strict=True))
    return "exact" if all(fits) else "packed"


def needed_bytes(job: Job, tp: int, sp: int) -> int:
    """What the fullest rank allocates beside its weights."""
    return max(rank.total - rank.weights for rank in every_rank(job, tp, sp))


def ways_out(job: Job, tp: int, sp: int, room_bytes: int) -> list[str]:
    """What would fit into so many bytes beside a rank's weights, in place of a job that does not: flags, or a shorter text."""
    return list(_ways_out(job, tp, sp, room_bytes))


def _ways_out(job: Job, tp: int, sp: int, room_bytes: int) -> Iterator[str]:
    def fits(other: Job, ranks: int = sp) -> bool:
        return needed_bytes(other, tp, ranks) <= room_bytes

    packed = replace(job, prefill="packed")
    if job.prefill != "packed" and fits(packed):
        yield "--prefill packed"
    for name in SMALLER_PRESETS:
        smaller = replace(packed, config=build(name, {}).cache)
        if smaller.page_bytes.stored < job.page_bytes.stored and fits(smaller):
            exact = fits(replace(smaller, prefill=job.prefill))
            yield f"--config {name}" + ("" if exact else " --prefill packed")
            break
    ranks = 2 * sp
    while ranks <= LANES and not fits(job, ranks):
        ranks *= 2
    if ranks <= LANES:
        yield f"{ranks} sequence ranks with as much memory each"
    if tokens := largest_context(lambda tokens: fits(replace(job, context=tokens))):
        yield f"a context of at most {tokens:,} tokens"
