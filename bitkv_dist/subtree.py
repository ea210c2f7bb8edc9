"""The merge tree over sealed granules, walked so that few of their partials live at a time.

A chunk of many queries has a large partial for every granule. Node (stride, offset) of the tree (partial.py) covers the
granules congruent to offset modulo stride: one with few enough granules is computed whole, and pairs are merged as they come,
node (s, o) = merge(node (2s, o), node (2s, o + s)). Beside one node's granules at most a partial per level lives. The bits are
those of all granules merged together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bitkv_dist.partial import Partial, empty, lane_width, tree

LEVELS = 8  # of the tree, at most
PARTIALS_AT_ONCE = 1 << 25  # elements of the outputs that a chunk of queries holds at a time, for granules and tree nodes
LEAST_GRANULES_AT_ONCE = 16  # whose partials live together; more of them where a partial is small:
SMALL_PARTIALS = 1 << 20  # elements
SCORES_AT_ONCE = 1 << 23  # elements of a score tensor that the reference attention holds at a time

Blocks = Callable[[int, int], Iterator[Partial]]  # (modulus, residue) -> partials of its granules here, in token order


def partials_at_once(elements: int) -> int:
    """How many granules' partials, their outputs of so many elements each, live together."""
    return max(LEAST_GRANULES_AT_ONCE, SMALL_PARTIALS // max(1, elements))


def queries_at_once(elements: int) -> int:
    """How many positions of a chunk, outputs of so many elements each, attend to sealed pages together: those of a block and
    of its merge, and one per level of the tree live at a time."""
    return max(1, PARTIALS_AT_ONCE // ((2 * LEAST_GRANULES_AT_ONCE + LEVELS) * elements))


def leaf_stride(granules: int, nodes: int, most: int) -> int:
    """The stride whose nodes have at most `most` of a sequence's granules, or the widest: then a node is one lane."""
    stride, width = nodes, lane_width(granules, nodes)
    while stride < width and granules > most * stride:
        stride *= 2
    return stride


def walk(blocks: Blocks, held: list[int], granules: int, nodes: int, most: int, shape: tuple[int, ...],
         device: torch.device) -> Partial:  # fmt: skip
    """The first `nodes` nodes of the tree: m, l [nodes, *shape[:-1]], o [nodes, *shape]; empty where this rank has no granule.

    held: global indices of the granules here, ascending; granules: how many all ranks have; most: how many partials may live
    together.
    """
    width, stride = lane_width(granules, nodes), leaf_stride(granules, nodes, most)
    *rows, dim = shape
    if not held:
        return empty((nodes, *rows), dim, device)
    if len(held) <= most:
        return tree(joined(list(blocks(1, 0))), torch.tensor(held, device=device), width, nodes)

    def leaf(residue: int) -> Partial:
        lanes = width // stride
        if lanes > 1:
            index = [granule // stride for granule in held if granule % stride == residue]
            return tree(joined(list(blocks(stride, residue))), torch.tensor(index, device=device), lanes, 1)
        lane = empty((1, *rows), dim, device)
        for part in blocks(stride, residue):
            turns = joined([lane, part])
            lane = tree(turns, torch.arange(len(turns.m), device=device), 1, 1)
        return lane

    leaves = stride // nodes
    found = []
    for residue in range(nodes):
        waiting: list[Partial] = []  # one of each level at most
        for count in range(leaves if any(granule % nodes == residue for granule in held) else 0):
            part = leaf(residue + nodes * reversed_bits(count, leaves))
            while count % 2:
                part = tree(joined([waiting.pop(), part]), torch.arange(2, device=device), 2, 1)
                count //= 2
            waiting.append(part)
        found.append(waiting[0] if waiting else empty((1, *rows), dim, device))
    return joined(found)


def reversed_bits(number: int, size: int) -> int:
    """The bits of a number below `size`, a power of two, in reverse order: leaves that are merged first follow one another."""
    return sum((number >> bit & 1) * (size >> (bit + 1)) for bit in range(size.bit_length() - 1))


def joined(parts: list[Partial]) -> Partial:
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
