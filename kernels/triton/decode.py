"""Attention to sealed pages: split-KV over lanes of granules, one program per (lane, KV head, query).

Twin of `attend` in kernels/reference/attention.py without refinement. A program walks its granules in token order, page by
page: codes expand to int8 in registers, scores and values are integer tensor-core sums, the softmax runs online in base 2.
Nothing that grows is a compile-time constant, and the grid is that of the lanes whatever the context.

The weight of a value is w_t = 2^(s_t - m) a_t with its scale a_t, and a page's integers are normalised by the largest of them.
So what is exponentiated is u_t = s_t + log2 a_t, the page's maximum of u gives the scale, and 2^(s_t - m) = w_t / a_t needs no
second exponential. The base m of a partial is the largest u: a partial says the same for any base.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitkv_dist.kernels.triton.numbers import exp2, halves, log2, round_weight
from bitkv_dist.kernels.triton.planes import load_planes, no_dots, own_set, plane_dots, unscale
from bitkv_dist.kernels.triton.tiles import by_head, by_row, head_max, head_sum, to_tokens

LOG2_127 = tl.constexpr(6.988684686772166)
NO_SCALE = tl.constexpr(2.0**-60)  # stands for a zero scale: far below any fp16 one, so that such a value weighs nothing
NOTHING = tl.constexpr(-1e30)  # a finite stand-in for the largest of no scores


@triton.constexpr_function
def excluded(bits: int) -> int:
    """What stands for the dot of a refined token: below all that `scan` finds with so many planes, and inside the type it
    stores them in."""
    return -(1 << 15) if bits == 1 else -(1 << 30)


@triton.jit
def level_unit(BITS: tl.constexpr):
    """What one odd integer 2 code - (2^B - 1) is worth in scales."""
    UNIT: tl.constexpr = 1.0 if BITS == 1 else 0.5
    return UNIT


@triton.jit
def load_query(codes, first, group, D: tl.constexpr, SETS: tl.constexpr, GROUP: tl.constexpr):
    """`group` rows of int8 query codes [.., D] from row `first` on, in the blocks of `key_blocks`: each [dims, COLS], in every
    set of columns the same, 0 beyond D and the rows."""
    head = tl.arange(0, SETS * GROUP) % GROUP
    blocks = ()
    for i in tl.static_range(len(key_blocks(D))):
        dim = block_start(D, i) + tl.arange(0, key_blocks(D)[i])
        inside = (head < group)[None, :] & (dim < D)[:, None]
        block = tl.load(codes + (first + head[None, :]) * D + dim[:, None], mask=inside, other=0)
        blocks = blocks + (block,)  # noqa: RUF005
    return blocks


@triton.jit
def page_dots(
    keys, blocks, column_set, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, SETS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Scaled integer dots int32 [P / SETS, COLS] of a page's key planes at `keys`; blocks: the query's dims in blocks
    [DIMS, COLS] of a power of two, one after another."""
    WIDTH: tl.constexpr = P // 8
    sums = no_dots(P, blocks[0].shape[1], SETS)
    for i in tl.static_range(len(blocks)):
        words = load_planes(keys, P * D // 8, blocks[i].shape[0] // 4, WIDTH, WIDTH, BITS, ASSEMBLY)
        sums = plane_dots(words, blocks[i], sums, ASSEMBLY)
        keys += blocks[i].shape[0] * WIDTH
    return own_set(sums, column_set)


@triton.jit
def in_tile(sums):
    """The same numbers int32 [ROWS, COLS], held by the threads that hold them when a tensor core has computed them: what
    follows is laid out for that, and loaded numbers otherwise drag it all into the layout of the load."""
    none = tl.zeros((sums.shape[0], 32), tl.int8)
    return tl.dot(none, tl.zeros((32, sums.shape[1]), tl.int8), sums, out_dtype=tl.int32)


@triton.jit
def centroid_score(centroid, q_rotated, D: tl.constexpr):
    """q.c of a page, fp32 [GROUP]; q_rotated fp32 [D rounded up to a power of two, GROUP]."""
    dim = tl.arange(0, q_rotated.shape[0])
    c = halves(centroid, dim, None if q_rotated.shape[0] == D else dim < D)
    return tl.sum(q_rotated * (c if q_rotated.shape[0] == D else tl.where(dim < D, c, 0.0))[:, None], 0)


@triton.constexpr_function
def key_blocks(dim: int) -> tuple[int, ...]:
    """The dims of the blocks in which keys are taken, one after another: powers of two of at least 32, the tensor core's step;
    operands of more dims at once would not fit into the registers."""
    blocks, rest, most = (), dim, 128 if dim <= 128 else 64
    while rest > 0:
        block = min(most, max(32, 1 << (rest.bit_length() - 1)))
        blocks, rest = (*blocks, block), rest - block
    return blocks


@triton.constexpr_function
def block_start(dim: int, i: int) -> int:
    return sum(key_blocks(dim)[:i])


@triton.constexpr_function
def value_blocks(width: int, sets: int) -> tuple[tuple[int, int], ...]:
    """(first word, words) of the blocks in which the `width` words of a row of a value plane are taken: the power of two that
    holds them, or a smaller one and the rest where that pads less. A block has eight words or more, which loads stay wide for,
    and 16 rows or more, the tensor core's."""
    whole, first = 1 << (width - 1).bit_length(), 1 << (width.bit_length() - 1)
    rest = max(8, 2 * sets, 1 << (width - first - 1).bit_length())
    return ((0, whole),) if first + rest >= whole else ((0, first), (first, rest))


@triton.jit
def value_dims(D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, place):
    """(dims, whether they are any) of the rows `place` of a block of WIDTH words from word FIRST on."""
    word = FIRST + place % WIDTH
    return place // WIDTH * (D // 8) + word, word < D // 8


@triton.jit
def add_values(
    o, page, integers, total, column_set, shrink, lift, mass,
    D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, CENTROID: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, SETS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The outputs fp32 [8 WIDTH / SETS, COLS] of a block of dims, with a page's values added to them.

    integers int8 [P, COLS]: the weights, worth `lift` each; total int32 [ROWS, COLS]: their sum, in every row the same. shrink,
    lift, mass: fp32 [GROUP].
    """
    ROWS: tl.constexpr = total.shape[0]
    DIMS: tl.constexpr = o.shape[0]
    COLS: tl.constexpr = o.shape[1]
    GROUP: tl.constexpr = COLS // SETS
    words = load_planes(page + PLANES + 4 * FIRST, P * D // 8, P // 4, WIDTH, D // 8, BITS, ASSEMBLY)
    sums = own_set(plane_dots(words, integers, no_dots(8 * WIDTH, COLS, SETS), ASSEMBLY), column_set)
    total = tl.reshape(tl.broadcast_to(total[None, :, :], (DIMS // ROWS, ROWS, COLS)), (DIMS, COLS)).to(tl.float32)
    dim, inside = value_dims(D, FIRST, WIDTH, tl.arange(0, 8 * WIDTH))
    centroid = halves(page + CENTROID, dim, None if (D // 8 - FIRST) % WIDTH == 0 else inside)
    o = o * by_head(shrink, SETS) - total * by_head(lift * (level_unit(BITS) * ((1 << BITS) - 1)), SETS)
    o = by_row(centroid, SETS, GROUP) * by_head(mass, SETS) + o
    factor = 2 * level_unit(BITS) * unscale(DIMS, column_set, WIDTH, SETS, BITS)
    return sums.to(tl.float32) * (factor * by_head(lift, SETS)) + o


@triton.jit(do_not_specialize=["lanes", "slots", "queries"])
def decode(
    records, granules, bounds, dots, bases, codes, scale, norm2, rotated, m_out, l_out, o_out,
    lanes, slots, queries, heads, group, noise,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_PLANES: tl.constexpr, VALUE_PLANES: tl.constexpr, KEY_SCAN: tl.constexpr, VALUE_SCAN: tl.constexpr,
    KEY_CENTROID: tl.constexpr, VALUE_CENTROID: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, SCANNED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Partials m, l fp32 [B, lanes, HK, Q, G], o fp32 [B, lanes, HK, Q, G, D] of the sealed pages of each lane.

    records uint8: any address; granules int64 [B, slots]: byte offsets from it of the granules' records [512 / P, HK, RECORD],
    multiples of 16; lane i takes slots i, i + lanes, .. . bounds int32 [B, lanes, 2]: first and last + 1 of the pages that a
    lane attends to, counted in its granules. codes int8 and rotated fp32 [B, HK, Q, G, D], scale, norm2 fp32 [B, HK, Q, G]: as
    of `quantize_query`. KEY_PLANES ..: byte offsets of a record's fields. With SCANNED each lane is one granule, and dots and
    bases stand for its keys: what `scan` found and `select` has not excluded. Without, they are not looked at.
    PARTS programs side by side share a lane and serve GROUP heads each: more would not fit into the registers of a warp.
    """
    SETS: tl.constexpr = COLS // GROUP
    PAGES: tl.constexpr = 512 // P
    BLOCKS: tl.constexpr = value_blocks(D // 8, SETS)
    ONES: tl.constexpr = min(16, 8 * BLOCKS[0][1] // SETS)  # rows of a tile that sums the weights
    lane, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head, batch, query = tl.program_id(1), tl.program_id(2) // queries, tl.program_id(2) % queries
    # The rows of the first query head that this program serves, and how many it serves.
    source = ((batch * heads + head) * queries + query) * group + part * GROUP
    target = (((batch * lanes + lane).to(tl.int64) * heads + head) * queries + query) * group + part * GROUP
    count = group - part * GROUP
    member = tl.arange(0, GROUP)
    real = member < count
    column = tl.arange(0, COLS)[None, :]
    column_set, column_head = column // GROUP, column % GROUP

    blocks = load_query(codes, source, count, D, SETS, GROUP)
    dim = tl.arange(0, triton.next_power_of_2(D))
    at = (source + member[None, :]) * D + dim[:, None]
    inside = real[None, :] & (dim < D)[:, None]
    q_rotated = tl.load(rotated + at, mask=inside, other=0.0)
    code_sum = tl.sum(tl.load(codes + at, mask=inside, other=0).to(tl.int32), 0).to(tl.float32)
    q_scale = tl.load(scale + source + member, mask=real, other=0.0) * level_unit(KEY_BITS)
    q_noise = by_head(tl.load(norm2 + source + member, mask=real, other=0.0) * noise, SETS)
    if SCANNED:
        q_factor = by_head(q_scale, SETS)
        q_offset = tl.zeros((1, COLS), tl.float32)
    else:
        q_factor = by_head(2 * q_scale, SETS) * unscale(P // SETS, column_set, P // 8, SETS, KEY_BITS)
        q_offset = by_head(q_scale * code_sum * (1 - (1 << KEY_BITS)), SETS)

    m = tl.full((GROUP,), float("-inf"), tl.float32)
    l = tl.zeros((GROUP,), tl.float32)
    o = ()
    for b in tl.static_range(len(BLOCKS)):
        o = o + (tl.zeros((8 * BLOCKS[b][1] // SETS, COLS), tl.float32),)  # noqa: RUF005
    first = tl.load(bounds + 2 * (batch * lanes + lane))
    end = tl.load(bounds + 2 * (batch * lanes + lane) + 1)
    for turn in tl.range(first, end):
        granule = tl.load(granules + batch.to(tl.int64) * slots + lane + turn // PAGES * lanes)
        page = records + tl.multiple_of(granule + (turn % PAGES * heads + head).to(tl.int64) * RECORD, 16)

        if SCANNED:
            token = tl.arange(0, P // SETS)[:, None] + P // SETS * column_set + turn % PAGES * P
            sums = tl.load(dots + (target + column_head) * 512 + token, mask=column_head < count, other=0).to(tl.int32)
            sums = in_tile(sums)
        else:
            sums = page_dots(page + KEY_PLANES, blocks, column_set, D, P, KEY_BITS, SETS, ASSEMBLY)
        key_scale = by_row(halves(page + KEY_SCAN, tl.arange(0, P)), SETS, GROUP)
        value_scale = halves(page + VALUE_SCAN, tl.arange(0, P))
        value_log = log2(tl.maximum(value_scale, NO_SCALE), ASSEMBLY)
        u = sums.to(tl.float32) * q_factor + (key_scale * q_noise + q_offset)
        u = u * key_scale + by_row(value_log, SETS, GROUP)
        if SCANNED:
            u = tl.where(sums == excluded(KEY_BITS), float("-inf"), u)
        peak = head_max(u, SETS)
        if SCANNED:
            peak = tl.maximum(peak, NOTHING)

        if SCANNED:
            level = peak + tl.load(bases + (target + member) * PAGES + turn % PAGES, mask=real, other=0.0)
        else:
            level = peak + centroid_score(page + KEY_CENTROID, q_rotated, D)
        base = tl.maximum(m, level)
        shrink, lift = exp2(m - base, ASSEMBLY), exp2(level - base, ASSEMBLY) * (1 / 127)
        weights = exp2(u - by_head(peak - LOG2_127, SETS), ASSEMBLY)
        mass = lift * head_sum(weights * by_row(exp2(-value_log, ASSEMBLY), SETS, GROUP), SETS)
        m, l = base, l * shrink + mass

        integers = to_tokens(round_weight(weights), SETS)
        total = tl.dot(tl.full((ONES, P), 1, tl.int8), integers, out_dtype=tl.int32)
        added = ()
        for b in tl.static_range(len(BLOCKS)):
            block = add_values(
                o[b], page, integers, total, column_set, shrink, lift, mass, D, P, VALUE_BITS, VALUE_PLANES, VALUE_CENTROID,
                BLOCKS[b][0], BLOCKS[b][1], SETS, ASSEMBLY,
            )  # fmt: skip
            added = added + (block,)  # noqa: RUF005
        o = added

    tl.store(m_out + target + member, m, mask=real)
    tl.store(l_out + target + member, l, mask=real)
    for b in tl.static_range(len(BLOCKS)):
        row = tl.arange(0, o[b].shape[0])[:, None] + o[b].shape[0] * column_set
        dim, inside = value_dims(D, BLOCKS[b][0], BLOCKS[b][1], row)
        tl.store(o_out + (target + column_head) * D + dim, o[b], mask=inside & (column_head < count))
