"""The portable kernels give the same bytes on another processor, by emulation: needs a cross compiler and qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "kernels" / "cpu"
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-w"]  # as in setup.py
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
MISSING = [tool for tool in ("g++", COMPILER, EMULATOR) if shutil.which(tool) is None]


def digests(folder: Path, compiler: str, *runner: str) -> list[str]:
    program = folder / compiler
    sources = [str(SOURCES / name) for name in ("portable.cpp", "api.cpp", "decoder.cpp", "words.cpp")]
    check = str(Path(__file__).with_name("portable_check.cpp"))
    subprocess.run([compiler, "-static", *FLAGS, "-I", str(SOURCES), check, *sources, "-o", str(program)], check=True)
    return subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_aarch64_computes_the_same_bytes(tmp_path):
    here, there = digests(tmp_path, "g++"), digests(tmp_path, COMPILER, EMULATOR)
    assert len(here) == 24 + 18 and here == there
