"""Scan: the exact integer dots of a group's queries with the scanned planes of all sealed keys, one program per granule.

Twin of `score_integers` and `centroid_scores` in kernels/reference/scores.py. What is stored is the integer, not the score:
half the bytes for one scanned plane, equal on every machine, and the refined tokens' full dots begin with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitkv_dist.kernels.triton.decode import centroid_score, load_query, page_dots
from bitkv_dist.kernels.triton.numbers import ROUNDER
from bitkv_dist.kernels.triton.planes import unscale
from bitkv_dist.kernels.triton.tiles import by_head


@triton.jit(do_not_specialize=["slots", "queries"])
def scan(
    records, granules, bounds, dots, bases, codes, rotated, slots, queries, heads, group,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr, KEY_BITS: tl.constexpr,
    KEY_PLANES: tl.constexpr, KEY_CENTROID: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """dots int16 (one scanned plane) or int32 [B, slots, HK, Q, G, 512] = sum of q * (2 code - (2^S - 1)); bases fp32
    [B, slots, HK, Q, G, 512 / P] = q.c of each page. Pages outside `bounds` are left as they are.

    records .. rotated: see `decode`, each granule a lane; PARTS programs serve GROUP heads of a granule each.
    """
    SETS: tl.constexpr = COLS // GROUP
    PAGES: tl.constexpr = 512 // P
    slot, head, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, query, part = z // (queries * PARTS), z // PARTS % queries, z % PARTS
    source = (batch * heads + head) * queries + query
    target = ((batch * slots + slot).to(tl.int64) * heads + head) * queries + query
    member = part * GROUP + tl.arange(0, GROUP)
    real = member < group
    column = tl.arange(0, COLS)[None, :]
    column_set, column_head = column // GROUP, part * GROUP + column % GROUP

    blocks = load_query(codes, source * group + part * GROUP, group - part * GROUP, D, SETS, GROUP)
    dim = tl.arange(0, triton.next_power_of_2(D))
    at = (source * group + member[None, :]) * D + dim[:, None]
    inside = real[None, :] & (dim < D)[:, None]
    q_rotated = tl.load(rotated + at, mask=inside, other=0.0)
    code_sum = tl.sum(tl.load(codes + at, mask=inside, other=0).to(tl.int32), 0).to(tl.float32)
    factor = 2 * unscale(P // SETS, column_set, P // 8, SETS, KEY_BITS)
    offset = by_head(code_sum * (1 - (1 << KEY_BITS)), SETS) + ROUNDER

    granule = tl.load(granules + batch.to(tl.int64) * slots + slot)
    row = tl.arange(0, P // SETS)[:, None] + P // SETS * column_set
    to = (target * group + column_head) * 512 + row
    first = tl.load(bounds + 2 * (batch * slots + slot))
    end = tl.load(bounds + 2 * (batch * slots + slot) + 1)
    for turn in tl.range(first, end):
        page = records + tl.multiple_of(granule + (turn * heads + head).to(tl.int64) * RECORD, 16)
        sums = page_dots(page + KEY_PLANES, blocks, column_set, D, P, KEY_BITS, SETS, ASSEMBLY)
        # Exact: the sum is a multiple of what it is divided by, and the rounding constant puts the integer into the low bits.
        integers = (sums.to(tl.float32) * factor + offset).to(tl.int32, bitcast=True)
        if KEY_BITS > 1:
            integers -= 0x4B400000
        tl.store(dots + to + turn * P, integers.to(dots.dtype.element_ty), mask=column_head < group)
        base = centroid_score(page + KEY_CENTROID, q_rotated, D)
        tl.store(bases + (target * group + member) * PAGES + turn, base, mask=real)
