"""Select: which tokens of a granule are refined, those that carry its attention by their scanned scores, without sorting.

Twin of `select` in kernels/reference/selection.py: the threshold is found bit by bit over integers that order as the scores
do, ties go to the lower position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitkv_dist.kernels.triton.decode import excluded, level_unit
from bitkv_dist.kernels.triton.numbers import exp2, halves, log2


@triton.jit
def ordered(x):
    """uint32 that order as the floats do; both zeros are one value."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def threshold(keys, count):
    """The largest number that at least `count` keys of each row reach: keys uint32 [R, T] -> uint32 [R, 1].

    Bit by bit from the top, until every row has found a number that exactly `count` of its keys reach.
    """
    found = tl.zeros((keys.shape[0], 1), tl.uint32)
    bit = tl.full((), 1, tl.uint32) << 31
    while bit != 0:
        tried = found | bit
        reached = tl.sum((keys >= tried).to(tl.int32), 1, keep_dims=True)
        found = tl.where(reached >= count, tried, found)
        surplus = tl.where(reached == count, 0, 1)
        bit = tl.where(tl.max(tl.max(surplus, 1), 0) == 0, bit & 0, bit >> 1)
    return found


@triton.jit(do_not_specialize=["slots", "queries"])
def select(
    records, granules, bounds, dots, bases, scale, norm2, counts, tokens, tops, slots, queries, heads, group, noise,
    P: tl.constexpr, RECORD: tl.constexpr, KEY_BITS: tl.constexpr, KEY_SCAN: tl.constexpr,
    GROUP: tl.constexpr, LISTS: tl.constexpr, LIST: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The tokens to refine, one list for a group (LISTS = 1) or one per head (LISTS = GROUP); of G = `group` heads.

    counts int32 [512 / P + 1]: how many tokens of a granule with so many pages. tokens int32 [B, slots, HK, Q, R, LIST]:
    ascending positions in the granule, then -1. tops int32 [B, slots, HK, Q, G, LIST]: the listed tokens' dots; in `dots`
    themselves they are replaced by `excluded`. The others: see `scan`; noise = 0.5 ln2 r^2 / (D a^2) of the scanned code.
    """
    PAGES: tl.constexpr = 512 // P
    slot, head, batch, query = tl.program_id(0), tl.program_id(1), tl.program_id(2) // queries, tl.program_id(2) % queries
    source = (batch * heads + head) * queries + query
    target = ((batch * slots + slot).to(tl.int64) * heads + head) * queries + query
    member = tl.arange(0, GROUP)[:, None]
    real = member < group
    first = tl.load(bounds + 2 * (batch * slots + slot))
    end = tl.load(bounds + 2 * (batch * slots + slot) + 1)
    count = tl.load(counts + (end - first))
    token = tl.arange(0, 512)[None, :]
    page = token // P
    sealed = (page >= first) & (page < end)

    at = (target * group + member) * 512 + token
    found = tl.load(dots + at, mask=real & sealed, other=0)
    granule = tl.load(granules + batch.to(tl.int64) * slots + slot)
    a = halves(records + granule + (page * heads + head).to(tl.int64) * RECORD + KEY_SCAN, token % P, sealed)
    base = tl.load(bases + (target * group + member) * PAGES + page, mask=real & sealed, other=0.0)
    q_scale = tl.load(scale + source * group + member, mask=real, other=0.0) * level_unit(KEY_BITS)
    q_noise = tl.load(norm2 + source * group + member, mask=real, other=0.0) * noise
    scores = tl.where(sealed, (found.to(tl.float32) * q_scale + q_noise * a) * a + base, float("-inf"))
    if LISTS == 1 and GROUP > 1:
        peak = tl.max(scores, 1, keep_dims=True)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(exp2(scores - peak, ASSEMBLY), 1, keep_dims=True)
        competing = tl.where(real, scores - peak - log2(mass, ASSEMBLY), float("-inf"))
        competing = tl.max(competing, 0, keep_dims=True)
    else:
        competing = scores
    keys = ordered(competing)
    keys = tl.where(sealed, keys, 0)
    least = threshold(keys, count)
    above = keys > least
    room = count - tl.sum(above.to(tl.int32), 1, keep_dims=True)
    level = keys == least
    chosen = (above | (level & (tl.cumsum(level.to(tl.int32), 1) <= room))) & sealed

    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    lists = 1 if LISTS == 1 else group
    row = tl.arange(0, LISTS)[:, None]
    listed = chosen & (row < lists)
    to = (target * lists + row) * LIST
    tl.store(tokens + to + place, token + tl.zeros((LISTS, 1), tl.int32), mask=listed)
    spare = tl.arange(0, LIST)[None, :]
    tl.store(tokens + to + spare, tl.full((LISTS, LIST), -1, tl.int32), mask=(spare >= count) & (row < lists))
    tl.debug_barrier()
    place = tl.arange(0, LIST)[None, :]
    position = tl.load(tokens + (target * lists + (0 if LISTS == 1 else member)) * LIST + place, mask=real, other=-1)
    taken = real & (position >= 0)
    at = (target * group + member) * 512 + position
    tl.store(tops + (target * group + member) * LIST + place, tl.load(dots + at, mask=taken, other=0).to(tl.int32), mask=taken)
    tl.store(dots + at, tl.full((GROUP, LIST), excluded(KEY_BITS), dots.dtype.element_ty), mask=taken)
