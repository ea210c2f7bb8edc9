"""Compiles kernels for a GPU that is not there, and reads what the compiler made of them.

The host code runs unchanged on CPU tensors; every launch is turned into a compilation for the wanted target. So a row of the
report is the variant that this host code would launch: its constants, its configuration, its specialisations.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = Path(__file__).parents[1] / "kernels" / "triton"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TENSOR_CORE = re.compile(r"^(\w*MMA|v_(s?mfmac?|wmma))[._]")


@dataclass(frozen=True)
class Code:
    """One compiled kernel. constants: its compile-time ones; data: the type of its first argument; spills: of registers to
    memory; scalar_spills: of AMD's scalar registers, to lanes of vector registers; instructions: its machine code in order;
    loops: (first, last) indices of loops without a loop inside; loads: (source function, bits) of its global loads."""

    name: str
    arch: str
    constants: dict[str, object]
    data: str
    warps: int
    regs: int
    spills: int
    scalar_spills: int
    shared: int
    instructions: list[str]
    loops: list[tuple[int, int]]
    loads: list[tuple[str, int]]

    @property
    def threads(self) -> int:
        return self.warps * TARGETS[self.arch].warp_size

    def main_loop(self) -> list[str] | None:
        """The innermost loop with tensor-core instructions, else the longest; None without a loop."""
        bodies = [self.instructions[first : last + 1] for first, last in self.loops]
        bodies = [body for body in bodies if tensor_core(body)] or bodies
        return max(bodies, key=len, default=None)


def tensor_core(instructions: list[str]) -> int:
    """How many of the instructions run on tensor cores."""
    return sum(bool(TENSOR_CORE.match(instruction)) for instruction in instructions)


class AbsentGpu:
    """What Triton asks a driver for when it compiles without running."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_current_device(self) -> str:
        return self.arch  # a key: each target has a cache of its own

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling(arch: str, seen: set[str]) -> Iterator[list[Code]]:
    """Inside the with block launches compile for `arch` and run nothing; the list collects the variants whose hashes are not in
    `seen`, and adds them."""
    run, before, found = JITFunction.run, driver._active, []

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            constants = {name: value for name, value in kwargs.items() if name.isupper()}
            found.append(read(kernel, arch, constants, str(args[0].dtype).removeprefix("torch.")))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(AbsentGpu(arch))
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


def read(kernel, arch: str, constants: dict[str, object], data: str) -> Code:
    """The facts of a compiled kernel."""
    metadata, hip = kernel.metadata, TARGETS[arch].backend == "hip"
    if hip:
        text = kernel.asm["amdgcn"]
        # What stands between the kernel's label and the end of its program; numbers stand in the notes behind.
        instructions, loops = parse(
            text.split("s_endpgm")[0], r"^(\.LBB\w+):", r"^\s+([a-z]\w+\b.*)$", r"\bs_c?branch\w*\s+(\.LBB\w+)"
        )
        number = {
            name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        }
        regs, spills, scalar_spills = (number[name] for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count"))
        if number["private_segment_fixed_size"]:  # else scalar registers that do not fit are kept in lanes of vector registers
            spills += scalar_spills
        loads = global_loads(text, r"\b(?:global|buffer|flat)_load_(\w+)", amd_bits)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text, usage = tool("nvdisasm", "-c", file.name), tool("cuobjdump", "-res-usage", file.name)
        instructions, loops = parse(
            text, r"^\s*(\.L_x_\w+):", r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", r"\bBRA\b.*(\.L_x_\w+)"
        )
        regs, scalar_spills = int(re.search(r"REG:(\d+)", usage)[1]), 0
        spills = sum(bool(re.match(r"(LDL|STL)\b", instruction)) for instruction in instructions)
        loads = global_loads(kernel.asm["ptx"], r"\b(ld\.global[\w.]*|cp\.async\.c[ag][^;]*)", ptx_bits)
    facts = metadata.num_warps, regs, spills, scalar_spills, metadata.shared, instructions, loops, loads
    return Code(metadata.name, arch, constants, data, *facts)


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def parse(text: str, label: str, instruction: str, branch: str) -> tuple[list[str], list[tuple[int, int]]]:
    """(instructions, innermost loops) of an assembly text, given what labels, instructions and jumps to a label look like."""
    instructions, labels = [], {}
    for line in text.splitlines():
        if found := re.match(label, line):
            labels[found[1]] = len(instructions)
        elif found := re.match(instruction, line):
            instructions.append(found[1])
    loops = set()
    for last, text in enumerate(instructions):
        found = re.search(branch, text)
        if found and labels.get(found[1], last + 1) < last:  # a jump to itself only pads the end
            loops.add((labels[found[1]], last))
    inner = [
        loop for loop in loops if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    return instructions, sorted(inner)


def global_loads(text: str, load: str, bits) -> list[tuple[str, int]]:
    """(source function, bits per thread) of the loads in an assembly text with line information."""
    named = re.findall(r'^\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"', text, re.MULTILINE)
    files = {number: os.path.join(folder, name) for number, folder, name in named}
    where, found = "", []
    for line in text.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            where = function_at(files.get(place[1], ""), int(place[2]))
        elif hit := re.search(load, line):
            found.append((where, bits(hit[1])))
    return found


def function_at(file: str, line: int) -> str:
    """The name of the last function that begins in or before this line of a Python file.

    Triton caches compiled code by the text of its source, so the file may be the same one of another checkout: a kernel's
    file is read here, by its name; one of Triton's own that is gone names nothing.
    """
    name, path = "", Path(file)
    if path.parent.name == KERNELS.name:
        path = KERNELS / path.name
    for text in path.read_text().splitlines()[:line] if path.suffix == ".py" and path.is_file() else ():
        if found := re.match(r"\s*def (\w+)", text):
            name = found[1]
    return name


def ptx_bits(instruction: str) -> int:
    if instruction.startswith("cp.async"):
        return 8 * int(re.findall(r",\s*(0x[0-9a-f]+|\d+)", instruction)[0], 0)
    vector = re.search(r"\.v(\d)", instruction)
    return int(re.search(r"\.[bfusd](\d+)$", instruction)[1]) * (int(vector[1]) if vector else 1)


def amd_bits(suffix: str) -> int:
    words = re.match(r"(?:dword|b)(?:x(\d))?", suffix)
    if words:
        return 32 * int(words[1] or 1)
    return 16 if "short" in suffix or "16" in suffix else 8
