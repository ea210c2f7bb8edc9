"""Which kernels do the work: chosen once per process, visible in the report, overridable in tests. No silent fallback."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from bitkv_dist.kernels import cpu

REFERENCE, TRITON = "reference", "triton"

_forced: str | None = None  # by `forced`
_asked: str | None = None  # by `use`


def backend(device: torch.device) -> tuple[str, str]:
    """(name, why): "triton", "cpu-" and the instruction set, or "reference"."""
    asked = "asked for"
    if _forced == REFERENCE:
        return REFERENCE, asked
    if _forced == TRITON:
        return TRITON, f"{asked}, {_target(device)}"
    if device.type == "cuda":
        if not _has_triton():
            return REFERENCE, "the package triton is not installed: pip install triton"
        return TRITON, f"the kernels for GPUs, {_target(device)}"
    if device.type != "cpu":
        return REFERENCE, f"plain torch: there are no compiled kernels for {device.type}"
    if cpu.load() is None:
        return REFERENCE, cpu.reason()
    wanted = _forced or _asked
    return f"cpu-{cpu.choose(wanted)}", asked if wanted else "the best instruction set of this machine"


def native(device: torch.device) -> ModuleType | None:
    """The module whose kernels serve tensors of this device, `kernels.triton` or `kernels.cpu`; None: plain torch does.

    Both modules offer the same functions with the same signatures.
    """
    if _forced == REFERENCE:
        return None
    if _forced == TRITON or (device.type == "cuda" and _has_triton()):
        from bitkv_dist.kernels import triton

        return triton
    return cpu if device.type == "cpu" and cpu.load() is not None else None


def on_cpu(device: torch.device) -> bool:
    """Whether the C++ kernels serve tensors of this device."""
    return native(device) is cpu


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _target(device: torch.device) -> str:
    """What Triton compiles for: ranks that share a sequence must have the same."""
    if device.type != "cuda":
        return "Triton's interpreter"
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"


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
    """Use `reference`, `triton`, or the C++ kernels with one instruction set (a name in `cpu.ISAS`) in a with block.

    Without a GPU `triton` runs in Triton's interpreter, slowly: TRITON_INTERPRET=1 must stand in the environment.
    """
    global _forced
    if name == TRITON and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("kernels triton: there is no GPU; set TRITON_INTERPRET=1 to run them in Triton's interpreter")
    before = _forced
    _forced = name
    if name in cpu.ISAS:
        cpu.choose(name)
    try:
        yield
    finally:
        _forced = before
        if cpu.load() is not None:
            cpu.choose(before if before in cpu.ISAS else _asked)
