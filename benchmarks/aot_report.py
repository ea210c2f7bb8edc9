"""What the compilers make of the Triton kernels, without a GPU, and what limits them.

Every kernel and variant is compiled for sm_80, sm_90, sm_100 and gfx942 as the host code would launch it. Registers, spills,
shared memory, widths of loads and instruction counts are facts; which of memory and instructions limits a kernel is a
prediction from them. Exits 1 when a kernel spills, or when `decode` or `scan` loads code planes narrower than 64 bits or does
without tensor cores.

    python benchmarks/aot_report.py --json aot.json
    python benchmarks/aot_report.py --arch sm_90 --dim 128 --kernel decode
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined: here they are compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton as language
from aot_machine import TARGETS, Code, compiling, tensor_core

from bitkv_dist.codec.planes import page_layout
from bitkv_dist.config import CacheConfig
from bitkv_dist.kernels import triton
from bitkv_dist.kernels.triton import tables

DIMS = (64, 80, 96, 128, 192, 256)
BITS = (1, 2, 3, 4)
HEADS, GROUP, PAGE_TOKENS, GRANULE_TOKENS = 8, 4, 128, 512
SHARE = 0.05
COLUMNS = {
    "kernel": 12, "depth": 5, "D": 3, "G": 2, "arch": 6, "warps": 5, "regs": 4, "spills": 6, "shared": 6, "load_bits": 9,
    "mma": 3, "instr": 5, "limit": 12, "share": 5,
}  # fmt: skip
LEFT = ("kernel", "depth", "arch", "limit")
PLANE_LOADS = ("load_planes", "load_low", "load_scanned")
NARROWEST_BITS = 64


@dataclass(frozen=True)
class Device:
    """issue_lanes: instructions that all multiprocessors start per cycle, times the threads of a warp."""

    name: str
    issue_lanes: int
    clock_ghz: float
    memory_gb_s: float


DEVICES = {
    "sm_80": Device("A100 SXM 80 GB", 108 * 128, 1.41, 2039),
    "sm_90": Device("H100 SXM", 132 * 128, 1.83, 3350),
    "sm_100": Device("B200", 148 * 128, 1.85, 7700),
    "gfx942": Device("MI300X", 304 * 64, 2.10, 5300),
}


@dataclass(frozen=True)
class Shape:
    """A cache to compile for: stored and scanned bits of keys and values, head dim, query heads of a KV head."""

    bits: int
    scan_bits: int
    dim: int
    group: int = GROUP

    @property
    def tiered(self) -> bool:
        return self.scan_bits < self.bits

    def config(self) -> CacheConfig:
        scan = self.scan_bits if self.tiered else None
        return CacheConfig(key_bits=self.bits, value_bits=self.bits, scan_bits=scan, page_tokens=PAGE_TOKENS)

    def layout(self) -> triton.Layout:
        fields = page_layout(self.config(), self.dim)
        offsets = [
            tuple(fields.fields[side + name].offset if side + name in fields.fields else 0 for side in "KV")
            for name in ("planes", "scan", "full", "low", "centroid")
        ]
        both = (self.bits,) * 2, (self.scan_bits,) * 2
        return triton.Layout(PAGE_TOKENS, self.dim, HEADS, GRANULE_TOKENS // PAGE_TOKENS, fields.bytes, *both, *offsets)

    def read_bytes(self, kernel: str) -> float:
        """Bytes that a kernel reads per stored element that it consumes, scales and centroids included."""
        page = PAGE_TOKENS * self.dim
        side = self.scan_bits / 8 + 2 / self.dim + 2 / PAGE_TOKENS
        if kernel == "scan":
            return self.scan_bits / 8 + 2 / PAGE_TOKENS + 2 * self.group * PAGE_TOKENS / page
        if kernel == "tail":
            return (side + 2 / self.dim + 2 * self.group / self.dim) / 2 + self.scan_bits / 16
        return self.bits / 8 + 2 / self.dim if kernel == "refine" else side


def shapes(dims: tuple[int, ...]) -> Iterator[Shape]:
    for dim in dims:
        yield from (Shape(bits, bits, dim) for bits in BITS)
        yield from (Shape(bits, scan, dim) for bits, scan in ((4, 1), (4, 2), (2, 1)))
    if 128 in dims:
        yield from (Shape(1, 1, 128, group) for group in (1, 2, 8, 16))


def launch(shape: Shape) -> None:
    """Everything that a decode step of this cache launches, and the encoding of a page."""
    layout, lanes = shape.layout(), 256
    heads = (1, HEADS, 1, shape.group)
    query = triton.Query(
        torch.zeros(*heads, shape.dim, dtype=torch.int8), torch.zeros(heads), torch.zeros(heads), torch.zeros(*heads, shape.dim)
    )
    bounds = torch.zeros(1, lanes, 2, dtype=torch.int32)
    table = triton.Table(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, 2 * lanes, dtype=torch.int64), bounds)
    rule = triton.Refinement(shape.tiered, True, 1, SHARE, 0.1, 0.1)
    triton.attend_lanes(layout, query, table, rule)


def launch_others(dim: int) -> None:
    """What does not depend on the depth: the window and the tree."""
    for dtype in (torch.bfloat16, torch.float32):
        triton.attend_exact(
            torch.zeros(HEADS, 1, GROUP, dim), torch.zeros(2, HEADS, 384, dim, dtype=dtype), torch.zeros((), dtype=torch.int64)
        )
    part = torch.zeros(512, HEADS, 1, GROUP), torch.zeros(512, HEADS, 1, GROUP), torch.zeros(512, HEADS, 1, GROUP, dim)
    triton.tree(*part, torch.arange(512), 256, 1)


def launch_encode(shape: Shape) -> None:
    x, signs = torch.zeros(1, HEADS, PAGE_TOKENS, shape.dim), torch.ones(HEADS, shape.dim)
    triton.encode(shape.layout(), x, x, signs, signs, False)


def name_of(code: Code, shape: Shape) -> str:
    """`decode` of the scanned dots of a tiered cache, which reads values only, is reported as `tail`."""
    return "tail" if code.name == "decode" and shape.tiered else code.name


def elements_of(kernel: str, shape: Shape) -> int | None:
    """Stored elements that an iteration of the kernel's loop consumes, or a whole program that has none; None: not defined."""
    page = PAGE_TOKENS * shape.dim
    refined = max(32, language.next_power_of_2(round(SHARE * GRANULE_TOKENS)))
    return {"decode": 2 * page, "scan": page, "tail": page, "refine": 2 * refined * shape.dim}.get(kernel)


def programs_of(kernel: str, arch: str, shape: Shape) -> int:
    """How many programs read the same elements, each for some of the query heads."""
    heads = language.next_power_of_2(shape.group)
    return max(1, heads // tables.ARCHITECTURES[arch].heads_at_once(shape.dim)) if kernel in ("decode", "tail") else 1


def row_of(code: Code, kernel: str, shape: Shape) -> dict:
    body = code.main_loop() or code.instructions
    elements = elements_of(kernel, shape)
    per_element = code.threads * len(body) * programs_of(kernel, code.arch, shape) / elements if elements else None
    widths = [bits for source, bits in code.loads if source in PLANE_LOADS] or [
        max((bits for _, bits in code.loads), default=0)
    ]
    row = {
        "kernel": kernel, "bits": shape.bits, "scan_bits": shape.scan_bits, "D": shape.dim, "G": shape.group, "arch": code.arch,
        "warps": code.warps, "regs": code.regs, "spills": code.spills, "shared": code.shared, "load_bits": min(widths),
        "mma": tensor_core(body) or tensor_core(code.instructions), "instr_per_element": per_element, "limit": None,
    }  # fmt: skip
    if per_element is not None:
        device = DEVICES[code.arch]
        memory = shape.read_bytes(kernel) / device.memory_gb_s
        instructions = per_element / (device.issue_lanes * device.clock_ghz)
        row |= {
            "limit": "memory" if memory >= instructions else "instructions",
            "bandwidth_share": min(1.0, memory / instructions),
        }
    return row


def faults(row: dict) -> list[str]:
    found = [f"spills {row['spills']}"] if row["spills"] else []
    if row["kernel"] in ("decode", "scan"):
        if row["load_bits"] < NARROWEST_BITS:
            found.append(f"loads code planes {row['load_bits']} bits wide, at least {NARROWEST_BITS} are wanted")
        if not row["mma"]:
            found.append("has no tensor-core instruction")
    return found


def compile_rows(arches: list[str], dims: tuple[int, ...], kernels: list[str] | None) -> Iterator[dict]:
    """The rows of the report; `kernels` None: of all."""
    for arch in arches:
        known: set[str] = set()
        for shape in shapes(dims):
            jobs = [lambda shape=shape: launch(shape)]
            jobs += [lambda shape=shape: launch_encode(shape)] * (shape.group == GROUP)
            jobs += [lambda dim=shape.dim: launch_others(dim)] * (shape == Shape(1, 1, shape.dim))
            if kernels is not None:
                jobs = [jobs[0]] if set(kernels) <= {"decode", "scan", "select", "tail", "refine"} else jobs
                if shape.tiered and set(kernels) <= {"decode"}:
                    continue
            for job in jobs:
                with tables.forced(arch), compiling(arch, known) as found:
                    job()
                for code in found:
                    kernel = name_of(code, shape)
                    if kernels is None or kernel in kernels:
                        yield row_of(code, kernel, shape)


def line(row: dict) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    row = row | {"depth": f"{row['bits']}/{row['scan_bits']}", "share": number(row.get("bandwidth_share"))}
    row |= {"instr": number(row["instr_per_element"]), "limit": row["limit"] or "-"}
    return "  ".join(f"{row[name]!s:{'<' if name in LEFT else '>'}{width}}" for name, width in COLUMNS.items())


def versions() -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    return {"triton": language.__version__, "torch": torch.__version__, "commit": commit, "machine": platform.machine()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=list(TARGETS), help="only this target (may be repeated)")
    parser.add_argument("--dim", action="append", type=int, choices=DIMS, help="only this head dim (may be repeated)")
    parser.add_argument("--kernel", action="append", help="only this kernel (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    print("depth: bits stored/scanned; instr: per stored element; limit and share of peak bandwidth are predictions")
    print("  ".join(f"{name:{'<' if name in LEFT else '>'}{width}}" for name, width in COLUMNS.items()))
    rows, failed = [], []
    for row in compile_rows(arguments.arch or list(TARGETS), tuple(arguments.dim or DIMS), arguments.kernel):
        rows.append(row)
        print(line(row), flush=True)
        failed += [f"{row['kernel']} bits {row['bits']} D {row['D']} {row['arch']}: {fault}" for fault in faults(row)]
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, **versions()}, indent=1) + "\n")
    for fault in failed:
        print(fault, file=sys.stderr)
    print(json.dumps({"kernels": len(rows), "faults": len(failed), **versions()}))
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
