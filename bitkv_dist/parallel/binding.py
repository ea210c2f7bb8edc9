"""Which cores a rank runs on: its own part of the host's, or those near its GPU. Threads that move between sockets lose their
memory, and ranks that share a core wait for each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from bitkv_dist.parallel.world import Place

CPUS, PCI = Path("/sys/devices/system/cpu"), Path("/sys/bus/pci/devices")


def bind(place: Place, device: torch.device, threads: int) -> set[int] | None:
    """Bind this process, all its threads, and those to come. The cores; None where nothing was changed (see `choose`)."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    try:
        bound_already = allowed != os.sched_getaffinity(os.getppid())
    except OSError:
        bound_already = True
    near = cores_near(device) if device.type == "cuda" else None
    cores = None if bound_already else choose(place, allowed, near, threads)
    if cores:
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # one that has ended meanwhile
                os.sched_setaffinity(thread, cores)
    return cores


def choose(
    place: Place, allowed: set[int], near: set[int] | None, threads: int, position: Callable[[int], tuple] | None = None
) -> set[int] | None:
    """The cores of a rank that may use `allowed`, as all ranks of its host may. near: to its GPU.

    None where it is alone, where there are fewer cores than ranks, or than it was told to have threads. position: by which
    cores are ordered before they are dealt out.
    """
    if place.local_size == 1:
        return None
    if near is not None:
        return near & allowed or None
    each = len(allowed) // place.local_size
    if each < max(1, threads):
        return None
    ordered = sorted(allowed, key=position or position_of)
    return set(ordered[place.local_rank * each : (place.local_rank + 1) * each])


def position_of(cpu: int) -> tuple[int, int, int]:
    """(socket, core, cpu): threads of one core are neighbours, and so are cores of one socket."""
    topology = CPUS / f"cpu{cpu}" / "topology"
    try:
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return (0, cpu, cpu)
    return (socket, core, cpu)


def cores_near(device: torch.device) -> set[int] | None:
    """Those of the NUMA node that a GPU is attached to; None where the system does not say."""
    gpu = torch.cuda.get_device_properties(device)
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        return parsed((PCI / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return None


def parsed(cores: str) -> set[int]:
    """0-3,8 -> 0, 1, 2, 3, 8"""
    found: set[int] = set()
    for part in filter(None, cores.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def listed(cores: Iterable[int]) -> str:
    """0, 1, 2, 3, 8 -> 0-3,8"""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
