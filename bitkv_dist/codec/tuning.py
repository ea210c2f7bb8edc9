"""What a sequence's own queries teach a layer about its scanned scores, head by head.

A probe is a prompt query whose true scores are at hand. Its statistics over all sealed tokens it sees come as the root of the
merge tree, so they have the same bits for any number of ranks. Two lessons: the slope of true on scanned scores (score:
fitted), and the true weight of what stays unrefined against the estimated one (score: fitted, rule: mass).
"""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.kernels.reference import divide, safe_divide, tree_sum
from bitkv_dist.partial import Partial

SLOPE, TAIL = "slope", "tail"
LEARNT, PROBES = ("factor", "offset", "tail", "covered"), "probes."
STEEPEST = 2.0  # a factor beyond it, or below its inverse, is an accident of few probes
# Estimated weight that may stay unrefined, as a multiple of the weight that may truly: the candidates of rule mass.
TAIL_FACTORS = tuple(2.0 ** (1 - i / 2) for i in range(17))


class Tuning:
    """One sequence in one layer. factor, offset fp32 [HK, 1, G] of scanned scores and tail [HK, 1, R] of rule mass, or None:
    not asked for, or no probe yet. covered fp32 [HK, 1, G]: the share of the true sealed weight that rule mass refined for the
    probes.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.fitted = config.score == "fitted"
        self.target = config.refine.value if config.refines and config.refine.rule == "mass" else None
        self.group = config.refines and config.refine.granularity == "group"
        self.lessons = (*[SLOPE] * self.fitted, *[TAIL] * (self.fitted or self.target is not None))
        self.factor = self.offset = self.tail = self.covered = None
        self.probes: dict[str, list[torch.Tensor]] = {lesson: [] for lesson in self.lessons}

    @property
    def tails(self) -> list[float]:
        """Candidates for `tail`, descending; [] without rule mass."""
        return [] if self.target is None else [min(1.0, (1 - self.target) * factor) for factor in TAIL_FACTORS]

    def width(self, lesson: str) -> int:
        """Numbers that a probe tells each head in a lesson."""
        return 2 if lesson == SLOPE else 2 * max(1, len(self.tails))

    def learn(self, lesson: str, roots: list[Partial]) -> None:
        """Take in the roots of more probes, Partial [HK, 1, G] with the output of the codec's `measure`."""
        if lesson == SLOPE:
            self.probes[lesson] += [root.o for root in roots]
            xy, xx = tree_sum(torch.stack(self.probes[lesson]), 0).unbind(-1)
            self.factor = torch.where(xx == 0, 1.0, safe_divide(xy, xx)).clamp(1 / STEEPEST, STEEPEST)
        else:
            self.probes[lesson] += [root.normalised() for root in roots]
            self.weigh(torch.stack(self.probes[lesson]))

    def state(self) -> dict[str, torch.Tensor]:
        """All that was learnt, as tensors [n, HK, ..]: `probes.LESSON` of n probes, and the fields, n = 1."""
        probes = {f"{PROBES}{lesson}": torch.stack(found) for lesson, found in self.probes.items() if found}
        return probes | {name: getattr(self, name).unsqueeze(0) for name in LEARNT if getattr(self, name) is not None}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`, on a Tuning that has learnt nothing."""
        for name, tensor in state.items():
            if name.startswith(PROBES):
                self.probes[name.removeprefix(PROBES)] = list(tensor.unbind(0))
            else:
                setattr(self, name, tensor.squeeze(0))

    def weigh(self, shares: torch.Tensor) -> None:
        """shares fp32 [probes, HK, 1, G, 2 C] of the sealed weight that the C candidates leave unrefined: true, then
        estimated."""
        true, estimated = shares.unflatten(-1, (2, -1)).unbind(-2)
        left = mean(true)  # [HK, 1, G, C]
        choice = torch.zeros_like(left[..., 0], dtype=torch.int64)
        if self.target is not None:
            judged = divide(tree_sum(left, 2), left.shape[2]).unsqueeze(2) if self.group else left
            leave_too_much = (judged > 1 - self.target).int().cumprod(-1).sum(-1)  # candidates before the first that does not
            first = leave_too_much.clamp(max=len(self.tails) - 1)
            self.tail = torch.tensor(self.tails, device=left.device)[first]
            choice = first.expand_as(choice)
        left = left.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        self.covered = 1 - left
        if self.fitted:
            pick = choice.expand_as(true[..., 0]).unsqueeze(-1)
            ratio = safe_divide(true.gather(-1, pick), estimated.gather(-1, pick)).squeeze(-1)
            self.offset = mean(torch.where(ratio > 0, torch.log2(ratio), 0.0))


def mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the first dim, in a fixed order."""
    return divide(tree_sum(x, 0), x.shape[0])
