"""Where a packed cache departs from the exact one: score by score, head by head, on the queries and keys of a real prompt.

Codes are noisy by design. What a sound codec does not do is miss in the mean, or miss by more than the energy that its codes lost
predicts. A head that does is off, and faults.py follows its numbers through the codec to the first step that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bitkv_dist.codec.interface import Codec, HeadShape, make_codec
from bitkv_dist.config import CacheConfig
from bitkv_dist.evaluate.faults import Faults, expected_correction, find_faults
from bitkv_dist.evaluate.reading import Reading, sealed_tokens
from bitkv_dist.evaluate.trace import traces
from bitkv_dist.model import ServedModel

# Limits for the mean of the scores, in standard errors and in standard deviations of the predicted noise. Sound codecs stay below
# 4 and 0.11 (smollm2-135m, 1 to 4 bits); both must be passed, as the error of neighbouring tokens is not independent.
BIAS_ERRORS, BIAS_NOISE = 6.0, 0.2
NOISE_RATIO = 2.0  # measured to predicted noise; sound: 0.8 to 1.4
NOISY_KL = 0.1  # nats

MakeCodec = Callable[[CacheConfig, HeadShape, int], Codec]


@dataclass(frozen=True)
class HeadDrift:
    """One query head of one layer. Logs are natural: scores, their bias and noise, and KL are in nats."""

    layer: int
    head: int
    kv_head: int
    bias: float  # mean of score - (true score + the correction that the lost energy asks for), over sealed tokens and queries
    noise: float  # standard deviation of score - true score
    predicted_noise: float | None  # from the energy that the scanned planes lost
    mass_bias: float  # log of the weight of all sealed tokens - log of their true weight
    kl: float  # of true attention to the cache's, over sealed and exact tokens
    output_error: float  # |output - true output| / |true output|
    refined_mass: float | None  # true weight of the refined tokens among the sealed ones
    verdict: str  # ok | noisy (as the codec promises) | off (a fault)
    cause: str


@torch.inference_mode()
def drift(model: ServedModel, config: CacheConfig, ids: list[int], make: MakeCodec = make_codec,
          progress: Callable[[int, int], None] | None = None) -> list[HeadDrift]:
    """Every head of every layer, in order; ValueError when the prompt is too short to seal a page."""
    config.check_depth(model.layers)
    sealed = sealed_tokens(config, len(ids))
    shape = HeadShape(model.layers, model.first_kv_head, model.local_kv_heads, model.head_dim, model.dtype, model.device)
    layers, faults = [], []
    for trace in traces(model, ids):
        layer_config = config.for_layer(trace.layer)
        reading = Reading(make(layer_config, shape, trace.layer), layer_config, trace, sealed)
        faults.append(find_faults(reading))
        layers.append(measure(reading))
        if progress:
            progress(trace.layer + 1, model.layers)
    return [
        judged(layer, head, stats, faults, model.local_heads // model.local_kv_heads)
        for layer, heads in enumerate(layers)
        for head, stats in enumerate(heads)
    ]


def measure(reading: Reading) -> list[dict[str, float | None]]:
    """The numbers of each query head of a layer."""
    error = (reading.scanned - reading.true_scores) * math.log(2)
    predicted = None
    bias = error
    if reading.scannable:
        correction = expected_correction(reading) * math.log(2)
        predicted = (2 * correction.mean((1, 3))).sqrt()
        bias = error - correction if reading.codec.config.correction else error
        error = (reading.bare - reading.true_scores) * math.log(2)
    columns = {
        "bias": bias.mean((1, 3)),
        "noise": (error - error.mean((1, 3), keepdim=True)).square().mean((1, 3)).sqrt(),
        "predicted_noise": predicted,
        "mass_bias": (reading.sealed_partial.log_sum_exp() - reading.true_partial.log_sum_exp()).mean(1),
        "kl": divergence(reading),
        "output_error": (reading.output - reading.true_output).norm(dim=(1, 3)) / reading.true_output.norm(dim=(1, 3)).clamp(min=1e-30),
        "refined_mass": refined_mass(reading),
    }
    flat = {name: None if column is None else column.flatten().tolist() for name, column in columns.items()}
    return [{name: column and column[head] for name, column in flat.items()} for head in range(len(flat["bias"]))]


def divergence(reading: Reading) -> torch.Tensor:
    """KL of true attention to the cache's, nats [HK, G]: over the sealed tokens, which alone differ, and all exact ones as one event."""
    exact = reading.exact_partial.log_sum_exp().unsqueeze(-1)
    true, found = (torch.cat((scores * math.log(2), exact), -1).log_softmax(-1) for scores in (reading.true_scores, reading.final))
    return (true.exp() * (true - found)).sum(-1).mean(1)


def refined_mass(reading: Reading) -> torch.Tensor | None:
    if reading.refined is None:
        return None
    weights = torch.softmax(reading.true_scores * math.log(2), dim=-1)
    return weights.masked_fill(~reading.refined, 0.0).sum(-1).mean(1)
