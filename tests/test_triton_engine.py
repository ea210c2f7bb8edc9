"""The engine on the path of a GPU, in Triton's interpreter: the reference's tokens and sealed bytes, for any number of ranks."""

from __future__ import annotations

import threading

import pytest
import simulated
import tiny
import torch
from test_engine import SMALL, RecordingEngine

pytest.importorskip("triton")

from triton.runtime import interpreter

from bitkv_dist import model
from bitkv_dist.config import CacheConfig, GenerateConfig
from bitkv_dist.kernels import dispatch
from bitkv_dist.report import kernel_report

CPU = torch.device("cpu")
CODECS = {
    "1bit": {"key_bits": 1, "value_bits": 1},
    "4bit": {"key_bits": 4, "value_bits": 4},
    "tiered4": {"key_bits": 4, "value_bits": 4, "scan_bits": 1},
}


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
    return tiny.save(tmp_path_factory.mktemp("llama"), intermediate_size=64, head_dim=16, num_hidden_layers=1)


def start(mesh, folder, cache: dict, **generate) -> RecordingEngine:
    served = model.load(str(folder), dtype=torch.float32, device=CPU)
    return RecordingEngine(served, CacheConfig(**cache | SMALL), mesh, GenerateConfig(model=str(folder), **generate))


def run(mesh, folder, cache: dict, prompts: list[list[int]], kernels: str, steps: int = 8, **generate):
    """(tokens, digest of the sealed bytes, logits, reads, kernel report) of one batch."""
    with dispatch.forced(kernels):
        engine = start(mesh, folder, cache, max_new_tokens=steps, **generate)
        tokens = engine.generate(prompts).token_ids
        return tokens, engine.cache_digest(), torch.cat(engine.logits), engine.cache.reads, kernel_report(engine)


@pytest.mark.parametrize("codec", CODECS)
def test_tokens_and_bytes_are_those_of_the_reference(codec, llama):
    """A page is sealed between two steps; one of the sequences has no sealed page at first."""
    prompts = [tiny.prompt(600), tiny.prompt(90)]
    tokens, digest, logits, reads, found = simulated.run(1, run, llama, CODECS[codec], prompts, "triton")[0]
    wanted = simulated.run(1, run, llama, CODECS[codec], prompts, "reference")[0]
    assert found == {"backend": "triton", "reason": "asked for, Triton's interpreter"}
    assert tokens == wanted[0] and digest == wanted[1]
    torch.testing.assert_close(logits, wanted[2], atol=5e-2, rtol=0)
    assert reads == wanted[3]
