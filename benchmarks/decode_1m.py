"""Decoding at a million tokens with the attention of Llama-3.1-8B: how fast, beside what the memory could do?

    python benchmarks/decode_1m.py --threads 2
    python benchmarks/decode_1m.py --tokens 131072 --configs 1bit --memory-gib 3

As many layers of a random model as --memory-gib holds, their caches full of random but realistic keys and values (means per
channel, a few granules encoded and the others copies of them), decode through the engine: layers, exchange, sampling. Checked
first: at a short context the compiled kernels' logits against those of plain torch. Then, for each cache: milliseconds per
token; bytes read, of weights and of the cache, over the streaming rate of the machine in the same run; what appending a token
takes at 1,024 tokens and at the full context, in turns, sealed pages included; and what growth beyond the room that was
announced allocates: slabs, whether an older one moved or was copied, the largest temporaries, and the slack. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from filled import CPU, Shape, filled_engine, random_model
from prefill_memory import Live, resident_bytes, storages
from streaming import stream_gb_s

from bitkv_dist.cache import Step
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.config import ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel.heartbeat import Heart, Pulse
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.parallel.world import World
from bitkv_dist.plan.memory import Job, layer_page, rank_bytes
from bitkv_dist.plan.models import from_config
from bitkv_dist.sealed import GROWTH_GRANULES

SHORT_TOKENS = 1024  # where an append is compared with one at the full context
CHECKED_TOKENS, CHECKED_ERROR = 4096, 1e-2
WARM_STEPS = 1
ELSEWHERE_BYTES = 400 << 20  # libraries, logits, partials


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        rate = stream_gb_s()
        print(f"{dispatch.backend(CPU)[0]}, {args.threads} thread(s), {rate:.1f} GB/s streamed")
        runs = {name: measure(args, build(name, {}).cache, rate) for name in args.configs}
    for name, run in runs.items():
        show(name, run)
    about = {"tokens": args.tokens, "threads": args.threads, "stream_gb_s": rate, "isa": dispatch.backend(CPU)[0]}
    print(json.dumps(about | {"runs": runs, "torch": torch.__version__, "machine": platform.processor() or platform.machine()}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--configs", type=lambda text: text.split(","), default=["1bit", "tiered4"])
    parser.add_argument("--memory-gib", type=float, default=6.0, help="for weights and caches; decides the number of layers")
    parser.add_argument("--layers", type=int, help="so many instead")
    parser.add_argument("--new-tokens", type=int, default=8, help="timed")
    parser.add_argument("--appends", type=int, default=512, help="timed at each of the two contexts; 128 seal a page")
    parser.add_argument("--threads", type=int, default=1)
    whole = Shape(0)
    for name in ("heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(whole, name))
    return parser.parse_args()


def measure(args: argparse.Namespace, config: CacheConfig, rate_gb_s: float) -> dict[str, Any]:
    """Everything about one cache."""
    layers = args.layers or layers_that_fit(args, config)
    mesh = world_of_one(args.threads)
    model = random_model(shape_of(args, layers), args.tokens + 2 * GROWTH_GRANULES * GRANULE_TOKENS, mesh)
    error = check(model, config, mesh)
    before = resident_bytes()
    new_tokens = WARM_STEPS + args.new_tokens + args.appends
    engine = filled_engine(model, config, mesh, [args.tokens], new_tokens)
    weights = storages(model.module.parameters())
    found = {"layers": layers, "weight_bytes": weights, "cache_bytes": engine.cache.bytes, "logits_error": error}
    found["resident_bytes"] = resident_bytes() - before
    shape = from_config("model", model.config, model.head_dim, model.max_positions)
    planned = rank_bytes(Job(shape, config, args.tokens + new_tokens, dtype=torch.float32), 1, 1)
    found["planned_cache_bytes"] = planned.cache + planned.exact
    table = model.module.get_input_embeddings().weight  # not tied; a step looks up a row of it
    found |= decode(engine, args.new_tokens, weights - table.nbytes, rate_gb_s)
    short = filled_engine(model, config, mesh, [SHORT_TOKENS], args.appends)
    found["append_ms"] = appends({"short": short, "full": engine}, args.appends)
    found["growth"] = growth(engine)
    return found


def shape_of(args: argparse.Namespace, layers: int) -> Shape:
    return Shape(layers, args.heads, args.kv_heads, args.head_dim, args.hidden, args.intermediate, args.vocabulary)


def layers_that_fit(args: argparse.Namespace, config: CacheConfig) -> int:
    """Whole layers, weights in bfloat16 and sealed pages, beside embedding and LM head."""
    projections = args.hidden * (2 * args.heads * args.head_dim + 2 * args.kv_heads * args.head_dim + 3 * args.intermediate)
    page = layer_page(config, args.head_dim, torch.float32, args.kv_heads).stored
    layer = 2 * projections + args.tokens // config.page_tokens * args.kv_heads * page
    room = args.memory_gib * 2**30 - 4 * args.vocabulary * args.hidden - ELSEWHERE_BYTES
    if room < layer:
        raise ValueError(f"memory-gib {args.memory_gib:g}: a layer takes {layer / 2**30:.2f} GiB; give more or fewer tokens")
    return int(room // layer)


def world_of_one(threads: int) -> Mesh:
    world = World(0, 1, 0, 1, "here", "python", "none", CPU, threads)
    return Mesh(world, 1, 1, ParallelConfig(), Heart(Pulse(), 0))


def check(model, config: CacheConfig, mesh: Mesh) -> float:
    """Relative difference of a step's logits at a short context to those with plain-torch attention."""
    logits = filled_engine(model, config, mesh, [CHECKED_TOKENS], 1).step([0])
    with dispatch.forced("reference"):
        wanted = filled_engine(model, config, mesh, [CHECKED_TOKENS], 1).step([0])
    error = ((logits - wanted).norm() / wanted.norm()).item()
    assert error < CHECKED_ERROR, f"logits differ from those of plain torch by {error:.1e}"
    return error


def decode(engine: Engine, tokens: int, weight_bytes: int, rate_gb_s: float) -> dict[str, Any]:
    """Steps of the engine, sampling included, and the bytes that they read."""

    def step() -> float:
        started = time.perf_counter()
        engine.decode(engine.step([0]), [[]], None, started)
        return time.perf_counter() - started

    for _ in range(WARM_STEPS):
        step()
    read_before = engine.cache.reads.bits + engine.cache.exact_reads.bits
    times = [step() * 1e3 for _ in range(tokens)]
    cache_bytes = (engine.cache.reads.bits + engine.cache.exact_reads.bits - read_before) / 8 / tokens
    ms, bytes_read = statistics.median(times), weight_bytes + cache_bytes
    return {
        "ms_per_token": ms, "spread_ms": [min(times), max(times)], "tokens_per_s": 1e3 / ms, "cache_bytes_read": cache_bytes,
        "bytes_read": bytes_read, "read_gb_s": bytes_read / ms / 1e6, "fraction_of_stream": bytes_read / rate_gb_s / 1e6 / ms,
    }  # fmt: skip


def appends(engines: dict[str, Engine], tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds that one token's keys and values take to reach the cache of one layer, in turns of a page."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    page = next(iter(engines.values())).cache_config.page_tokens
    for _ in range(-(-tokens // page)):
        for name, engine in engines.items():
            times[name] += [timed_ms(lambda engine=engine: append(engine)) for _ in range(page)]
    return {
        name: {"median": statistics.median(values), "mean": statistics.mean(values), "with_seal": sealing(values, page)}
        for name, values in times.items()
    }


def sealing(values: list[float], page: int) -> float:
    """The median over pages of the slowest append of each: the one that seals."""
    return statistics.median(max(values[start : start + page]) for start in range(0, len(values), page))


def append(engine: Engine) -> None:
    heads, layer = engine.cache.heads, engine.cache.layers[0]
    engine.cache.step = Step([0], decode=True)
    layer.update(*torch.ones(2, 1, heads.kv_heads, 1, heads.head_dim))
    layer.rows = []


def timed_ms(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def growth(engine: Engine) -> dict[str, Any]:
    """One layer grows by two slabs' worth of tokens, a granule at a time."""
    layer, heads = engine.cache.layers[0], engine.cache.heads
    state, granules = layer.states[0], 2 * GROWTH_GRANULES
    slabs = [(slab.data_ptr(), slab.nbytes) for slab in state.sealed.slabs]
    kv = torch.randn(2, heads.kv_heads, GRANULE_TOKENS, heads.head_dim)
    with Live() as live:
        live.seen |= {tensor.untyped_storage()._cdata for tensor in (state.exact, kv, *state.sealed.slabs)}
        for _ in range(granules):
            rows, _ = layer.extend(0, kv)
            layer.keep(0, layer.seal_due(0, state.length, rows))
    after = [(slab.data_ptr(), slab.nbytes) for slab in state.sealed.slabs]
    added = sum(size for _, size in after[len(slabs) :])
    page_bytes = heads.kv_heads * layer.codec.record_bytes
    pages = (state.sealed_end - state.sink) // engine.cache_config.page_tokens
    per_granule = GRANULE_TOKENS // engine.cache_config.page_tokens * page_bytes
    return {
        "tokens": granules * GRANULE_TOKENS, "slabs_before": len(slabs), "slabs_after": len(after),
        "older_slabs_in_place": after[: len(slabs)] == slabs, "bytes_added": added,
        "largest_temporaries_bytes": live.peak - added, "sealed_bytes": state.sealed.bytes,
        "slack_bytes": state.sealed.bytes - pages * page_bytes, "slack_bound_bytes": (GROWTH_GRANULES + 1) * per_granule,
    }  # fmt: skip


def show(name: str, run: dict[str, Any]) -> None:
    mb = {key: f"{run[key] / 1e6:,.0f} MB" for key in ("weight_bytes", "cache_bytes", "planned_cache_bytes", "bytes_read")}
    low, high = run["spread_ms"]
    grown = run["growth"]
    sizes = {key: f"{grown[key] / 1e6:,.2f} MB" for key in grown if key.endswith("bytes") or key == "bytes_added"}
    lines = [
        f"{name}: {run['layers']} layers, {mb['weight_bytes']} of weights, {mb['cache_bytes']} of cache (planned: "
        f"{mb['planned_cache_bytes']}); logits within {run['logits_error']:.0e} of plain torch",
        f"a token: {run['ms_per_token']:.1f} ms ({low:.1f} .. {high:.1f}), {run['tokens_per_s']:.2f} tokens/s; reads "
        f"{mb['bytes_read']}, {run['read_gb_s']:.1f} GB/s, {run['fraction_of_stream']:.2f} of the streaming rate",
        *(
            f"an append, {where} context: {times['median'] * 1e3:.1f} us; {times['with_seal']:.2f} ms when it seals a page"
            for where, times in run["append_ms"].items()
        ),
        f"growth by {grown['tokens']:,} tokens: {grown['slabs_after'] - grown['slabs_before']} slabs of together "
        f"{sizes['bytes_added']}; older ones in place: {grown['older_slabs_in_place']}",
        f"temporaries {sizes['largest_temporaries_bytes']} beside {sizes['sealed_bytes']}; slack {sizes['slack_bytes']} of at "
        f"most {sizes['slack_bound_bytes']}",
    ]
    print(*lines, sep="\n  ")


if __name__ == "__main__":
    main()
