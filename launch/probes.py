"""What `diagnose` finds out about hosts, links and a first step, as data; every function is collective."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.parallel import links, roll
from bitkv_dist.parallel.digest import combine, digest64, odd_ones
from bitkv_dist.parallel.exchange import Exchange

if TYPE_CHECKING:
    from bitkv_dist.model import ServedModel
    from bitkv_dist.parallel.mesh import Mesh

PROBE_PAGES, PROBE_NEW_TOKENS = 4, 4  # of the comparison of sealed pages: pages to seal, tokens to generate behind them
DRY_RUN_PROMPT, DRY_RUN_TOKENS = 16, 3
CLOCK_LIMIT_S = 1.0  # clocks further apart make logs of several hosts hard to read together; nothing else depends on them


def hosts(mesh: Mesh, cache_digest: int) -> list[dict]:
    """What each rank runs on, the digest of its configuration, and its memory."""
    world = mesh.world
    mine = {
        "rank": world.rank,
        "sp_rank": mesh.sp_rank,
        "tp_rank": mesh.tp_rank,
        "host": world.host,
        "device": str(world.device),
        "threads": world.threads,
        "config": f"{cache_digest:016x}",
        "available_bytes": available_bytes(world.device),
        "versions": roll.versions(),
    }
    rows = mesh.gather_objects(mine)
    for row, skew_s in zip(rows, links.clock_skew_s(mesh), strict=True):
        row["clock_skew_ms"] = skew_s * 1e3
    return rows


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the GPU, or of the host for a rank on the CPU; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def unlike_versions(rows: list[dict]) -> list[dict]:
    """{rank, library, version, digest-like odd ones} wherever a rank has another version than most."""
    named = [{name: digest64(version.encode()) for name, version in row["versions"].items()} for row in rows]
    return [{"rank": rank, "library": name, "version": rows[rank]["versions"][name]} for rank, name in odd_ones(named)]


def network(mesh: Mesh, model: ServedModel) -> dict:
    """Latency and bandwidth of every pair, and the collectives of a decode step of one sequence at their real sizes."""
    everyone = Exchange(mesh, model.heads_of_sequence_ranks(), model.local_heads)
    sent_bytes, exchange = everyone.collective(model.head_dim, model.device)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    found = {
        "pairs": links.pairs(mesh, sent_bytes),
        "exchange": mesh.exchange,
        "exchange_bytes": sent_bytes,
        "exchange_us": links.collective_s(mesh, exchange) * 1e6,
        "broadcast_us": links.collective_s(mesh, lambda: mesh.broadcast_tensor(tokens)) * 1e6,
        "all_reduce_us": None,
    }
    step_us = model.layers * found["exchange_us"] + found["broadcast_us"]
    if mesh.split.parts > 1:
        found["all_reduce_us"] = links.collective_s(mesh, lambda: mesh.sum(hidden, mesh.split.helix)) * 1e6
        step_us += 2 * model.layers * found["all_reduce_us"]
    return found | {"step_ms": step_us / 1e3}


def dry_run(mesh: Mesh, model: ServedModel, cache: CacheConfig, generate: GenerateConfig) -> dict:
    """Three tokens from a short prompt, which must be the same on all ranks."""
    settings = replace(generate, max_new_tokens=DRY_RUN_TOKENS, ignore_eos=True, warmup=False)
    result = Engine(model, cache, mesh, settings).generate([_prompt(model, DRY_RUN_PROMPT)])
    everyone = mesh.gather_objects({0: digest64(repr(result.token_ids).encode())})
    return {
        "token_ids": result.token_ids[0],
        "prefill_ms": result.prefill_s * 1e3,
        "step_ms": result.decode_s * 1e3 / max(1, result.decoded_tokens),
        "mismatches": [{"rank": rank} for rank, _ in odd_ones(everyone)],
    }


def sealed_pages(mesh: Mesh, model: ServedModel, cache: CacheConfig, generate: GenerateConfig) -> dict:
    """Generate with a cache in which every SP rank seals the pages of all, and compare page by page."""
    tokens = cache.sink_rounded + PROBE_PAGES * cache.page_tokens + cache.recent_tokens
    if tokens + PROBE_NEW_TOKENS > model.max_positions:
        raise ValueError(
            f"--cache: needs {tokens + PROBE_NEW_TOKENS} positions to seal {PROBE_PAGES} pages, the model has "
            f"{model.max_positions}; use smaller --recent-tokens or --sink-tokens"
        )
    settings = replace(generate, max_new_tokens=PROBE_NEW_TOKENS, ignore_eos=True, stream=False)
    engine = Engine(model, cache, mesh, settings, audit=True)
    engine.generate([_prompt(model, tokens)])

    everyone = mesh.gather_objects(engine.page_digests())
    names = ("layer", "sequence", "page", "kv_head")
    mismatches = [{"rank": rank, **dict(zip(names, key, strict=True))} for rank, key in odd_ones(everyone)]
    pages = {key: digest for theirs in everyone for key, digest in theirs.items()}
    return {"digest": combine(pages), "pages": len(pages), "mismatches": mismatches}


def _prompt(model: ServedModel, tokens: int) -> list[int]:
    return [7919 * i % model.config.vocab_size for i in range(tokens)]
