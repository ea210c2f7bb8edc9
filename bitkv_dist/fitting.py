"""What fits around an engine's model: how a prompt is read where memory is short, and what to say when it has run out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bitkv_dist.kernels import dispatch
from bitkv_dist.plan.memory import Job
from bitkv_dist.plan.models import from_config
from bitkv_dist.plan.room import fitting_prefill, needed_bytes, ways_out
from bitkv_dist.shortage import OutOfMemory, advice, needing

if TYPE_CHECKING:
    from bitkv_dist.engine import Engine


def choose_prefill(engine: Engine, prompts: list[list[int]]) -> str:
    """exact or packed; `auto` is exact where every rank has room for it, taking all prompts for as long as the longest."""
    if engine.config.prefill != "auto":
        return engine.config.prefill
    try:
        engine.fitting_heads(prompts)
    except ValueError:
        return "packed"
    free = engine.mesh.gather_objects(engine.room_bytes)
    return fitting_prefill(job_of(engine, list(map(len, prompts)), "exact"), engine.mesh.tp, engine.mesh.sp, free)


def job_of(engine: Engine, lengths: list[int], prefill: str) -> Job:
    """What the planner is asked about: as many sequences, each as long as the longest, with its answer."""
    model, config, mesh = engine.model, engine.config, engine.mesh
    context = min(max(lengths) + config.max_new_tokens, model.max_positions)
    shape = from_config(model.name, model.config, model.head_dim, model.max_positions)
    kept = {"prefill_memory_gb": config.prefill_memory_gb, "layout": mesh.split.layout}
    kept["compiled"] = dispatch.backend(model.device)[0] != dispatch.REFERENCE
    return Job(shape, engine.cache_config, context, len(lengths), model.dtype, prefill, config.chunk, **kept)


@contextmanager
def saying_what_fits(engine: Engine, lengths: list[int]) -> Iterator[None]:
    """Whoever runs out of memory meanwhile learns which tensor it was for and what would fit; lengths: tokens of each
    sequence without its answer. Asks no other rank."""
    try:
        with needing("temporaries"):
            yield
    except OutOfMemory as error:
        job, grid = job_of(engine, lengths, engine.prefill), (engine.mesh.tp, engine.mesh.sp)
        needed, room = needed_bytes(job, *grid), engine.room_bytes
        ways = ways_out(job, *grid, needed - 1 if room is None else room)
        raise OutOfMemory(error.tensor, error.size, advice(needed, room, ways)) from error
