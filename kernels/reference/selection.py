"""Which sealed tokens are refined: those that carry the attention by their scanned scores, ties to the lower position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bitkv_dist.kernels.reference.sums import exp2, fold_sum

WEIGHT_ONE = float(1 << 40)  # a granule's largest weight as an integer, so that sums of weights are exact in any order


class Whole(NamedTuple):
    """The choice among all sealed tokens of a sequence, made before a granule is attended to.

    log_sum_exp fp32 [HK, Q, G] over all sealed tokens, base 2; None when heads choose alone. cut int64 [HK, Q, R]: the smallest
    of `rank_keys` that is refined, R = 1 for a group, G for heads.
    """

    log_sum_exp: torch.Tensor | None
    cut: torch.Tensor


class Selection(NamedTuple):
    """How tokens are chosen for refinement; `group` = one set for all G heads.

    By default inside each granule, the share `value`, at least `min_tokens`. tail fp32 [HK, 1, R]: instead of a share the
    fewest tokens that leave no more than this part of the granule's estimated weight. floor fp32 [HK, Q, G]: a granule whose
    best score is below it (for a group: in all its heads) refines nothing. whole: chosen among all granules, which replaces all
    of these.
    """

    value: float
    min_tokens: int
    group: bool
    tail: torch.Tensor | None = None
    floor: torch.Tensor | None = None
    whole: Whole | None = None


def select(scores: torch.Tensor, sealed: torch.Tensor, rule: Selection, granules: torch.Tensor | None = None) -> torch.Tensor:
    """Boolean mask like scores [n, HK, Q, G, T], base 2: the tokens to refine.

    sealed int64 [n] counts each granule's valid tokens. granules int64 [n]: their global indices, which `rule.whole` needs.
    """
    if rule.whole is not None:
        ranked = competing(scores, rule.group, rule.whole.log_sum_exp)
        mask = rank_keys(ranked, granules) >= rule.whole.cut.unsqueeze(-1)
    else:
        ranked = competing(scores, rule.group)
        sealed = sealed[:, None, None, None]
        counts = share_counts(sealed, rule) if rule.tail is None else weight_counts(descending(ranked), sealed, rule)
        if rule.floor is not None:
            matters = scores.amax(-1) >= rule.floor
            counts = torch.where(matters.any(-1, keepdim=True) if rule.group else matters, counts, 0)
        mask = largest(ranked, counts)
    return mask.expand_as(scores) & ~torch.isinf(scores)


def competing(scores: torch.Tensor, group: bool, log_sum_exp: torch.Tensor | None = None) -> torch.Tensor:
    """What tokens compete with, fp32 [n, HK, Q, R, T]: a head's score, or the largest (score - log-sum-exp) in a group.

    log_sum_exp fp32 [HK, Q, G] of each head; None = inside the granule.
    """
    if not group or scores.shape[-2] == 1:
        return scores
    if log_sum_exp is None:
        peak, mass = peak_and_mass(scores)
        log_sum_exp = torch.where(torch.isinf(peak), 0.0, peak) + torch.log2(mass)
    return (scores - log_sum_exp.unsqueeze(-1)).amax(-2, keepdim=True)


def peak_and_mass(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, l) of a softmax over the last dim, base 2; (-inf, 0) where all scores are -inf."""
    peak = scores.amax(-1)
    return peak, fold_sum(exp2(scores - torch.where(torch.isinf(peak), 0.0, peak).unsqueeze(-1)))


def share_counts(sealed: torch.Tensor, rule: Selection) -> torch.Tensor:
    """k = max(min_tokens, ceil(value * sealed)), at most `sealed`, int64 like it."""
    return torch.ceil(sealed.double() * rule.value).long().clamp(min=rule.min_tokens).minimum(sealed)


def weight_counts(top: torch.Tensor, sealed: torch.Tensor, rule: Selection) -> torch.Tensor:
    """The fewest tokens that leave at most `rule.tail` of the weight, int64 [n, HK, Q, R].

    top [n, HK, Q, R, T]: what tokens compete with, descending; sealed [n, 1, 1, 1]. Weights count as integers relative to the
    largest: their sums do not depend on an order.
    """
    weights = torch.round(exp2(top - top[..., :1]) * WEIGHT_ONE).nan_to_num().long()  # NaN where nothing is sealed
    reached = weights.cumsum(-1)
    needed = reached[..., -1] - (reached[..., -1].double() * rule.tail.double()).long()
    return (reached - weights < needed.unsqueeze(-1)).sum(-1).clamp(min=rule.min_tokens).minimum(sealed)


def descending(x: torch.Tensor) -> torch.Tensor:
    """The values of each row [.., T], largest first."""
    return x.sort(dim=-1, descending=True).values


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


def rank_keys(ranked: torch.Tensor, granules: torch.Tensor) -> torch.Tensor:
    """int64 like ranked [n, .., T] that order as (value, then lower position in the sequence first) do: no two tokens tie.

    granules int64 [n]. The upper half is the float's bits in the order of its values, the lower half counts down with the
    position.
    """
    bits = (ranked + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    first = (granules * ranked.shape[-1]).view(-1, *[1] * (ranked.dim() - 1))
    position = first + torch.arange(ranked.shape[-1], device=ranked.device)
    return (order << 32) + (0xFFFFFFFF - position)
