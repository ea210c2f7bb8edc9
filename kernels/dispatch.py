"""Which kernels do the work: chosen once per process, visible in the report, overridable in tests. No silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bitkv_dist.kernels import cpu

REFERENCE = "reference"

_forced: str | None = None


def backend(device: torch.device) -> tuple[str, str]:
    """(name, why): "cpu-avx512", "cpu-avx2", "cpu-portable" or "reference"."""
    if _forced == REFERENCE:
        return REFERENCE, "asked for"
    if device.type != "cpu":
        return REFERENCE, f"plain torch: there are no compiled kernels for {device.type} yet"
    if cpu.load() is None:
        return REFERENCE, cpu.reason()
    return f"cpu-{cpu.choose(_forced)}", "asked for" if _forced else "the best instruction set of this machine"


def on_cpu(device: torch.device) -> bool:
    """Whether the C++ kernels serve tensors of this device."""
    return device.type == "cpu" and _forced != REFERENCE and cpu.load() is not None


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use `reference`, or the C++ kernels with one instruction set (`portable`, `avx2`, `avx512`), inside a with block."""
    global _forced
    before = _forced
    _forced = name
    if name != REFERENCE:
        cpu.choose(name)
    try:
        yield
    finally:
        _forced = before
        if cpu.load() is not None:
            cpu.choose(before if before != REFERENCE else None)
