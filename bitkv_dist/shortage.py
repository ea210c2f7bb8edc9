"""Running out of memory, said so that a user can act: which tensor did not fit, how many bytes it takes, and what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# How torch's allocator for CPUs begins. Words inside a message would also catch one that reports another rank's shortage.
_CPU_ALLOCATOR = re.compile(r"(\[enforce fail at alloc_cpu|DefaultCPUAllocator|std::bad_alloc)")
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class OutOfMemory(MemoryError):
    """`tensor` of `size` bytes (None: the allocator did not say) could not be allocated."""

    def __init__(self, tensor: str, size: int | None, advice: str = "") -> None:
        self.tensor, self.size = tensor, size
        asked = "" if size is None else f" of {size / 1e6:,.1f} MB"
        super().__init__(f"no memory for {tensor}{asked}" + (f"; {advice}" if advice else ""))


@contextmanager
def needing(tensor: str) -> Iterator[None]:
    """Name what is being allocated, should there be no memory for it; the innermost name counts."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, OutOfMemory) or not is_shortage(error):
            raise
        raise OutOfMemory(tensor, asked_bytes(error)) from error


def is_shortage(error: BaseException) -> bool:
    """Whether an allocator raised it. On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_ALLOCATOR.match(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """What the allocator says was asked for."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else None


def advice(needed_bytes: int, room_bytes: int | None, ways: Sequence[str]) -> str:
    """What a rank needs beside its weights, what it had, and what would fit instead."""
    needs = f"the run needs {needed_bytes / 1e6:,.1f} MB here beside the weights"
    if room_bytes is not None:
        needs += f", {room_bytes / 1e6:,.1f} MB were free"
    if room_bytes is not None and needed_bytes <= room_bytes:
        return f"{needs} when it began, something else has taken them since; end that, or take a smaller cache"
    remedy = f"it would fit with {', or '.join(ways)}" if ways else "nothing smaller is known to fit, see bitkv plan"
    return f"{needs}; {remedy}"
