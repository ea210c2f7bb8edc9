"""The engine's decode step on this GPU with a random model of the shape of Llama-3.1-8B: eager, and as a CUDA graph.

    python benchmarks/gpu_engine.py --model small|8b [--dry-run]

`small` is two of its layers over 4,096 tokens, `8b` all 32 over 131,072 where weights and cache fit. The cache is filled with
random sealed pages instead of being read from a prompt: the work of a step is the same. Both ways decode the same tokens, or
the stage fails; a graph that cannot be recorded is reported with its reason. A line of JSON for each kind of cache, with the
time that reading the weights alone would take.
"""

from __future__ import annotations

import statistics
import sys
import time

import gpu_device

ARGS = gpu_device.arguments(__doc__, model={"choices": ("small", "8b"), "required": True})

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from bitkv_dist import attention  # noqa: E402
from bitkv_dist.cache import PackedCache  # noqa: E402
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig, RefineConfig  # noqa: E402
from bitkv_dist.config import GenerateConfig, ParallelConfig  # noqa: E402
from bitkv_dist.engine import Engine  # noqa: E402
from bitkv_dist.graph import CudaGraphs  # noqa: E402
from bitkv_dist.model import ServedModel  # noqa: E402
from bitkv_dist.parallel.mesh import Mesh, start  # noqa: E402

DEVICE = gpu_device.device_of(ARGS.dry_run)
TYPE = torch.float32 if ARGS.dry_run else torch.bfloat16
STEPS = 3 if ARGS.dry_run else 40
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
if ARGS.dry_run:
    SHAPE = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"small": (2, 4096), "8b": (32, 131072)}  # layers, tokens
CACHES = {
    "1bit": CacheConfig(key_bits=1, value_bits=1),
    "4bit": CacheConfig(key_bits=4, value_bits=4),
    "tiered4": CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=RefineConfig()),
}


class Rerun(CudaGraphs):
    """What stands for a graph in a dry run: the step's own Python, run again."""

    def check(self, device: torch.device, backend: str, sharers: int) -> None:
        pass

    def record(self, run):
        output = run().clone()
        return lambda: output.copy_(run()), output


def random_model(layers: int, positions: int) -> ServedModel:
    attention.register()
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=layers, vocab_size=256 if ARGS.dry_run else 128256, max_position_embeddings=positions,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(DEVICE):
        module = AutoModelForCausalLM.from_config(config, dtype=TYPE, attn_implementation=attention.NAME).eval()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return ServedModel(
        name="random", config=module.config, module=module, tokenizer=None, generation_config=module.generation_config,
        dtype=TYPE, device=DEVICE, fingerprint=0, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=config.hidden_size // heads, local_heads=heads, local_kv_heads=kv_heads, first_kv_head=0,
        max_positions=positions,
    )  # fmt: skip


def fill(engine: Engine, tokens: int) -> None:
    """A cache of one sequence whose sealed pages and exact rows are random, the same ones each time."""
    torch.manual_seed(0)
    engine.cache = engine.graph = None
    cache = PackedCache(engine.cache_config, engine.heads, 1)
    cache.reserve(0, tokens + STEPS)
    per_granule = GRANULE_TOKENS // engine.cache_config.page_tokens
    distinct = 1 if ARGS.dry_run else 4  # granules, repeated: their content does not change the work
    shape = (distinct * per_granule, engine.heads.kv_heads, engine.cache_config.page_tokens, engine.heads.head_dim)
    for layer in cache.layers:
        state = layer.states[0]
        state.length, state.sealed_end = tokens, state.sealed_at(tokens)
        granules = -(-state.sealed_end // GRANULE_TOKENS)
        for granule in range(granules):
            state.sealed.page(granule, 0)
        k, v = (torch.randn(shape, device=DEVICE, dtype=TYPE) for _ in range(2))
        records = layer.codec.encode(k, v).unflatten(0, (distinct, per_granule))
        state.sealed.slabs[0][:granules] = records.repeat(-(-granules // distinct), 1, 1, 1)[:granules]
        state.exact.normal_()
    engine.cache = cache


def decode(engine: Engine, tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and milliseconds of each step."""
    fill(engine, tokens)
    found, times = [1], []
    for _ in range(STEPS):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        engine.pending = [[found[-1]]]
        found.append(int(engine.step([0]).argmax()))
        times.append((time.perf_counter() - started) * 1e3)
    return found, times[2:]  # the first two compile and record


def measure(model: ServedModel, mesh: Mesh, name: str, tokens: int, rate_gb_s: float) -> bool:
    """Whether the graph could be recorded and decodes the tokens of the eager step."""
    engine = Engine(model, CACHES[name], mesh, GenerateConfig())
    eager_tokens, eager = decode(engine, tokens)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())
    found = {
        "kind": name, "tokens": tokens, "layers": model.layers, "eager_ms": statistics.median(eager), "graph_ms": None,
        "cache_bytes": engine.cache.bytes, "weight_bytes": weights, "weights_ms": weights / (rate_gb_s * 1e6),
        "copy_gb_s": rate_gb_s,
    }  # fmt: skip
    try:
        graph_tokens, graph = decode(Engine(model, CACHES[name], mesh, GenerateConfig(graph=True)), tokens)
        same = graph_tokens == eager_tokens
        found |= {"graph_ms": statistics.median(graph), "graph_most_ms": max(graph), "same_tokens": same}
    except RuntimeError as error:  # what the eager step took is worth reporting all the same
        same = False
        found["graph_error"] = str(error).splitlines()[0][:300]
    gpu_device.emit(f"step {ARGS.model}", **found)
    return same


def main() -> int | str:
    layers, tokens = (1, 420) if ARGS.dry_run else SIZES[ARGS.model]
    needed = 40e9  # weights, a cache of 4.4 bits and what lies between
    if ARGS.model == "8b" and DEVICE.type == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        gpu_device.emit("step 8b", skipped=f"needs {needed / 1e9:.0f} GB, free are {torch.cuda.mem_get_info()[0] / 1e9:.0f}")
        return 0
    if ARGS.dry_run:
        Engine.recorder = Rerun()
    rate = gpu_device.copy_gb_s(DEVICE)
    mesh = start(ParallelConfig(device=DEVICE.type))
    model = random_model(layers, tokens + 2 * STEPS)
    kinds = ("1bit",) if ARGS.dry_run else CACHES
    return 0 if all([measure(model, mesh, name, tokens, rate) for name in kinds]) else "a graph failed"


if __name__ == "__main__":
    with torch.inference_mode(), gpu_device.kernels_of(ARGS.dry_run):
        sys.exit(main())
