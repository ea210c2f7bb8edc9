"""Which kernels do the work: what is there, what is asked for, and that nothing is missing in silence."""

import os
import shutil

import pytest
import torch

from bitkv_dist.kernels import cpu, dispatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def automatic():
    yield
    dispatch.use("auto")


def test_library_is_built_where_there_is_a_compiler():
    """The tests of the C++ kernels are skipped without it."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    assert cpu.load() is not None or compiler is None, f"{compiler} is there: {cpu.reason()}"


def test_without_a_library_the_reference_works_and_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "load", lambda: None)
    name, why = dispatch.backend(CPU)
    assert name == "reference" and "compiler" in why and not dispatch.on_cpu(CPU)
    dispatch.use("auto")
    with pytest.raises(ValueError, match=r"cpu_isa avx2: the C\+\+ extension is not built: .*auto"):
        dispatch.use("avx2")


@pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())
def test_an_instruction_set_is_used_until_another_is():
    best = dispatch.backend(CPU)[0]
    dispatch.use("portable")
    assert dispatch.backend(CPU) == ("cpu-portable", "asked for")
    with dispatch.forced("reference"):
        assert dispatch.backend(CPU)[0] == "reference"
        dispatch.use("portable")
    assert dispatch.backend(CPU)[0] == "cpu-portable"
    dispatch.use("auto")
    assert dispatch.backend(CPU) == (best, "the best instruction set of this machine")


@pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())
def test_an_instruction_set_that_the_machine_lacks_is_refused():
    lacking = [name for name, number in cpu.ISAS.items() if not cpu.load().bitkv_supports(number)]
    for name in lacking:
        with pytest.raises(ValueError, match=f"cpu_isa {name}: this machine does not have it; take one of auto, .*portable"):
            dispatch.use(name)
    assert "portable" not in lacking
