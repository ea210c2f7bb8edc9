"""The merge tree of partials (bitkv_dist/partial.py), the same for splits and for ranks.

Granules go to lanes in token order, lanes to nodes by halves. An empty side is passed over without arithmetic: its l and o may
hold NaN. Nothing is fused, so that the bits depend neither on the shape of a tile nor on which rank merged.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.triton.tables import config

TILE_ELEMENTS = 2048  # of partial outputs that a program holds in registers
INDICES_AT_ONCE = 512
WARPS = 4

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # m, l, o


@triton.jit
def merge(m, l, o, m2, l2, o2):
    """Two partials of disjoint sets -> that of their union; m and l broadcast against o."""
    peak = tl.maximum(m, m2)
    empty, empty2 = m == float("-inf"), m2 == float("-inf")
    base = tl.where(empty & empty2, 0.0, peak)
    weight, weight2 = tl.exp2(m - base), tl.exp2(m2 - base)
    both = l * weight + l2 * weight2
    total = tl.where(empty, tl.where(empty2, 0.0, l2), tl.where(empty2, l, both))
    both = o * weight + o2 * weight2
    out = tl.where(empty, tl.where(empty2, 0.0, o2), tl.where(empty2, o, both))
    return peak, total, out


@triton.jit(do_not_specialize=["count"])
def fill_lanes(index, count, m, l, o, lane_m, lane_l, lane_o, width, rows, DIM: tl.constexpr, WIDE: tl.constexpr,
               ROWS: tl.constexpr, INDICES: tl.constexpr):  # fmt: skip
    """Program (lane, block of rows): the granules whose index is `lane` modulo `width`, in token order, into one partial."""
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (block * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, WIDE)[None, :]
    there, inside = row < rows, (row < rows) & (d < DIM)
    run_m = tl.full((ROWS, 1), float("-inf"), tl.float32)
    run_l = tl.zeros((ROWS, 1), tl.float32)
    run_o = tl.zeros((ROWS, WIDE), tl.float32)
    place = tl.arange(0, INDICES)
    for first in range(0, count, INDICES):
        left = (first + place < count) & (tl.load(index + first + place, mask=first + place < count, other=0) % width == lane)
        for _ in range(tl.sum(left.to(tl.int32))):
            found = tl.min(tl.where(left, place, INDICES))
            left = left & (place != found)
            at = (first + found).to(tl.int64) * rows + row
            next_m = tl.load(m + at, mask=there, other=float("-inf"))
            next_l = tl.load(l + at, mask=there, other=0.0)
            next_o = tl.load(o + at * DIM + d, mask=inside, other=0.0)
            run_m, run_l, run_o = merge(run_m, run_l, run_o, next_m, next_l, next_o)
    at = lane * rows + row
    tl.store(lane_m + at, run_m, mask=there)
    tl.store(lane_l + at, run_l, mask=there)
    tl.store(lane_o + at * DIM + d, run_o, mask=inside)


@triton.jit
def halve_lanes(lane_m, lane_l, lane_o, node_m, node_l, node_o, rows, nodes, DIM: tl.constexpr, PART: tl.constexpr,
                LEAVES: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """Program (row, part of the dims, node): the lanes node, node + nodes, .. merged by halves.

    Leaf p of the tile is the one whose number among the node's lanes is p with its bits reversed: the two halves that a level
    merges then stand side by side.
    """
    row, part, node = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    leaf = tl.arange(0, LEAVES)
    number = tl.zeros((LEAVES,), tl.int32)
    for level in tl.static_range(LEVELS):
        number = number | (((leaf >> level) & 1) << (LEVELS - 1 - level))
    d = part * PART + tl.arange(0, PART)
    at = (node + number.to(tl.int64) * nodes) * rows + row
    m, l = tl.load(lane_m + at)[None, :], tl.load(lane_l + at)[None, :]
    o = tl.load(lane_o + at[None, :] * DIM + d[:, None], mask=(d < DIM)[:, None], other=0.0)
    for _ in tl.static_range(LEVELS):
        m, m2 = tl.split(tl.reshape(m, (1, m.shape[1] // 2, 2)))
        l, l2 = tl.split(tl.reshape(l, (1, l.shape[1] // 2, 2)))
        o, o2 = tl.split(tl.reshape(o, (PART, o.shape[1] // 2, 2)))
        m, l, o = merge(m, l, o, m2, l2, o2)
    at = node * rows + row
    if part == 0:
        tl.store(node_m + at, tl.reshape(m, ()))
        tl.store(node_l + at, tl.reshape(l, ()))
    tl.store(node_o + at * DIM + d, tl.reshape(o, (PART,)), mask=d < DIM)


def lanes(m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, index: torch.Tensor, width: int) -> Three:
    """Partials of granules m, l [n, ...], o [n, ..., D] with ascending int64 indices -> those of the lanes [width, ...]."""
    m, l, o = m.contiguous(), l.contiguous(), o.contiguous()
    rows, dim = math.prod(m.shape[1:]), o.shape[-1]
    found = tuple(t.new_empty(width, *t.shape[1:]) for t in (m, l, o))
    wide = triton.next_power_of_2(max(1, dim))
    block = max(1, min(triton.next_power_of_2(max(1, rows)), TILE_ELEMENTS // wide))
    if rows:
        fill_lanes[(width, triton.cdiv(rows, block))](
            index, len(index), m, l, o, *found, width, rows, DIM=dim, WIDE=wide, ROWS=block, INDICES=INDICES_AT_ONCE,
            num_warps=WARPS, enable_fp_fusion=False, **config(m.device).registers(),
        )  # fmt: skip
    return found


def halve(m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, nodes: int) -> Three:
    """Lanes m, l [width, ...], o [width, ..., D], contiguous, width and `nodes` powers of two -> the first `nodes` nodes."""
    leaves, rows, dim = len(m) // nodes, math.prod(m.shape[1:]), o.shape[-1]
    if leaves == 1:
        return m, l, o
    found = tuple(t.new_empty(nodes, *t.shape[1:]) for t in (m, l, o))
    part = max(1, min(triton.next_power_of_2(max(1, dim)), TILE_ELEMENTS // leaves))
    # A level's maxima and sums, which every warp holds, fill registers too.
    warps = 256 // config(m.device).lanes if leaves > 128 else WARPS
    if rows:
        halve_lanes[(rows, max(1, triton.cdiv(dim, part)), nodes)](
            m, l, o, *found, rows, nodes, DIM=dim, PART=part, LEAVES=leaves, LEVELS=leaves.bit_length() - 1,
            num_warps=warps, enable_fp_fusion=False, **config(m.device).registers(),
        )  # fmt: skip
    return found


def tree(m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, index: torch.Tensor, width: int, nodes: int) -> Three:
    """Partials of granules m, l [n, ...], o [n, ..., D] with ascending int64 indices -> those of the first `nodes` tree nodes.

    width = a power of two >= nodes. Empty nodes are (-inf, 0, 0) whatever the empty granules' l and o held.
    """
    return halve(*lanes(m, l, o, index, width), nodes)
