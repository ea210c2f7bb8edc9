"""What a run cost, as data: bytes of the cache, bits read, times and memory. Nothing here prints, nothing is estimated."""

from __future__ import annotations

import resource
import sys

from bitkv_dist import promise
from bitkv_dist.codec.interface import ReadCount
from bitkv_dist.engine import Engine, Result
from bitkv_dist.kernels import dispatch


def report(engine: Engine, result: Result, texts: list[str] | None, load_s: float) -> dict:
    """The JSON object of a run (schema 1); collective, every rank calls it."""
    mesh, world = engine.mesh, engine.mesh.world
    kv = cache_report(engine)
    dtype = str(engine.model.dtype).removeprefix("torch.")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "schema": 1,
        "text": texts,
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "prefill": engine.prefill,
        "world": {"size": world.size, "tp": mesh.tp, "sp": mesh.sp, "backend": world.backend, "device": str(world.device)},
        "promise": promise.over_grids(dtype, engine.cache_config.codec, mesh.split.layout, mesh.exchange),
        "exchange": exchange_report(engine),
        "kv": kv,
        "timing": {
            "load_s": load_s,
            "prefill_s": result.prefill_s,
            "prefill_tokens_per_s": ratio(result.prefilled_tokens, result.prefill_s) if result.prefilled_tokens else None,
            "first_token_s": result.first_token_s,
            "decode_s": result.decode_s,
            "decode_tokens_per_s": ratio(result.decoded_tokens, result.decode_s),
        },
        "memory": {"peak_rss_bytes_per_rank": mesh.gather_objects(rss)},
        "digest": {"rotation": engine.rotation_digest, "cache": engine.cache_digest() if engine.config.digest else None},
        "kernel": kernel_report(engine),
    }


def exchange_report(engine: Engine) -> dict:
    """The layout of the weights, how attention is exchanged over the SP ranks, and the bytes that a rank receives through it
    per layer, mean over decode steps (all sequences of the batch together); None before a step, and of recorded steps, which
    are not counted."""
    mesh = engine.mesh
    steps = 0 if engine.config.graph else engine.exchanged_steps
    received = ratio(engine.exchanged_bytes, steps * engine.model.layers)
    return {"layout": mesh.split.layout, "kind": mesh.exchange, "bytes_per_layer": received}


def kernel_report(engine: Engine) -> dict:
    """Which kernels encoded and attended to sealed pages, and why these; what did the rest of a decode step, the type that the
    weights are kept in, and whether decode steps were graphs."""
    backend, reason = dispatch.backend(engine.model.device)
    config = engine.cache_config
    rules = (getattr(layer.codec, "unserved", f"codec {config.codec}") for layer in engine.cache.layers)
    unserved = next(filter(None, rules), None)
    if backend != dispatch.REFERENCE and unserved:
        backend, reason = dispatch.REFERENCE, f"{unserved} is attended to in plain torch; the rest by {backend}"
    weights = str(engine.model.weights).removeprefix("torch.")
    dense = f"torch ({engine.model.undecoded})" if engine.model.undecoded else "compiled"
    return {"backend": backend, "reason": reason, "dense": dense, "weights": weights, "graph": engine.config.graph}


def cache_report(engine: Engine) -> dict:
    """The cache's bytes and bits over all ranks. Bits per element are means over layers and decode steps; None before a
    step."""
    cache, model, mesh = engine.cache, engine.model, engine.mesh
    sequences = range(cache.sequences)
    tokens = sum(map(cache.length, sequences))
    sealed, evicted = sum(map(cache.sealed_tokens, sequences)), sum(map(cache.evicted_tokens, sequences))
    bf16_bytes = tokens * model.layers * model.kv_heads * model.head_dim * 2 * 2
    parts = mesh.gather_objects((cache.bytes, cache.reads, cache.exact_reads if mesh.sp_rank == 0 else ReadCount()))
    bytes_per_rank = [part[0] for part in parts]
    reads, every = ReadCount(), ReadCount()
    for _, sealed_reads, exact_reads in parts:
        reads.add(sealed_reads)
        every.add(sealed_reads)
        every.add(exact_reads)
    return {
        "codec": engine.cache_config.codec,
        "key_bits": engine.cache_config.key_bits,
        "value_bits": engine.cache_config.value_bits,
        "stored_bits_per_element": cache.stored_bits_per_element,
        "read_bits_per_element": ratio(reads.bits, reads.elements),
        "read_bits_total": ratio(every.bits, every.elements),
        "refined_share": ratio(reads.refined, reads.scanned),
        "ratio_total": ratio(bf16_bytes, sum(bytes_per_rank)),
        "bytes_total": sum(bytes_per_rank),
        "bytes_per_rank": bytes_per_rank,
        "codebook_bytes_per_rank": cache.book_bytes,
        "calibration": engine.cache_config.origin.record() if engine.cache_config.calibration else None,
        "bf16_bytes": bf16_bytes,
        "ratio": 16 / cache.stored_bits_per_element,
        "copies": mesh.split.replicas(model.kv_heads),
        "sealed_tokens": sealed,
        "exact_tokens": tokens - sealed - evicted,
        "eviction": {
            "rule": engine.cache_config.eviction,
            "keep": engine.cache_config.eviction_keep,
            "evicted_tokens": evicted,
            "kept_share": ratio(tokens - evicted, tokens),
            "kept_share_of_sealed": ratio(sealed, sealed + evicted),
        },
    } | mass_report(engine)


def mass_report(engine: Engine) -> dict:
    """With rule mass, the weight that the refined tokens were to carry and did carry for the prompt's probes: means over heads
    and sequences, and the least of them; None without a probe."""
    refine, mesh = engine.cache_config.refine, engine.mesh
    if refine is None or refine.rule != "mass":
        return {}
    per_rank = mesh.gather_objects(engine.cache.mass_covered() if mesh.sp_rank == 0 else [[]] * engine.model.layers)
    layers = [[share for rank in per_rank for share in rank[layer]] for layer in range(engine.model.layers)]
    measured = [ratio(sum(shares), len(shares)) for shares in layers]
    return {
        "mass": {"target": refine.value, "measured": measured, "worst_head": [min(shares, default=None) for shares in layers]}
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, None where there is nothing to divide by."""
    return numerator / denominator if denominator else None
