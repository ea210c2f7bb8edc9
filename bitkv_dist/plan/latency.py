"""Time of a decode step: bytes over bandwidth for weights and cache, latency and bytes for the collectives, a fixed cost.

An estimate. Its four constants are one compromise over published measurements of engines with fused kernels and captured
launches; benchmarks/plan_validation.py shows every prediction beside its measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitkv_dist import placement
from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.plan.machines import Machine
from bitkv_dist.plan.memory import FLOAT32_BYTES, Job, sealed_shares
from bitkv_dist.sequence import held_end

WEIGHT_RATE = 0.90  # share of the memory bandwidth at which weights stream
CACHE_RATE = 0.86  # and at which attention streams a cache
LAYER_MS = 0.047  # launches, norms and activations of a layer that no stream hides
STEP_MS = 0.15  # sampling and the host, once a step
FAR_TOKENS = 1 << 40  # no context reaches so far


@dataclass(frozen=True)
class StepMs:
    """Milliseconds of one step, which gives every sequence of the batch one token."""

    weights: float
    cache: float
    collectives: float
    fixed: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.collectives + self.fixed


def step_ms(job: Job, machine: Machine, tp: int, sp: int) -> StepMs:
    """A step on the grid's slowest rank, every sequence at `context` tokens."""
    per_ms = machine.gpu.bandwidth_gb_s * 1e6
    weights = job.shape.read_elements(job.split(tp, sp)) * job.dtype.itemsize
    return StepMs(
        weights / (per_ms * WEIGHT_RATE),
        cache_reads(job, tp, sp) / (per_ms * CACHE_RATE),
        collectives_ms(job, machine, tp, sp),
        job.shape.layers * LAYER_MS + STEP_MS,
    )


def cache_reads(job: Job, tp: int, sp: int) -> float:
    """Bytes of sealed pages and exact rows that the busiest rank reads."""
    shape, end = job.shape, held_end(job.config, job.context)
    heads = len(job.split(tp, sp).kv_heads(shape.kv_heads))
    exact = job.batch * (min(job.context, job.config.sink_rounded) + max(0, job.context - end))
    row = 2 * shape.layers * heads * shape.head_dim * job.dtype.itemsize
    return max(sealed_shares(job, sp)) / job.config.page_tokens * heads * job.page_bytes.read + exact * row


def collectives_ms(job: Job, machine: Machine, tp: int, sp: int) -> float:
    """Per layer two sums over the ranks that share its weights and one exchange of partials over the SP group; per step a sum
    for the embedding over the TP group, the logits and the ids."""
    shape, split, total = job.shape, job.split(tp, sp), 0.0
    hidden = job.batch * shape.hidden * job.dtype.itemsize
    if tp > 1:
        total += machine.tp_link(tp, sp).collective_ms(tp, 2 * hidden * (tp - 1) / tp)
    if (parts := split.parts) > 1:
        link, others = machine.sp_link(tp, sp) if split.helix else machine.tp_link(tp, sp), (parts - 1) / parts
        total += 2 * shape.layers * link.collective_ms(parts, 2 * hidden * others)
        total += link.collective_ms(parts, job.batch * shape.vocabulary * job.dtype.itemsize * others)
    if sp > 1:
        link = machine.sp_link(tp, sp)
        heads = split.touched_heads(shape.heads, shape.head_dim)
        partial = job.batch * len(heads) * (shape.head_dim + 2) * FLOAT32_BYTES
        exchange = link.collective_ms(sp, (sp - 1) * placement.slots(sp) * partial)
        total += shape.layers * exchanges(job) * exchange
    if tp * sp > 1:
        total += machine.sp_link(tp, sp).collective_ms(tp * sp, 0)
    return total


def exchanges(job: Job) -> int:
    """Exchanges of a layer: one; a refinement among the whole sequence exchanges masses and ranking keys before."""
    refine = job.config.refine
    if refine is None or refine.scope != "global":
        return 1
    return 3 if refine.granularity == "group" else 2


def pays_above(job: Job, machine: Machine, tp: int, sp: int) -> int | None:
    """The context, to a granule, above which `sp` sequence ranks take less time than one at the same tp; None: none is so long.

    It is about time alone: what does not fit counts too.
    """

    def pays(granules: int) -> bool:
        longer = replace(job, context=granules * GRANULE_TOKENS)
        return step_ms(longer, machine, tp, sp).total < step_ms(longer, machine, tp, 1).total

    low, high = 0, FAR_TOKENS // GRANULE_TOKENS
    if not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * GRANULE_TOKENS
