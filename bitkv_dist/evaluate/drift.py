"""Where a packed cache departs from the exact one: score by score, head by head, on the queries and keys of a real prompt.

Codes are noisy by design. What a sound codec does not do is miss in the mean, or miss by more than the energy that its codes
lost predicts. A head that does is off, and faults.py follows its numbers through the codec to the first step that is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import make_codec
from bitkv_dist.evaluate.faults import Faults, find_faults, name_foreign_scales
from bitkv_dist.evaluate.reading import Reading
from bitkv_dist.evaluate.trace import MakeCodec, Trace, trace
from bitkv_dist.model import ServedModel
from bitkv_dist.prefill import Progress

# Limits for the mean of the scores, in standard errors and in standard deviations of the predicted noise. Sound codecs stay
# below 6.6 and 0.14 (smollm2-135m, 1 to 4 bits); both must be passed, as errors of neighbouring tokens are not independent.
BIAS_ERRORS, BIAS_NOISE = 7.0, 0.3
NOISE_RATIO = 2.0  # measured to predicted noise; sound: 0.8 to 1.4
NOISY_KL = 0.1  # nats


@dataclass(frozen=True)
class HeadDrift:
    """One query head of one layer. Logs are natural: scores, their bias and noise, and KL are in nats."""

    layer: int
    head: int
    kv_head: int
    bias: float  # mean over sealed tokens and queries of score - (true score + the correction that is due)
    noise: float  # standard deviation of uncorrected score - true score
    mass_bias: float  # log of the weight of all sealed tokens - log of their true weight
    kl: float  # of true attention to the cache's, over sealed and exact tokens
    output_error: float  # |output - true output| / |true output|
    verdict: str  # ok | noisy (as the codec promises) | off (a fault)
    cause: str
    predicted_noise: float | None = None  # from the energy that a sound code loses; None = the codec predicts none
    refined_mass: float | None = None  # true weight of the refined tokens among the sealed ones; None = nothing is refined


@torch.inference_mode()
def drift(model: ServedModel, config: CacheConfig, ids: list[int], make: MakeCodec = make_codec,
          progress: Progress = lambda done, total: None) -> list[HeadDrift]:
    """Every head of every layer, in order; `make` puts another codec into the layers. ValueError when no page is sealed."""
    seen: list[tuple[dict[str, torch.Tensor], Faults, int]] = []

    def visit(trace: Trace) -> None:
        reading = Reading(trace)
        seen.append((measure(reading), find_faults(reading), reading.k.shape[1]))

    trace(model, config, ids, visit, make, progress)
    name_foreign_scales([faults for _, faults, _ in seen])
    found = []
    for layer, (columns, faults, tokens) in enumerate(seen):
        for head, ((kv_head, within), causes) in enumerate(faults.causes.items()):
            numbers = {name: column[kv_head, within].item() for name, column in columns.items()}
            found.append(HeadDrift(layer, head, kv_head, **numbers, **judged(numbers, causes, tokens)))
    return found


def judged(numbers: dict[str, float], causes: list[str], tokens: int) -> dict[str, str]:
    """Verdict and cause of a head whose scores were averaged over `tokens` sealed tokens."""
    if causes:
        return {"verdict": "off", "cause": ", ".join(causes)}
    if noise := numbers.get("predicted_noise"):
        bias = abs(numbers["bias"])
        if bias > BIAS_NOISE * noise and bias > BIAS_ERRORS * noise / math.sqrt(tokens):
            return {"verdict": "off", "cause": "mean of the scores; no step of the codec explains it"}
        if numbers["noise"] > NOISE_RATIO * noise:
            return {"verdict": "off", "cause": "noise of the scores; no step of the codec explains it"}
    return {"verdict": "noisy" if numbers["kl"] > NOISY_KL else "ok", "cause": ""}


def measure(reading: Reading) -> dict[str, torch.Tensor]:
    """The numbers of a layer by name, each [HK, G]; what a codec does not have is left out."""
    to_nats = math.log(2)
    error = (reading.bare - reading.true_scores) * to_nats
    columns = {
        "bias": error.mean((1, 3)),
        "noise": (error - error.mean((1, 3), keepdim=True)).square().mean((1, 3)).sqrt(),
        "mass_bias": (reading.sealed_partial.log_sum_exp() - reading.true_partial.log_sum_exp()).mean(1),
        "kl": divergence(reading),
        "output_error": distance(reading.output, reading.true_output),
    }
    if reading.scannable:
        due = reading.due_correction * to_nats
        columns["predicted_noise"] = (2 * due.mean((1, 3))).sqrt()
        if reading.codec.config.correction:
            applied = due * reading.codec.correction_share
            columns["bias"] = ((reading.scanned - reading.true_scores) * to_nats - applied).mean((1, 3))
    if reading.refined is not None:
        weights = torch.softmax(reading.true_scores * to_nats, dim=-1)
        columns["refined_mass"] = weights.masked_fill(~reading.refined, 0.0).sum(-1).mean(1)
    return columns


def divergence(reading: Reading) -> torch.Tensor:
    """KL of true attention to the cache's, nats [HK, G]: over the sealed tokens, and all exact ones as one event.

    Among the exact tokens both give the same shares, so that taking them together loses nothing.
    """
    exact = reading.exact_partial.log_sum_exp().unsqueeze(-1)

    def distribution(scores: torch.Tensor) -> torch.Tensor:
        return torch.cat((scores * math.log(2), exact), -1).log_softmax(-1)

    true, found = distribution(reading.true_scores), distribution(reading.final)
    return (true.exp() * (true - found)).sum(-1).mean(1)


def distance(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|x - right| / |right| of outputs [HK, n, G, D] -> [HK, G]."""
    return (x - right).norm(dim=(1, 3)) / right.norm(dim=(1, 3)).clamp(min=1e-30)
