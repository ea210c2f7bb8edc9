"""What the columns and rows of a tile stand for.

A tensor-core tile has COLS columns, a group has fewer query heads. Columns therefore count (set, head): the P tokens of a page
(or the 8 VW rows of dims) are cut into SETS = COLS / GROUP equal parts, one set of columns each, so that no column is idle and
every score is computed once. GROUP = heads of the group rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def by_row(values, SETS: tl.constexpr, GROUP: tl.constexpr):
    """[N] in natural order -> [N / SETS, SETS * GROUP]: element row + N / SETS * set in all columns of its set."""
    ROWS: tl.constexpr = values.shape[0] // SETS
    sets = tl.permute(tl.reshape(values, (SETS, ROWS)), (1, 0))
    return tl.reshape(tl.broadcast_to(sets[:, :, None], (ROWS, SETS, GROUP)), (ROWS, SETS * GROUP))


@triton.jit
def by_head(values, SETS: tl.constexpr):
    """[GROUP] -> [1, SETS * GROUP]: a head's value in its columns."""
    GROUP: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[None, :], (SETS, GROUP)), (SETS * GROUP,))[None, :]


@triton.jit
def head_max(tile, SETS: tl.constexpr):
    """[ROWS, SETS * GROUP] -> [GROUP]: the largest of a head's entries."""
    GROUP: tl.constexpr = tile.shape[1] // SETS
    return tl.max(tl.reshape(tl.max(tile, 0), (SETS, GROUP)), 0)


@triton.jit
def head_sum(tile, SETS: tl.constexpr):
    """[ROWS, SETS * GROUP] -> [GROUP]: the sum of a head's entries."""
    GROUP: tl.constexpr = tile.shape[1] // SETS
    return tl.sum(tl.reshape(tl.sum(tile, 0), (SETS, GROUP)), 0)


@triton.jit
def to_tokens(tile, SETS: tl.constexpr):
    """[ROWS, SETS * GROUP] -> [SETS * ROWS, SETS * GROUP]: tokens in natural order, every set of columns holds all heads."""
    ROWS: tl.constexpr = tile.shape[0]
    GROUP: tl.constexpr = tile.shape[1] // SETS
    rows = tl.reshape(tl.permute(tl.reshape(tile, (ROWS, SETS, GROUP)), (1, 0, 2)), (SETS * ROWS, GROUP))
    return tl.reshape(tl.broadcast_to(rows[:, None, :], (SETS * ROWS, SETS, GROUP)), (SETS * ROWS, SETS * GROUP))
