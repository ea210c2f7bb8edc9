"""The choice of scope `global`: the tokens that carry a whole sequence's attention, out of what each rank knows of its own."""

from __future__ import annotations

import torch

from bitkv_dist.kernels.reference import competing, rank_keys

NOTHING = torch.iinfo(torch.int64).min  # ranks below every token
EVERYTHING = torch.iinfo(torch.int64).max


class Ranking:
    """The keys of the `count` best tokens seen so far, int64 [HK, Q, R, count], R = 1 for a group, G for heads.

    log_sum_exp fp32 [HK, Q, G]: for a group, that of each head's scanned scores over all sealed tokens.
    """

    def __init__(self, shape: tuple[int, int, int], count: int, log_sum_exp: torch.Tensor | None, device: torch.device) -> None:
        self.log_sum_exp, self.count = log_sum_exp, count
        heads = shape[2] if log_sum_exp is None else 1
        self.best = torch.full((*shape[:2], heads, count), NOTHING, device=device)

    def add(self, scores: torch.Tensor, granules: list[int]) -> None:
        """scores [n, HK, Q, G, T] of the granules with these global indices."""
        ranked = competing(scores, self.log_sum_exp is not None, self.log_sum_exp)
        keys = rank_keys(ranked, torch.tensor(granules, device=scores.device))
        self.best = torch.cat((self.best, keys.movedim(0, -2).flatten(-2)), dim=-1).topk(self.count).values

    def cut(self, gathered: torch.Tensor) -> torch.Tensor:
        """The smallest key that is refined, int64 [HK, Q, R]; gathered int64 [ranks, HK, Q, R, count]: `best` of every rank."""
        if self.count == 0:
            return torch.full(gathered.shape[1:-1], EVERYTHING, device=gathered.device)
        return gathered.movedim(0, -2).flatten(-2).topk(self.count).values[..., -1]
