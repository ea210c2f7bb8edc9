"""Which tokens are refined: those that carry the attention by their scanned scores, ties to the lower position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.sums import exp2, fold_sum


class Selection(NamedTuple):
    """How tokens are chosen for refinement inside a granule: `value` is the share, at least `min_tokens`; `group` = one set for all G heads."""

    value: float
    min_tokens: int
    group: bool


def select(scores: torch.Tensor, sealed: torch.Tensor, rule: Selection) -> torch.Tensor:
    """Boolean mask like scores [n, HK, Q, G, T]: the tokens with the largest weight in each granule, ties to the lower position.

    sealed int64 [n] counts the valid tokens of each granule; k = max(min_tokens, ceil(value * sealed)), at most sealed. For a group a
    token counts with its largest (score - log-sum-exp of that head inside the granule).
    """
    ranked = scores
    if rule.group and scores.shape[-2] > 1:
        peak = scores.amax(-1, keepdim=True)
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        mass = fold_sum(exp2(scores - peak)).unsqueeze(-1)
        ranked = (scores - (peak + torch.log2(mass))).amax(-2, keepdim=True)
    counts = torch.ceil(sealed.double() * rule.value).long().clamp(min=rule.min_tokens).minimum(sealed)
    return largest(ranked, counts[:, None, None, None]).expand_as(scores) & ~torch.isinf(scores)


def largest(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of the counts[..] largest entries of each row of x [.., T], ties to the lower position."""
    most = int(counts.max())
    if most == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    top = x.topk(most, dim=-1).values
    index = (counts - 1).clamp(min=0).expand(x.shape[:-1]).unsqueeze(-1)
    threshold = top.gather(-1, index)
    mask = x > threshold
    ties = x == threshold
    room = counts.unsqueeze(-1) - mask.sum(-1, keepdim=True)
    return mask | (ties & (ties.cumsum(-1) <= room))
