"""The one exchange of a layer's attention: packed fp32 partials of all sequence ranks, merged by the tree of partial.py.

allgather: every rank gets the partials of all heads that one of them goes on with. alltoall: every rank gets those of the
heads that it goes on with itself. Both keep the order of the tree, so that a head has the same bits on every rank and for every
number of ranks. allreduce: a maximum, then a sum of numerators and denominators scaled by it, in the order of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitkv_dist.kernels.reference import exp2
from bitkv_dist.partial import Partial, empty, root
from bitkv_dist.placement import residue_count, residues, slots

if TYPE_CHECKING:
    from bitkv_dist.parallel.mesh import Mesh

PACKED = 2  # numbers of a partial beside its output: m and l


class Exchange:
    """Merges the partials of a layer's attention as the mesh is told to; `Mesh.sp_bytes` counts what a rank receives."""

    def __init__(self, mesh: Mesh, heads: list[range], attended: int) -> None:
        """heads: of each SP rank, those it goes on with, counted from the first of the `attended` ones that all of them attend
        with. More TP ranks than KV heads attend with all heads of a KV head and share out what goes on."""
        self.mesh, self.heads = mesh, heads
        used = [own for own in heads if own]
        self.used = range(min(own.start for own in used), max(own.stop for own in used))  # by any of the SP ranks
        self.all_heads = mesh.sp == 1 or (mesh.exchange != "alltoall" and len(self.used) == attended)

    def __call__(self, nodes: list[Partial], sequences: list[int]) -> list[Partial]:
        """nodes[i]: this rank's tree nodes [V, HK, n, G] of sequence sequences[i] -> roots [HK, n, G], without `all_heads` only
        of those that come (alltoall: this rank's), the others are empty."""
        mesh = self.mesh
        place = sequences, mesh.sp_rank, mesh.sp
        if mesh.exchange == "alltoall":
            return combine_heads(nodes, *place, self.heads, mesh.swap_sp)
        sent = nodes if self.all_heads else [of_heads(node, self.used) for node in nodes]
        if mesh.exchange == "allreduce":
            found = combine_sums(sent, *place, mesh.largest_sp, mesh.sum_sp)
        else:
            found = combine(sent, *place, mesh.gather_sp)
        return found if self.all_heads else [among(part, self.used, nodes[0].m.shape[3]) for part in found]

    def collective(self, head_dim: int, device: torch.device) -> tuple[int, Callable[[], object]]:
        """Bytes that a rank sends for one sequence's query in one layer, and a call that only sends them: for measuring."""
        mesh, count = self.mesh, len(self.used)
        if mesh.exchange == "allreduce":
            top, sums = torch.zeros(count, device=device), torch.zeros(count, 1 + head_dim, device=device)
            return 4 * (top.numel() + sums.numel()), lambda: (mesh.largest_sp(top), mesh.sum_sp(sums))
        if mesh.exchange == "alltoall":
            width = max(map(len, self.heads))
            sent = torch.zeros(mesh.sp, slots(mesh.sp), width, PACKED + head_dim, device=device)
            return 4 * sent.numel(), lambda: mesh.swap_sp(sent)
        sent = torch.zeros(slots(mesh.sp), count, PACKED + head_dim, device=device)
        return 4 * sent.numel(), lambda: mesh.gather_sp(sent)


def combine(
    nodes: list[Partial], sequences: list[int], rank: int, ranks: int, gather: Callable[[Tensor], Tensor]
) -> list[Partial]:
    """Merge every rank's tree nodes into the whole tree's root, for each of a step's sequences.

    nodes[i]: Partial [V, ...] of sequence sequences[i], of which this rank's own residues are sent (all rows [...] have the
    same shape). gather: fp32 [*s] -> [ranks, *s]. Returns Partials [...], the same bits on every rank and for every number of
    ranks.
    """
    if ranks == 1:
        return [root(node) for node in nodes]
    gathered = gather(packed(nodes, sequences, rank, ranks))  # [ranks, sequences, slots, ..., 2 + D]
    return [root(in_tree_order(gathered[:, i], sequence, ranks)) for i, sequence in enumerate(sequences)]


def combine_heads(
    nodes: list[Partial], sequences: list[int], rank: int, ranks: int, heads: list[range], swap: Callable[[Tensor], Tensor]
) -> list[Partial]:
    """`combine` for the heads of heads[rank] alone, of nodes with rows [HK, n, G]; the roots of the others stay empty.

    heads[i]: what rank i gets, and perhaps others too. swap: fp32 [ranks, *s], one part for each rank -> one from each.
    """
    if ranks == 1:
        return [root(node) for node in nodes]
    _, kv_heads, _, group = nodes[0].m.shape
    mine = packed(nodes, sequences, rank, ranks).transpose(2, 3).flatten(3, 4)  # [sequences, slots, n, H, 2 + D]
    width, own = max(map(len, heads)), heads[rank]
    sent = mine.new_zeros(ranks, *mine.shape[:3], width, mine.shape[-1])
    for place, theirs in zip(sent, heads, strict=True):
        place[..., : len(theirs), :] = mine[..., theirs.start : theirs.stop, :]
    received = swap(sent)[..., : len(own), :]  # [ranks, sequences, slots, n, own heads, 2 + D]
    found = []
    for i, sequence in enumerate(sequences):
        whole = empty((mine.shape[2], kv_heads * group), mine.shape[-1] - PACKED, mine.device)
        for part, ours in zip(whole, root(in_tree_order(received[:, i], sequence, ranks)), strict=True):
            part[:, own.start : own.stop] = ours
        found.append(Partial(*(part.unflatten(1, (kv_heads, group)).transpose(0, 1).contiguous() for part in whole)))
    return found


def combine_sums(
    nodes: list[Partial],
    sequences: list[int],
    rank: int,
    ranks: int,
    largest: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
) -> list[Partial]:
    """`combine` by reductions over the ranks: largest and total, fp32 [*s] -> [*s]. The order of the sum is not ours."""
    mine = [root(only(node, residues(rank, sequence, ranks))) for node, sequence in zip(nodes, sequences, strict=True)]
    if ranks == 1:
        return mine
    m, l, o = (torch.stack(parts) for parts in zip(*mine, strict=True))
    top = largest(m.clone())
    weight = exp2(m - torch.where(torch.isneginf(top), 0.0, top)).unsqueeze(-1)
    sums = total(torch.cat((l.unsqueeze(-1), o), dim=-1) * weight)
    return [Partial(*parts) for parts in zip(top, sums[..., 0], sums[..., 1:], strict=True)]


def of_heads(nodes: Partial, heads: range) -> Partial:
    """Some of the query heads that share the one KV head of nodes [V, 1, n, G]."""
    assert nodes.m.shape[1] == 1, "heads are left out only where TP ranks share a KV head"
    return Partial(*(part[:, :, :, heads.start : heads.stop] for part in nodes))


def among(found: Partial, heads: range, group: int) -> Partial:
    """The roots [1, n, len(heads)] of some of the query heads in their place among all, [1, n, G]; the others are empty."""
    whole = empty((*found.m.shape[:2], group), found.o.shape[-1], found.m.device)
    for part, ours in zip(whole, found, strict=True):
        part[:, :, heads.start : heads.stop] = ours
    return whole


def only(nodes: Partial, own: range) -> Partial:
    """The nodes of these residues; the others, which may hold anything, are empty."""
    kept = empty(nodes.m.shape, nodes.o.shape[-1], nodes.m.device)
    for part, node in zip(kept, nodes, strict=True):
        part[as_slice(own)] = node[as_slice(own)]
    return kept


def as_slice(own: range) -> slice:
    """To index with: a list of numbers from the host could not be part of a recorded step."""
    return slice(own.start, own.stop, own.step)


def packed(nodes: list[Partial], sequences: list[int], rank: int, ranks: int) -> Tensor:
    """What a rank sends: its own nodes of each sequence, padded with empty ones, [sequences, slots, ..., 2 + D]."""
    blank = empty((slots(ranks), *nodes[0].m.shape[1:]), nodes[0].o.shape[-1], nodes[0].m.device)
    sent = []
    for node, sequence in zip(nodes, sequences, strict=True):
        own = residues(rank, sequence, ranks)
        mine = as_slice(own)
        m, l, o = (torch.cat((part[mine], fill[len(own) :])) for part, fill in zip(node, blank, strict=True))
        sent.append(torch.cat((m.unsqueeze(-1), l.unsqueeze(-1), o), dim=-1))
    return torch.stack(sent)


def in_tree_order(gathered: Tensor, sequence: int, ranks: int) -> Partial:
    """[ranks, slots, ..., 2 + D] of one sequence -> its V tree nodes, Partial [V, ...]."""
    rows = gathered.roll(-sequence, 0).transpose(0, 1).flatten(0, 1)[: residue_count(ranks)]  # slot by slot, residue 0 first
    return Partial(rows[..., 0], rows[..., 1], rows[..., PACKED:])
