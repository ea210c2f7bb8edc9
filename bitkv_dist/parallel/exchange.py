"""The one exchange of a layer's decode step: packed fp32 partials of every rank, gathered, and put in the order of the merge
tree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitkv_dist.parallel.placement import residue_count, residues, slots
from bitkv_dist.partial import Partial, empty, root


def combine(
    nodes: list[Partial], sequences: list[int], rank: int, ranks: int, gather: Callable[[torch.Tensor], torch.Tensor]
) -> list[Partial]:
    """Merge every rank's tree nodes into the whole tree's root, for each of a step's sequences.

    nodes[i]: Partial [V, ...] of sequence sequences[i], of which this rank's own residues are sent (all rows [...] have the
    same shape). gather: fp32 [*s] -> [ranks, *s]. Returns Partials [...], the same bits on every rank and for every number of
    ranks.
    """
    if ranks == 1:
        return [root(node) for node in nodes]
    width, dim = slots(ranks), nodes[0].o.shape[-1]
    blank = empty((width, *nodes[0].m.shape[1:]), dim, nodes[0].m.device)
    sent = []
    for node, sequence in zip(nodes, sequences, strict=True):
        own = residues(rank, sequence, ranks)
        # A slice, not a list: numbers from the host could not be part of a recorded step.
        mine = slice(own.start, own.stop, own.step)
        parts = [torch.cat((part[mine], fill[len(own) :])) for part, fill in zip(node, blank, strict=True)]
        sent.append(torch.cat((parts[0].unsqueeze(-1), parts[1].unsqueeze(-1), parts[2]), dim=-1))
    gathered = gather(torch.stack(sent))  # [ranks, sequences, slots, ..., 2 + D]
    return [root(in_tree_order(gathered[:, i], sequence, ranks)) for i, sequence in enumerate(sequences)]


def in_tree_order(gathered: torch.Tensor, sequence: int, ranks: int) -> Partial:
    """[ranks, slots, ..., 2 + D] of one sequence -> its V tree nodes, Partial [V, ...]."""
    rows = gathered.roll(-sequence, 0).transpose(0, 1).flatten(0, 1)[: residue_count(ranks)]  # slot by slot, residue 0 first
    return Partial(rows[..., 0], rows[..., 1], rows[..., 2:])
