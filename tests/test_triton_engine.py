"""The engine on the path of a GPU, in Triton's interpreter: the reference's tokens and sealed bytes, for any number of
ranks."""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import pytest
import simulated
import tiny
import torch
from recorded import SMALL, RecordingEngine

pytest.importorskip("triton")

from tape import TapeRecorder
from triton.runtime import interpreter

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import ReadCount
from bitkv_dist.config import GenerateConfig
from bitkv_dist.graph import CudaGraphs
from bitkv_dist.kernels import dispatch
from bitkv_dist.report import kernel_report

CPU = torch.device("cpu")
CODECS = {
    "1bit": {"key_bits": 1, "value_bits": 1},
    "4bit": {"key_bits": 4, "value_bits": 4},
    "tiered4": {"key_bits": 4, "value_bits": 4, "scan_bits": 1},
}

# The fourth of eight steps seals a page of the first, which opens a granule, and the fifth the first page of the second.
PROMPTS = [tiny.prompt(604), tiny.prompt(91 + 64)]


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """Simulated ranks are threads, and the interpreter keeps the program that it runs in globals."""
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def alone(*args, **kwargs):
        with lock:
            return launch(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("llama"), intermediate_size=64, head_dim=64, num_hidden_layers=1)


class TapedEngine(RecordingEngine):
    def __init__(self, *args, **kwargs) -> None:
        self.recorder = TapeRecorder()
        super().__init__(*args, **kwargs)


def start(mesh, folder, cache: dict, **generate) -> RecordingEngine:
    served = model.load(str(folder), dtype=torch.float32, device=CPU)
    return TapedEngine(served, CacheConfig(**cache | SMALL), mesh, GenerateConfig(model=str(folder), **generate))


class Found(NamedTuple):
    tokens: list[list[int]]
    digest: str  # of the sealed bytes
    logits: torch.Tensor
    reads: tuple[ReadCount, ReadCount]  # of sealed and of exact tokens
    kernel: dict  # of the report
    recorder: TapeRecorder


def run(mesh, folder, cache: dict, prompts: list[list[int]], **generate) -> Found:
    engine = start(mesh, folder, cache, **{"max_new_tokens": 8} | generate)
    tokens = engine.generate(prompts).token_ids
    reads = engine.cache.reads, engine.cache.exact_reads
    return Found(tokens, engine.cache_digest(), torch.cat(engine.logits), reads, kernel_report(engine), engine.recorder)


def alone(kernels: str, *args, **generate) -> Found:
    with dispatch.forced(kernels):
        return simulated.run(1, lambda mesh: run(mesh, *args, **generate))[0]


@functools.cache
def reference_of(folder, codec: str) -> Found:
    return alone("reference", folder, CODECS[codec], PROMPTS)


def test_tokens_and_bytes_are_those_of_the_reference(llama):
    found, wanted = alone("triton", llama, CODECS["4bit"], PROMPTS), reference_of(llama, "4bit")
    assert found.kernel == {
        "backend": "triton", "reason": "asked for, Triton's interpreter", "weights": "float32", "graph": False,
        "dense": "torch (no compiled kernels for the device)",
    }  # fmt: skip
    assert found.tokens == wanted.tokens and found.digest == wanted.digest and found.reads == wanted.reads
    torch.testing.assert_close(found.logits, wanted.logits, atol=5e-2, rtol=0)


@pytest.mark.parametrize("codec", [pytest.param("1bit", marks=pytest.mark.slow), "tiered4"])
def test_a_recorded_step_answers_as_one_that_runs(codec, llama):
    """One recording serves steps before and after pages are sealed and a granule is opened: no length of it is the host's."""
    found, wanted = alone("triton", llama, CODECS[codec], PROMPTS, graph=True), reference_of(llama, codec)
    assert found.recorder.recorded == 1 and found.recorder.steps > 50 and found.kernel["graph"]
    assert found.tokens == wanted.tokens and found.digest == wanted.digest and found.reads == wanted.reads
    torch.testing.assert_close(found.logits, wanted.logits, atol=5e-2, rtol=0)


def test_any_number_of_ranks_gives_the_same_bits(llama):
    """Two granules on three ranks, with the exchange of a real step."""
    prompts = [tiny.prompt(700)]

    def short(mesh) -> Found:
        return run(mesh, llama, CODECS["1bit"], prompts, max_new_tokens=3)

    with dispatch.forced("triton"):
        (one,), several = (simulated.run(ranks, short) for ranks in (1, 3))
    for found in several:
        assert found.tokens == one.tokens and found.digest == one.digest and torch.equal(found.logits, one.logits)


def test_what_the_kernels_do_not_serve_is_left_to_the_reference_by_name(llama):
    found = alone("triton", llama, {"key_bits": 8, "value_bits": 8}, [tiny.prompt(200)], max_new_tokens=2)
    assert found.kernel["backend"] == "reference"
    assert found.kernel["reason"] == "8 scanned key bits is attended to in plain torch; the rest by triton"
    with pytest.raises(ValueError, match=r"generate\.graph true: plain torch attends to this cache"):
        alone("triton", llama, {"key_bits": 8, "value_bits": 8}, [tiny.prompt(9)], graph=True)


def test_graphs_need_a_gpu_and_exchanges_that_can_be_recorded():
    for device, backend, sharers, what in (
        ("cpu", "none", 1, "graphs need a GPU"),
        ("cuda", "gloo", 1, "exchanges of gloo cannot be recorded"),
        ("cuda", "nccl", 2, "a step of 2 ranks that share weights"),
    ):
        with pytest.raises(ValueError, match=what):
            CudaGraphs().check(torch.device(device), backend, sharers)
    CudaGraphs().check(torch.device("cuda"), "nccl", 1)
