"""The choice of scope `global`: which tokens of a whole sequence carry the attention, out of what each rank knows of its
own."""

from __future__ import annotations

import torch

from bitkv_dist.kernels.reference import Selection, Whole, competing, rank_keys, share_counts
from bitkv_dist.partial import Partial

NOTHING = torch.iinfo(torch.int64).min  # ranks below every token


class Ranking:
    """The keys of the best tokens seen so far: best int64 [HK, Q, R, k], k = as many as the sequence refines, R = 1 for a
    group, else G.

    mass: for a group, the partial [HK, Q, G] of each head's scanned scores over all sealed tokens.
    """

    def __init__(self, rule: Selection, sealed_tokens: int, shape: tuple[int, int, int], mass: Partial | None,
                 device: torch.device) -> None:
        self.group = rule.group
        self.log_sum_exp = None if mass is None else mass.m + torch.log2(mass.l)
        self.count = int(share_counts(torch.tensor(sealed_tokens), rule))
        heads = 1 if rule.group else shape[2]
        self.best = torch.full((*shape[:2], heads, self.count), NOTHING, device=device)

    def add(self, scores: torch.Tensor, granules: torch.Tensor) -> None:
        """scores [n, HK, Q, G, T] of the granules with these global indices, int64 [n]."""
        keys = rank_keys(competing(scores, self.group, self.log_sum_exp), granules).movedim(0, -2).flatten(-2)
        self.best = torch.cat((self.best, keys), dim=-1).topk(self.count).values

    def cut(self, gathered: torch.Tensor) -> Whole:
        """gathered int64 [ranks, HK, Q, R, k]: `best` of every rank."""
        best = gathered.movedim(0, -2).flatten(-2).topk(self.count).values
        last = best[..., -1] if self.count else torch.full(best.shape[:-1], torch.iinfo(torch.int64).max, device=best.device)
        return Whole(self.log_sum_exp, last)
