"""Which kernels do the work: chosen once per process, visible in the report, overridable in tests. No silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bitkv_dist.kernels import cpu

REFERENCE = "reference"

_forced: str | None = None  # by `forced`
_asked: str | None = None  # by `use`


def backend(device: torch.device) -> tuple[str, str]:
    """(name, why): "cpu-" and the instruction set, or "reference"."""
    if _forced == REFERENCE:
        return REFERENCE, "asked for"
    if device.type != "cpu":
        return REFERENCE, f"plain torch: there are no compiled kernels for {device.type} yet"
    if cpu.load() is None:
        return REFERENCE, cpu.reason()
    wanted = _forced or _asked
    return f"cpu-{cpu.choose(wanted)}", "asked for" if wanted else "the best instruction set of this machine"


def on_cpu(device: torch.device) -> bool:
    """Whether the C++ kernels serve tensors of this device."""
    return device.type == "cpu" and _forced != REFERENCE and cpu.load() is not None


def use(isa: str) -> None:
    """The C++ kernels run with this instruction set from now on; `auto` = the machine's best. ValueError if it lacks it."""
    global _asked
    if isa != "auto" and cpu.load() is None:
        raise ValueError(f"cpu_isa {isa}: {cpu.reason()}; or leave it at auto")
    _asked = None if isa == "auto" else isa
    if cpu.load() is not None and _forced is None:
        cpu.choose(_asked)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use `reference`, or the C++ kernels with one instruction set (a name in `cpu.ISAS`), inside a with block."""
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
            cpu.choose(_asked if before in (None, REFERENCE) else before)
