"""What prompt queries teach a layer about its scores: the last query of each granule, whichever rank computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.partial import Partial

if TYPE_CHECKING:
    from bitkv_dist.layer import PackedLayer
    from bitkv_dist.prompt import Prompt
    from bitkv_dist.sequence import SequenceState

PROBES = 16  # of one prompt at most: calibrating then costs as much as so many decode steps, however long the prompt


class Probe(NamedTuple):
    """A query fp32 [HK, 1, G, D] in base 2; the tokens before `sealed_end` were sealed for it, but for the sink."""

    query: torch.Tensor
    sealed_end: int


def probe_ends(tokens: int) -> list[int]:
    """Lengths at which a prompt of `tokens` tokens is probed: ends of granules, evenly spread, and its own end."""
    granules = -(-tokens // GRANULE_TOKENS)
    count = min(PROBES, granules)
    return [min(tokens, granules * (i + 1) // count * GRANULE_TOKENS) for i in range(count)]


def prompt_probes(
    state: SequenceState, shape: HeadShape, gather: Callable[[torch.Tensor], torch.Tensor]
) -> list[tuple[torch.Tensor, int]]:
    """(query [HK, 1, G, D], tokens so far) of an exact prefill, out of what each rank put into `state.probes`; the same on
    every rank."""
    ends = state.probe_ends
    sent = torch.zeros(len(ends), shape.kv_heads, 1, shape.group, shape.head_dim, device=shape.device)
    for row, end in enumerate(ends):
        if end in state.probes:
            sent[row] = state.probes.pop(end)
    return list(zip(gather(sent).sum(0), ends, strict=True))  # one rank has a probe, the others sent zeros


def chunk_probes(state: SequenceState, query: torch.Tensor) -> list[Probe]:
    """The probe of a packed prefill's newest chunk, if a granule ends in it; query [HK, n, G, D] of its tokens.

    How long the prompt will be is not known: beyond PROBES granules every second one is probed, beyond twice as many every
    fourth, and so on.
    """
    granules, after = divmod(state.length, GRANULE_TOKENS)  # `after`: tokens of the chunk behind that end
    last = query.shape[1] - 1 - after
    stride = 1 << max(0, (granules - 1) // PROBES).bit_length()
    return [Probe(query[:, last : last + 1], state.sealed_end)] if last >= 0 and granules % stride == 0 else []


def calibrate(layer: PackedLayer, sequence: int, probes: list[Probe], prompt: Prompt | None = None) -> None:
    """Let the layer's codec compare its scores for the probes with true ones; prompt: the exact keys, if at hand."""
    state = layer.states[sequence]
    probes = [probe for probe in probes if probe.sealed_end > state.sink]
    for lesson in state.tuning.lessons if probes else ():
        nodes = [lesson_nodes(layer, state, lesson, probe, prompt) for probe in probes]
        state.tuning.learn(lesson, layer.cache.shard.reduce(nodes, [sequence] * len(probes)))


def lesson_nodes(layer: PackedLayer, state: SequenceState, lesson: str, probe: Probe, prompt: Prompt | None) -> Partial:
    """This rank's tree nodes over what the sealed tokens show about one lesson."""
    query, tuning = probe.query, state.tuning

    def measure(records: torch.Tensor, valid: torch.Tensor, granules: list[int]) -> Partial:
        exact = None if prompt is None else prompt.granule_keys(granules)
        return layer.codec.measure(lesson, query, tuning, records, valid, exact)

    return layer.nodes(state, (*query.shape[:3], tuning.width(lesson)), probe.sealed_end, measure, cost=query.shape[-1])
