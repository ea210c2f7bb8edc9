"""How fast this machine reads memory: the ceiling that benchmarks on a CPU state beside their times."""

from __future__ import annotations

import time

import torch

from bitkv_dist.kernels import cpu


def stream_gb_s() -> float:
    """Streaming read rate of torch's threads: a sum over a tensor far larger than the cache, best of seven; in huge pages, as
    the packed cache is."""
    data = cpu.advise_huge_pages(torch.empty(1 << 28, dtype=torch.int8)).fill_(1).view(torch.int64)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.numel() * 8 / min(times) / 1e9
