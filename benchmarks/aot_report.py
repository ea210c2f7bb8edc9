"""What the compilers make of the Triton kernels, without a GPU, and what limits them.

Every kernel is compiled for sm_80, sm_90, sm_100 and gfx942 as the host code would launch it: every depth at every head dim
with four query heads to a KV head, and at every head dim the fewest and the most heads (1 and 16; 2 and 8 at D = 128). `words`
is the kernel of codec tailored, up to D = 128, its `load_bits` those of the look-ups.
Registers, spills, shared memory, widths of loads and instruction counts are facts; which of memory and instructions limits a
kernel is a prediction from them. Exits 1 when a kernel spills, or when `decode`, `tail`, `scan` or `words` loads codes narrower
than 64 bits or does without tensor cores.

    python benchmarks/aot_report.py --jobs 2 --json aot.json          what is compiled is kept
    python benchmarks/aot_report.py --arch sm_90 --dim 128 --kernel decode

Spills are those to memory; scalar registers of AMD that do not fit stay in lanes of vector registers and are counted apart
(`scalar_spills`). A row's `kernel` is what the step is called; `function` and `variant` tell the parts of one. `tail` is
`decode` over the values of a tiered cache, whose key dots `scan` has found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined: here they are compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton as language
from aot_machine import TARGETS, Code, compiling, tensor_core

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.planes import page_layout
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.codec.tailored_triton import MOST_DIM
from bitkv_dist.kernels import triton
from bitkv_dist.kernels.triton import tables

DIMS = (64, 80, 96, 128, 192, 256)
BITS = (1, 2, 3, 4)
HEADS, GROUP, PAGE_TOKENS, GRANULE_TOKENS = 8, 4, 128, 512
SHARE = 0.05
WORDS, WORD_BITS = 1024, 10  # of codec tailored, for eight channels
KERNELS = ("decode", "scan", "select", "tail", "refine", "words", "encode", "exact", "merge", "query", "conclude")
NAMES = {
    "encode_side": "encode", "fill_lanes": "merge", "halve_lanes": "merge",
    "quantize_rows": "query", "conclude_rows": "conclude",
}  # fmt: skip
COLUMNS = {
    "kernel": 8, "variant": 10, "depth": 5, "D": 3, "G": 2, "arch": 6, "warps": 5, "regs": 4, "spills": 6, "shared": 6,
    "load_bits": 9, "mma": 3, "instr": 5, "limit": 12, "share": 5,
}  # fmt: skip
LEFT = ("kernel", "variant", "depth", "arch", "limit")
PLANE_LOADS = ("load_planes", "load_low", "load_scanned", "looked_up")
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
    """A cache to compile for: stored and scanned bits of keys and values, head dim, query heads of a KV head, and whether each
    of these chooses what it refines."""

    bits: int
    scan_bits: int
    dim: int
    group: int = GROUP
    by_head: bool = False

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
        if kernel == "words":
            return WORD_BITS / 64 + 1 / (HEADS * self.dim)
        if kernel == "scan":
            return self.scan_bits / 8 + 2 / PAGE_TOKENS + 2 * self.group * PAGE_TOKENS / page
        if kernel == "tail":
            return (side + 2 / self.dim + 2 * self.group / self.dim) / 2 + self.scan_bits / 16
        return self.bits / 8 + 2 / self.dim if kernel == "refine" else side


def shapes(dim: int) -> Iterator[Shape]:
    yield from (Shape(bits, bits, dim) for bits in BITS)
    yield from (Shape(bits, scan, dim) for bits, scan in ((4, 1), (4, 2), (2, 1)))
    for group in (1, 2, 8, 16) if dim == 128 else (1, 16):
        yield from (Shape(bits, 1, dim, group) for bits in (1, 4))
    if dim == 128:
        yield Shape(4, 1, dim, by_head=True)


def launch(shape: Shape) -> None:
    """Everything that a decode step of this cache launches, and the encoding of a page."""
    layout, lanes = shape.layout(), 256
    heads = (1, HEADS, 1, shape.group)
    query = triton.Query(
        torch.zeros(*heads, shape.dim, dtype=torch.int8), torch.zeros(heads), torch.zeros(heads), torch.zeros(*heads, shape.dim)
    )
    bounds = torch.zeros(1, lanes, 2, dtype=torch.int32)
    table = triton.Table(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, 2 * lanes, dtype=torch.int64), bounds)
    rule = triton.Refinement(shape.tiered, not shape.by_head, 1, SHARE, 0.1, 0.1)
    triton.attend_lanes(layout, query, table, rule)


def launch_others(shape: Shape) -> None:
    """What does not depend on the depth: the step's two ends, the window and the tree."""
    heads, dim = (HEADS, 1, shape.group), shape.dim
    q, signs = torch.zeros(*heads, dim), torch.ones(HEADS, dim)
    triton.quantize_query(q, signs)
    for dtype in (torch.bfloat16, torch.float32):
        triton.attend_exact(q, torch.zeros(2, HEADS, 384, dim, dtype=dtype), torch.zeros((), dtype=torch.int64))
    part = torch.zeros(512, *heads), torch.zeros(512, *heads), torch.zeros(512, *heads, dim)
    *_, o = triton.tree(*part, torch.arange(512), 256, 1)
    triton.conclude((torch.zeros(heads), torch.zeros(heads), o[0]), (torch.zeros(heads), torch.zeros(heads), o[0]), signs)


def launch_words(shape: Shape) -> None:
    """A decode step over codebook words."""
    dim, share = shape.dim, PAGE_TOKENS // HEADS
    codes = torch.uint8, (dim // 8, 1, WORD_BITS, PAGE_TOKENS // 8)
    record = RecordLayout(("page", torch.int32, (1,)), ("K", *codes), ("V", *codes), ("scale", torch.float16, (share,)))
    words, channels = torch.zeros(HEADS, dim // 8, WORDS, 8, dtype=torch.float16), torch.zeros(HEADS, dim, dtype=torch.int32)
    numbers, pairs = torch.zeros(HEADS, dim), torch.zeros(HEADS, dim // 2)
    pages = triton.WordPages(
        PAGE_TOKENS, dim, record.bytes, tuple(record.fields[side].offset for side in "KV"), record.fields["scale"].offset,
        share, triton.Keys(words, channels, pairs, numbers), triton.Values(words, channels, numbers, numbers), numbers,
        torch.zeros(2, 1, dim // 2), torch.zeros(HEADS, 2, PAGE_TOKENS, 4 * triton.padded_groups(dim)),
    )  # fmt: skip
    lanes = torch.zeros(1, 256, 2, dtype=torch.int32)
    table = triton.Table(torch.zeros(16, dtype=torch.uint8), torch.zeros(1, 512, dtype=torch.int64), lanes)
    triton.attend_words(pages, torch.zeros(1, HEADS, 1, shape.group, dim), table)


def launch_encode(shape: Shape) -> None:
    x, signs = torch.zeros(1, HEADS, PAGE_TOKENS, shape.dim), torch.ones(HEADS, shape.dim)
    triton.encode(shape.layout(), x, x, signs, signs, False)


def jobs(shape: Shape) -> Iterator[tuple[set[str], Callable[[Shape], None]]]:
    """(kernels, what launches them) of a shape."""
    yield {"scan", "select", "tail", "refine"} if shape.tiered else {"decode"}, launch
    if shape.bits == 1 and shape.dim <= MOST_DIM:
        yield {"words"}, launch_words
    if shape.group == GROUP and not shape.by_head:
        yield {"encode"}, launch_encode
    if shape == Shape(1, 1, shape.dim):
        yield {"exact", "merge", "query", "conclude"}, launch_others


def name_of(code: Code, shape: Shape) -> str:
    return "tail" if code.name == "decode" and shape.tiered else NAMES.get(code.name, code.name)


def variant_of(code: Code, kernel: str, shape: Shape) -> str:
    """What tells a row from others of its kernel and shape."""
    if kernel == "encode":
        return ("keys", "values")[code.constants["SIDE"]]
    if kernel == "merge":
        return "lanes" if code.name == "fill_lanes" else f"{code.constants['LEAVES']} leaves"
    if kernel == "exact":
        return code.data
    return "by head" if shape.by_head else ""


def elements_of(kernel: str, arch: str, shape: Shape) -> int | None:
    """Stored elements that an iteration of the kernel's loop consumes, or a whole program that has none; None: not defined."""
    if kernel == "words":
        return 2 * shape.dim * tables.ARCHITECTURES[arch].word_tile(triton.padded_groups(shape.dim)).tokens
    page = PAGE_TOKENS * shape.dim
    refined = max(32, language.next_power_of_2(round(SHARE * GRANULE_TOKENS)))
    return {"decode": 2 * page, "scan": page, "tail": page, "refine": 2 * refined * shape.dim}.get(kernel)


def programs_of(kernel: str, arch: str, shape: Shape) -> int:
    """How many programs read the same elements, each for some of the query heads."""
    chosen = tables.ARCHITECTURES[arch]
    at_once = {name: chosen.heads_at_once(shape.dim) for name in ("decode", "tail")} | {"words": chosen.columns}
    at_once |= {"scan": chosen.scan_heads_at_once(shape.dim), "refine": chosen.refine_heads_at_once(shape.dim)}
    return max(1, language.next_power_of_2(shape.group) // at_once[kernel]) if kernel in at_once else 1


def row_of(code: Code, kernel: str, shape: Shape) -> dict:
    body = (kernel != "refine" and code.main_loop()) or code.instructions  # `refine` is a program without a loop of its own
    elements = elements_of(kernel, code.arch, shape)
    per_element = code.threads * len(body) * programs_of(kernel, code.arch, shape) / elements if elements else None
    widths = [bits for source, bits in code.loads if source in PLANE_LOADS] or [
        max((bits for _, bits in code.loads), default=0)
    ]
    row = {
        "kernel": kernel, "function": code.name, "variant": variant_of(code, kernel, shape),
        "bits": shape.bits, "scan_bits": shape.scan_bits, "D": shape.dim, "G": shape.group, "arch": code.arch,
        "warps": code.warps, "regs": code.regs, "spills": code.spills, "scalar_spills": code.scalar_spills,
        "shared": code.shared, "load_bits": min(widths),
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
    if row["kernel"] in ("decode", "tail", "scan", "words"):
        if row["load_bits"] < NARROWEST_BITS:
            found.append(f"loads codes {row['load_bits']} bits wide, at least {NARROWEST_BITS} are wanted")
        if not row["mma"]:
            found.append("has no tensor-core instruction")
    return found


def compile_rows(arch: str, dim: int, kernels: frozenset[str]) -> list[dict]:
    """The rows of the report for a target and a head dim."""
    known: set[str] = set()
    rows = []
    for shape in shapes(dim):
        for launched, job in jobs(shape):
            if not launched & kernels:
                continue
            with tables.forced(arch), compiling(arch, known) as found:
                job(shape)
            named = ((code, name_of(code, shape)) for code in found)
            rows += [row_of(code, kernel, shape) for code, kernel in named if kernel in kernels]
    return rows


def all_rows(parts: list[tuple[str, int, frozenset[str]]], processes: int) -> Iterator[dict]:
    """The rows of each (target, head dim, kernels), in order, as they come."""
    if processes == 1:
        for part in parts:
            yield from compile_rows(*part)
        return
    with ProcessPoolExecutor(processes) as pool:
        for rows in pool.map(compile_rows, *zip(*parts, strict=True)):
            yield from rows


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
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this kernel (may be repeated)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    kernels = frozenset(arguments.kernel or KERNELS)
    parts = [(arch, dim, kernels) for arch in arguments.arch or TARGETS for dim in arguments.dim or DIMS]
    print("depth: bits stored/scanned; instr: per stored element; limit and share of peak bandwidth are predictions")
    print("  ".join(f"{name:{'<' if name in LEFT else '>'}{width}}" for name, width in COLUMNS.items()))
    rows, failed = [], []
    for row in all_rows(parts, arguments.jobs):
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
