"""Which kernels serve a device, and what is said of them."""

import os
import shutil

import pytest
import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.planes_cpu import PlanesCodecCpu
from bitkv_dist.kernels import cpu, dispatch

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def test_a_gpu_gets_the_triton_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_target", lambda device: "sm_90")
    from bitkv_dist.kernels import triton

    assert dispatch.backend(CUDA) == ("triton", "the kernels for GPUs, sm_90") and dispatch.native(CUDA) is triton
    with dispatch.forced("reference"):
        assert dispatch.backend(CUDA) == ("reference", "asked for") and dispatch.native(CUDA) is None
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert dispatch.backend(CUDA)[0] == "reference" and "not installed" in dispatch.backend(CUDA)[1]
    assert dispatch.native(CUDA) is None


def test_other_devices_get_plain_torch():
    assert dispatch.backend(MPS) == ("reference", "plain torch: there are no compiled kernels for mps")
    assert dispatch.native(MPS) is None


def test_forced_kernels_end_with_the_block():
    before = dispatch.backend(CPU)
    with dispatch.forced("triton"), dispatch.forced("reference"):
        assert dispatch.backend(CPU)[0] == "reference"
    assert dispatch.backend(CPU) == before


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="kernels triton: there is no GPU; set TRITON_INTERPRET=1"), dispatch.forced("triton"):
        pass


@pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())
def test_the_codec_follows_the_kernels():
    heads = HeadShape(1, 0, 2, 64, torch.float32)
    assert type(make_codec(CacheConfig(), heads, 0)) is PlanesCodecCpu
    with dispatch.forced("reference"):
        assert type(make_codec(CacheConfig(), heads, 0)) is PlanesCodec
    pytest.importorskip("triton")
    from bitkv_dist.codec.planes_triton import PlanesCodecTriton

    with dispatch.forced("triton"):
        assert type(make_codec(CacheConfig(), heads, 0)) is PlanesCodecTriton


@pytest.fixture(autouse=True)
def automatic():
    yield
    dispatch.use("auto")


def test_library_is_built_where_there_is_a_compiler():
    """The tests of the C++ kernels are skipped without it."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    assert cpu.load() is not None or compiler is None, f"{compiler} is there: {cpu.reason()}"


def test_without_a_library_the_reference_works_and_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "_found", lambda: (None, cpu.NOT_BUILT))
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
