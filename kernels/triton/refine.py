"""Refine: the selected tokens of a granule by their full codes, added to the partial of the others.

Twin of the refined half of `attend` in kernels/reference/attention.py. The tail's partial has given these tokens no weight, so
nothing is counted twice and nothing is subtracted. A token's dot begins with that of the scan; its low bits and its values are
read token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitkv_dist.kernels.triton.decode import level_unit
from bitkv_dist.kernels.triton.numbers import exp2, halves, round_weight
from bitkv_dist.kernels.triton.planes import expand
from bitkv_dist.kernels.triton.tiles import by_head, by_row, head_max, head_sum


@triton.jit
def load_low(rows, PLANES: tl.constexpr, BYTES: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes of the low planes as of `codes_of`; rows: addresses [LIST] of each token's PLANES times BYTES bytes."""
    WIDTH: tl.constexpr = triton.next_power_of_2(BYTES)
    byte = tl.arange(0, WIDTH)[None, :]
    planes = ()
    for plane in tl.static_range(PLANES):
        at = rows[:, None] + (plane * BYTES + byte)
        planes = planes + (tl.load(at) if WIDTH == BYTES else tl.load(at, mask=byte < BYTES, other=0),)  # noqa: RUF005
    return codes_of(planes, ASSEMBLY)


@triton.jit
def load_scanned(plane, within, plane_bytes, PLANES: tl.constexpr, BYTES: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes of the scanned planes of values as of `codes_of`; plane: addresses [LIST] of the first plane of each token's page,
    within: its place there. Its bytes are one of the four in each word of a row."""
    WIDTH: tl.constexpr = triton.next_power_of_2(BYTES)
    word = tl.arange(0, WIDTH)[None, :]
    rows = (plane + within // 4 * (4 * BYTES)).to(tl.pointer_type(tl.int32))[:, None] + word
    planes = ()
    for i in tl.static_range(PLANES):
        at = rows + i * (plane_bytes // 4)
        words = tl.load(at) if WIDTH == BYTES else tl.load(at, mask=word < BYTES, other=0)
        planes = planes + ((words >> (within % 4 * 8)[:, None]).to(tl.uint8),)  # noqa: RUF005
    return codes_of(planes, ASSEMBLY)


@triton.jit
def codes_of(planes, ASSEMBLY: tl.constexpr):
    """uint8 [LIST, WIDTH] of each plane, most significant first -> int8 codes [LIST, 8 WIDTH]: element WIDTH j + i is bit j of
    byte i."""
    parts = expand(planes, True, ASSEMBLY)
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    rows = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(rows, (planes[0].shape[0], 8 * planes[0].shape[1]))


@triton.jit(do_not_specialize=["slots", "queries"])
def refine(
    records, granules, bases, codes, scale, norm2, tokens, tops, m_out, l_out, o_out, slots, queries, heads, group, noise,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr,
    KEY_SCAN_BITS: tl.constexpr, KEY_LOW_BITS: tl.constexpr, VALUE_SCAN_BITS: tl.constexpr, VALUE_LOW_BITS: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, KEY_LOW: tl.constexpr, VALUE_LOW: tl.constexpr,
    VALUE_PLANES: tl.constexpr, VALUE_CENTROID: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, BY_HEAD: tl.constexpr, LIST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Adds to m_out, l_out [B, slots, HK, Q, G], o_out [.., D], which hold the tail's partials, the tokens that `select`
    listed.

    A program takes GROUP heads of one list, PARTS programs all of them; BY_HEAD: a list and a program per head. Columns count
    (set, head): every set has all tokens' scores, and the weights of the tokens of a page of its own. KEY_SCALE, VALUE_SCALE:
    offsets of the scales of the full codes; noise = 0.5 ln2 r^2 / (D a^2) of the full key code. The others: see `select`.
    """
    SETS: tl.constexpr = COLS // GROUP
    PAGES: tl.constexpr = 512 // P
    BYTES: tl.constexpr = D // 8
    WIDTH: tl.constexpr = triton.next_power_of_2(BYTES)
    VALUE_BITS: tl.constexpr = VALUE_SCAN_BITS + VALUE_LOW_BITS
    slot, head, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = group if BY_HEAD else PARTS
    batch, query, part = z // (queries * parts), z // parts % queries, z % parts
    source = (batch * heads + head) * queries + query
    target = ((batch * slots + slot).to(tl.int64) * heads + head) * queries + query
    column = tl.arange(0, COLS)
    column_set, column_head = column // GROUP, column % GROUP
    real = part * GROUP + column_head < group
    q_head = source * group + part * GROUP + column_head
    out_column = target * group + part * GROUP + column_head

    list_start = tokens + (target * group + part if BY_HEAD else target) * LIST
    if tl.load(list_start) < 0:
        return  # nothing is listed; of a slot without a granule not even the address may be used
    index = tl.arange(0, LIST)
    token = tl.load(list_start + index)
    listed = token >= 0
    token = tl.where(listed, token, 0)
    page, within = token // P, token % P
    granule = records + tl.multiple_of(tl.load(granules + batch.to(tl.int64) * slots + slot), 16)
    record = granule + (page * heads + head).to(tl.int64) * RECORD
    inside = listed[:, None] & real[None, :]

    # Scores
    dots = tl.load(tops + out_column[None, :] * LIST + index[:, None], mask=inside, other=0)
    if KEY_LOW_BITS > 0:
        low = load_low(record + KEY_LOW + within * (KEY_LOW_BITS * BYTES), KEY_LOW_BITS, BYTES, ASSEMBLY)
        dim = tl.arange(0, 8 * WIDTH)
        q = tl.load(codes + q_head[None, :] * D + dim[:, None], mask=real[None, :] & (dim < D)[:, None], other=0)
        q = tl.reshape(tl.permute(tl.reshape(q, (WIDTH, 8, COLS)), (1, 0, 2)), (8 * WIDTH, COLS))  # as `codes_of` has them
        dots = (dots << KEY_LOW_BITS) + 2 * tl.dot(low, q, out_dtype=tl.int32)
        dots -= ((1 << KEY_LOW_BITS) - 1) * tl.sum(q.to(tl.int32), 0)[None, :]
    a = halves(record + KEY_SCALE, within)[:, None]
    base = tl.load(bases + out_column[None, :] * PAGES + page[:, None], mask=inside, other=0.0)
    q_scale = tl.load(scale + q_head, mask=real, other=0.0) * level_unit(KEY_SCAN_BITS + KEY_LOW_BITS)
    q_noise = tl.load(norm2 + q_head, mask=real, other=0.0) * noise
    scores = (dots.to(tl.float32) * q_scale[None, :] + q_noise[None, :] * a) * a + base
    scores = tl.where(inside, scores, float("-inf"))

    # Softmax, together with the tail
    member = tl.arange(0, GROUP)
    there = part * GROUP + member < group
    out_head = target * group + part * GROUP + member
    tail = tl.load(m_out + out_head, mask=there, other=float("-inf"))
    m = tl.maximum(tail, head_max(scores, SETS))
    origin = tl.where(m == float("-inf"), 0.0, m)
    shrink = exp2(tail - origin, ASSEMBLY)
    p = exp2(scores - by_head(origin, SETS), ASSEMBLY)
    l = tl.load(l_out + out_head, mask=there, other=0.0) * shrink + head_sum(p, SETS) * (1 / SETS)

    # Values: rows in natural order of the dims, each eighth padded to WIDTH
    place = tl.arange(0, 8 * WIDTH)
    dim = place // WIDTH * BYTES + place % WIDTH
    high = tl.trans(load_scanned(record + VALUE_PLANES, within, P * BYTES, VALUE_SCAN_BITS, BYTES, ASSEMBLY))
    o = tl.zeros((8 * WIDTH, COLS), tl.float32)
    if VALUE_LOW_BITS > 0:
        low = load_low(record + VALUE_LOW + within * (VALUE_LOW_BITS * BYTES), VALUE_LOW_BITS, BYTES, ASSEMBLY)
        low = tl.trans(low)
        o_low = tl.zeros((8 * WIDTH, COLS), tl.float32)
    scale = halves(record + VALUE_SCALE, within)[:, None]
    for turn in tl.static_range((PAGES + SETS - 1) // SETS):
        here = listed[:, None] & (page[:, None] == (turn * SETS + column_set)[None, :])
        own = tl.where(here, p, 0.0)
        mass = tl.sum(own, 0)[None, :]
        own *= scale
        peak = tl.max(own, 0)
        integers = round_weight(own * (127.0 / tl.where(peak == 0, 1.0, peak))[None, :])
        unit = (peak * (level_unit(VALUE_BITS) / 127))[None, :]
        total = ((1 << VALUE_BITS) - 1) * tl.sum(integers.to(tl.int32), 0)[None, :].to(tl.float32)
        sums = tl.dot(high, integers, out_dtype=tl.int32).to(tl.float32)
        o += sums * (unit * (2 << VALUE_LOW_BITS)) - total * unit
        if VALUE_LOW_BITS > 0:
            o_low += tl.dot(low, integers, out_dtype=tl.int32).to(tl.float32) * (2 * unit)
        wide = tl.arange(0, SETS * 8 * WIDTH)
        turn_page = tl.minimum(turn * SETS + wide // (8 * WIDTH), PAGES - 1)
        wide_dim = wide % (8 * WIDTH) // WIDTH * BYTES + wide % WIDTH
        at = granule + (turn_page * heads + head).to(tl.int64) * RECORD + VALUE_CENTROID
        centroid = by_row(halves(at, wide_dim, None if WIDTH == BYTES else wide % WIDTH < BYTES), SETS, GROUP)
        o += tl.where(mass > 0, centroid * mass, 0.0)  # without mass the page may not be sealed, its centroid be anything

    if VALUE_LOW_BITS > 0:
        # The low planes' dims stand in another order: bit by bit of the bytes.
        order = dim % 8 * WIDTH + tl.minimum(dim, D - 1) // 8
        o += tl.gather(o_low, tl.broadcast_to(order[:, None], (8 * WIDTH, COLS)), 0)
    o = tl.sum(tl.reshape(o, (8 * WIDTH, SETS, GROUP)), 1)
    stored = there[None, :] & (place % WIDTH < BYTES)[:, None]
    at = o_out + out_head[None, :] * D + dim[:, None]
    tl.store(at, tl.load(at, mask=stored, other=0.0) * shrink[None, :] + o, mask=stored)
    tl.store(m_out + out_head, m, mask=there)
    tl.store(l_out + out_head, l, mask=there)
