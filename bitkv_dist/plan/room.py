"""How much memory is free here, and which prefill fits into it: what `prefill: auto` asks before a prompt is read."""

from __future__ import annotations

from pathlib import Path

import torch

from bitkv_dist.plan.memory import Job, every_rank

MEMORY_INFO = Path("/proc/meminfo")


def free_bytes(device: torch.device, ranks_on_host: int) -> int | None:
    """What this rank can still allocate: a GPU's free memory, or its part of the host's; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not MEMORY_INFO.exists():
        return None
    line = next(line for line in MEMORY_INFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024 // ranks_on_host


def fitting_prefill(job: Job, tp: int, sp: int, free: list[int | None]) -> str:
    """exact if every rank has room for it beside its weights, which are loaded; else packed. free: of each world rank."""
    needs = [rank.total - rank.weights for rank in every_rank(job, tp, sp) for _ in range(tp)]
    fits = (room is None or need <= room for need, room in zip(needs, free, strict=True))
    return "exact" if all(fits) else "packed"
