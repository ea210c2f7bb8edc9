"""Scope `global` of refinement: one ranking of a whole sequence's sealed tokens, over all ranks, before a layer attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bitkv_dist.codec.ranking import Ranking
from bitkv_dist.kernels.reference import Query, Whole
from bitkv_dist.subtree import SCORES_AT_ONCE

if TYPE_CHECKING:
    from bitkv_dist.layer import PackedLayer


def whole_sequence(layer: PackedLayer, sequence: int, query: Query, heads: tuple[int, int, int]) -> Whole:
    """Where scope global cuts the ranking of all sealed tokens, the same on every rank.

    Exchanges the keys of each rank's best tokens, as many as are refined in all; for groups, each head's mass before.
    """
    state, shard = layer.states[sequence], layer.cache.shard

    def counted(queries: int, records: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block, when it is scanned once more than attention does."""
        if layer.cache.step.count_reads:
            layer.cache.counted.bits += layer.codec.scan_cost(valid, queries)
        return records, valid

    log_sum_exp = None
    if layer.codec.selection.group:
        mass = lambda records, valid, _: layer.codec.mass(query, *counted(heads[1], records, valid))  # noqa: E731
        nodes = layer.nodes(state, (*heads, 0), state.held_end, mass)
        root = shard.reduce([nodes], [sequence])[0]
        log_sum_exp = root.m + torch.log2(root.l)
    count = layer.codec.refined_of(state.held_end - state.sink)
    at_once = max(1, SCORES_AT_ONCE // max(1, heads[0] * heads[2] * count * shard.ranks))
    cuts = []
    for first in range(0, heads[1], at_once):
        rows = slice(first, first + at_once)
        some = query.at(rows)
        ranking = Ranking(some.scale.shape, count, None if log_sum_exp is None else log_sum_exp[:, rows], some.scale.device)
        for records, valid, granules in state.granules(layer.granules_at_once(some.scale.shape)):
            ranking.add(layer.codec.scan(some, *counted(some.scale.shape[1], records, valid)), granules)
        cuts.append(ranking.cut(shard.gather(ranking.best)))
    return Whole(log_sum_exp, torch.cat(cuts, dim=1))
