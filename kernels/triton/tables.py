"""How each kernel is launched on each architecture: a fixed table, never a choice by timing at run time.

One warp per program is what the decode kernels want: its softmax needs no exchange between warps, its tiles are those of one
tensor-core instruction, and latency is hidden by many programs per multiprocessor (12 at 168 registers) and by copies to
shared memory that run ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from bitkv_dist.kernels.triton.planes import GCN, PLAIN, PTX


class WordTile(NamedTuple):
    """What a program of `words` takes at once: so many tokens, in so many warps, their words in so many parts, one after
    another."""

    tokens: int
    warps: int
    parts: int


@dataclass(frozen=True)
class Config:
    """columns: of a tensor-core tile, at least; lanes: threads of a warp; assembly: see planes.py; stages: pages in flight;
    precision: of products of fp32 numbers on tensor cores; most_warps: of a program that multiplies tiles of eight columns;
    words: of tokens of up to 8 words, and of up to 16."""

    columns: int
    lanes: int
    assembly: int
    stages: int
    precision: str
    most_registers: int | None = None
    exact_warps: int = 4
    most_warps: int = 8
    words: tuple[WordTile, WordTile] = (WordTile(32, 1, 2), WordTile(16, 1, 4))

    def heads_at_once(self, dim: int) -> int:
        """Query heads of a program of `decode`: their scores and outputs fill the registers of one warp."""
        return self.lanes // 8 if dim <= 128 else self.lanes // 16

    def registers(self) -> dict[str, int]:
        """The launch option that gives a program what it asks for: left alone, the compiler spills a few of them to fit one
        more program beside it."""
        return {} if self.most_registers is None else {"maxnreg": self.most_registers}

    def scan_heads_at_once(self, dim: int) -> int:
        """Query heads of a program of `scan`: their codes fill the registers of one warp."""
        return self.lanes // 2 if dim < 256 else self.lanes // 4

    def select_warps(self, heads: int, lists: int) -> int:
        return max(1, heads // 4, lists // 2)

    def word_tile(self, groups: int) -> WordTile:
        """groups: words of a token, at most 16."""
        return self.words[groups > 8]

    def refine_heads_at_once(self, dim: int) -> int:
        return self.columns if dim <= 128 else self.columns // 2

    def refine_warps(self, tokens: int, dim: int, heads: int) -> int:
        """tokens: room for a granule's refined ones; heads of a program, whose outputs fill the registers."""
        rows = max(128, triton.next_power_of_2(dim))
        wanted = max(rows // (4 * self.lanes), tokens // 32 * rows * heads // (16 * self.lanes))
        return min(self.most_warps, max(1, wanted))


NVIDIA = Config(columns=8, lanes=32, assembly=PTX.value, stages=3, precision="tf32x3", most_registers=255)
# From four warps on, Triton 3.9 takes tcgen05.mma, which has no tile of eight columns, and fails.
BLACKWELL = replace(NVIDIA, most_warps=2)
AMD = Config(columns=16, lanes=64, assembly=GCN.value, stages=2, precision="ieee",
             words=(WordTile(64, 2, 1), WordTile(64, 2, 2)))  # fmt: skip
INTERPRETER = Config(columns=8, lanes=32, assembly=PLAIN.value, stages=1, precision="ieee",
                     words=(WordTile(64, 1, 1), WordTile(64, 1, 2)))  # fmt: skip

ARCHITECTURES: dict[str, Config] = {
    "sm_80": NVIDIA,
    "sm_90": NVIDIA,
    "sm_100": BLACKWELL,
    "gfx942": AMD,
    "interpreter": INTERPRETER,
}


_forced: str | None = None


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Configure for this architecture inside a with block, whatever the device: kernels are then compiled, not run."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def config(device: torch.device) -> Config:
    return ARCHITECTURES[_forced or architecture(device)]


@functools.cache
def architecture(device: torch.device) -> str:
    """The key of ARCHITECTURES for a device; a later NVIDIA or AMD generation takes the newest that is listed."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8:
        raise ValueError(
            f"device {device}: compute capability {major}.x is below 8.0, which int8 tensor cores need; use --device cpu"
        )
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100")
