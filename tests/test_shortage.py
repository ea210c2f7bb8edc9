"""Out of memory: the message names the tensor, its bytes and what would fit, and what was saved stays as it was."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import pytest
import simulated
import tiny
import torch
from ranks import run_command, run_ranks

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.plan.memory import Job, rank_bytes
from bitkv_dist.plan.models import MODELS
from bitkv_dist.plan.room import free_bytes, needed_bytes, ways_out
from bitkv_dist.sealed import SealedStore
from bitkv_dist.shortage import OutOfMemory, needing

CPU = torch.device("cpu")
LONG = 1_000_000  # tokens: hidden states of 256 MB, as much of a layer's keys and values, 40 MB of sealed pages per layer
WITHIN = """
import resource, sys
from pathlib import Path
from bitkv_dist.engine import Engine
from bitkv_dist.launch import generate, shell
real = Engine.open
def limited(engine, prompts):
    status = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (now * 1024 + int(sys.argv[1]), resource.RLIM_INFINITY))
    real(engine, prompts)
Engine.open = limited
shell.run(generate.main, "generate", sys.argv[2:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_tokenizer(
        tiny.save(tmp_path_factory.mktemp("model"), vocab_size=257, max_position_embeddings=1 << 20, head_dim=16)
    )


def test_the_allocators_words_are_understood():
    with pytest.raises(OutOfMemory, match=r"^no memory for the moon of [\d,]+\.\d MB$") as found, needing("the moon"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert found.value.size == 1 << 60 and isinstance(found.value, MemoryError)
    for error, size in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total .."), 3 << 29),
        (MemoryError(), None),
    ):
        with pytest.raises(OutOfMemory) as found, needing("x"), needing("y"):
            raise error
        assert (found.value.tensor, found.value.size) == ("y", size)
    reported = "save-cache s: nothing was saved: rank 1 failed (OutOfMemoryError: CUDA out of memory)"
    with pytest.raises(RuntimeError, match="save-cache s: nothing was saved"), needing("x"):
        raise RuntimeError(reported)


def exhausted(mesh, folder: str) -> list[str]:
    """What a run says when the addresses of its process end while it allocates one thing after the other."""
    served = model.load(folder, dtype=torch.float32, device=CPU)
    prompt, said = [1] * LONG, []
    for room_mb in (8, 120, 440):
        engine = Engine(served, CacheConfig(), mesh, GenerateConfig(max_new_tokens=1))
        engine.generate([prompt[:300]])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes() + room_mb * 10**6, hard))
        try:
            assert free_bytes(CPU, 1) <= room_mb * 10**6
            engine.generate([prompt])
        except OutOfMemory as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return said


def address_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))


def test_each_large_tensor_is_named(folder):
    (said,) = run_ranks(1, exhausted, str(folder))
    tensors = ("the sealed pages of layer [01]", "the prompt's hidden states", "the prompt's exact keys and values in layer 0")
    assert len(said) == len(tensors)
    for message, tensor in zip(said, tensors, strict=True):
        assert re.match(f"no memory for {tensor} of ", message) and "\n" not in message
    assert "were free; nothing smaller is known to fit, see bitkv plan" in said[0]
    assert all("were free; it would fit with " in message and "a context of at most " in message for message in said[1:])
    assert "of 256.0 MB; the run needs" in said[1]


def test_what_is_said_to_fit_does():
    job = Job(MODELS["llama-3.1-8b"], build("4bit", {}).cache, 1 << 18)
    needed = needed_bytes(job, 1, 2)
    assert ways_out(job, 1, 2, needed)[-1] == f"a context of at most {1 << 18:,} tokens"
    ways = ways_out(job, 1, 2, needed * 2 // 5)
    assert ways[:3] == ["--prefill packed", "--config 2bit", "4 sequence ranks with as much memory each"] or len(ways) >= 2
    tokens = int(ways[-1].split()[-2].replace(",", ""))
    shorter, longer = (Job(job.shape, job.config, tokens + more) for more in (0, 1))
    assert needed_bytes(shorter, 1, 2) <= needed * 2 // 5 < needed_bytes(longer, 1, 2)
    assert ways_out(job, 1, 2, 1000) == []


def test_growth_on_any_rank_names_its_layer(folder, monkeypatch):
    """A turn of a conversation needs room that is not there, as a GPU's allocator says it."""
    real = SealedStore.reserve

    def reserve(store, granules):
        if granules > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has ..")
        real(store, granules)

    def talk(mesh) -> str:
        served = model.load(str(folder), dtype=torch.float32, device=CPU)
        engine = Engine(served, CacheConfig(), mesh, GenerateConfig(max_new_tokens=1))
        engine.generate([tiny.prompt(700)])
        monkeypatch.setattr(SealedStore, "reserve", reserve)
        with pytest.raises(OutOfMemory, match=r"no memory for the sealed pages of layer 0 of 536\.9 MB; ") as found:
            engine.generate([tiny.prompt(5000)], keep=True)
        return str(found.value)

    for message in simulated.run(2, talk):
        assert "when it began, something else has taken them since" in message
    monkeypatch.setattr(SealedStore, "reserve", real)
    monkeypatch.setattr("bitkv_dist.engine.free_bytes", lambda *_: 63_000_000)
    for message in simulated.run(2, talk):
        assert "63.0 MB were free; it would fit with " in message and "a context of at most " in message


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_one_line_and_the_snapshot_stays(folder, tmp_path, size):
    (tmp_path / "within.py").write_text(WITHIN)
    (tmp_path / "long.txt").write_text("a tale of " * (LONG // 10))
    saved = tmp_path / "s"

    def run(room_bytes: int, *prompt: str):
        start = [sys.executable] if size == 1 else [Path(sys.executable).parent / "torchrun", "--nproc-per-node", size]
        flags = ["--model", folder, "--save-cache", saved, "--max-new-tokens", "1", *prompt]
        return run_command([*start, tmp_path / "within.py", room_bytes, *flags])

    first = run(1 << 34, "--prompt", "a tale of two ranks " * 40)
    assert first.status == 0, first.err
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    short = run(120 * 10**6 // size, "--prompt-file", str(tmp_path / "long.txt"))
    assert short.status == 1 and (size > 1 or "Traceback" not in short.err)  # torchrun prints one of its own
    failures = [line for line in short.messages() if "OutOfMemory" in line]
    assert len(failures) == 1 and ": OutOfMemory: no memory for the prompt's hidden states of " in failures[0]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"s", "within.py", "long.txt"}


def test_the_planner_agrees_with_what_is_needed():
    job = Job(MODELS["smollm2-135m"], build("tiered4", {}).cache, 8192, prefill="packed")
    found = rank_bytes(job, 1, 1)
    assert needed_bytes(job, 1, 1) == found.total - found.weights
