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


@triton.jit
def load_codes(
    rows,
    plane_bytes,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """int8 codes [LIST, 8 WIDTH] of PLANES planes, most significant first: element WIDTH j + i is bit j of byte i.

    rows: addresses [LIST] of each token's BYTES bytes, STEP apart; WIDTH = BYTES rounded up to a power of two.
    """
    byte = tl.arange(0, WIDTH)[None, :]
    words = ()
    for plane in tl.static_range(PLANES):
        at = rows[:, None] + (plane * plane_bytes + byte * STEP)
        found = tl.load(at) if WIDTH == BYTES else tl.load(at, mask=byte < BYTES, other=0)
        words = words + (found,)  # noqa: RUF005
    parts = expand(words, True, ASSEMBLY)
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (rows.shape[0], 8 * WIDTH))


@triton.jit(do_not_specialize=["slots", "queries"])
def refine(
    records, granules, bases, codes, scale, norm2, tokens, tops, m_out, l_out, o_out, slots, queries, heads, group, noise,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr,
    KEY_SCAN_BITS: tl.constexpr, KEY_LOW_BITS: tl.constexpr, VALUE_SCAN_BITS: tl.constexpr, VALUE_LOW_BITS: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, KEY_LOW: tl.constexpr, VALUE_LOW: tl.constexpr,
    VALUE_PLANES: tl.constexpr, VALUE_CENTROID: tl.constexpr,
    COLS: tl.constexpr, BY_HEAD: tl.constexpr, LIST: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Adds to m_out, l_out [B, slots, HK, Q, G], o_out [.., D], which hold the tail's partials, the tokens that `select`
    listed.

    COLS >= G columns for the heads of one list; BY_HEAD: a list per head, a program per list. KEY_SCALE, VALUE_SCALE: offsets
    of the scales of the full codes; noise = 0.5 ln2 r^2 / (D a^2) of the full key code. The others: see `select`.
    """
    PAGES: tl.constexpr = 512 // P
    BYTES: tl.constexpr = D // 8
    WIDTH: tl.constexpr = triton.next_power_of_2(BYTES)
    VALUE_BITS: tl.constexpr = VALUE_SCAN_BITS + VALUE_LOW_BITS
    slot, head, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lists = group if BY_HEAD else 1
    batch, query, list_head = z // (queries * lists), z // lists % queries, z % lists
    source = (batch * heads + head) * queries + query
    target = ((batch * slots + slot).to(tl.int64) * heads + head) * queries + query
    column = tl.arange(0, COLS)
    real = column < (1 if BY_HEAD else group)
    q_head = source * group + list_head + column
    out_head = target * group + list_head + column

    if tl.load(tokens + (target * lists + list_head) * LIST) < 0:
        return  # nothing is listed; of a slot without a granule not even the address may be used
    index = tl.arange(0, LIST)
    token = tl.load(tokens + (target * lists + list_head) * LIST + index)
    listed = token >= 0
    token = tl.where(listed, token, 0)
    page, within = token // P, token % P
    granule = records + tl.multiple_of(tl.load(granules + batch.to(tl.int64) * slots + slot), 16)
    record = granule + (page * heads + head).to(tl.int64) * RECORD
    inside = listed[:, None] & real[None, :]

    # Scores
    dots = tl.load(tops + out_head[None, :] * LIST + index[:, None], mask=inside, other=0)
    if KEY_LOW_BITS > 0:
        low = load_codes(record + KEY_LOW + within * (KEY_LOW_BITS * BYTES), BYTES, KEY_LOW_BITS, 1, BYTES, WIDTH, ASSEMBLY)
        place = tl.arange(0, 8 * WIDTH)
        dim = 8 * (place % WIDTH) + place // WIDTH
        q = tl.load(codes + q_head[None, :] * D + dim[:, None], mask=real[None, :] & (dim < D)[:, None], other=0)
        dots = (dots << KEY_LOW_BITS) + 2 * tl.dot(low, q, out_dtype=tl.int32)
        dots -= ((1 << KEY_LOW_BITS) - 1) * tl.sum(q.to(tl.int32), 0)[None, :]
    a = halves(record + KEY_SCALE, within)[:, None]
    base = tl.load(bases + out_head[None, :] * PAGES + page[:, None], mask=inside, other=0.0)
    q_scale = tl.load(scale + q_head, mask=real, other=0.0) * level_unit(KEY_SCAN_BITS + KEY_LOW_BITS)
    q_noise = tl.load(norm2 + q_head, mask=real, other=0.0) * noise
    scores = (dots.to(tl.float32) * q_scale[None, :] + q_noise[None, :] * a) * a + base
    scores = tl.where(inside, scores, float("-inf"))

    # Softmax, together with the tail
    tail = tl.load(m_out + out_head, mask=real, other=float("-inf"))
    m = tl.maximum(tail, tl.max(scores, 0))
    origin = tl.where(m == float("-inf"), 0.0, m)
    shrink = exp2(tail - origin, ASSEMBLY)
    p = exp2(scores - origin[None, :], ASSEMBLY)
    l = tl.load(l_out + out_head, mask=real, other=0.0) * shrink + tl.sum(p, 0)

    # Values: rows in natural order of the dims, each eighth padded to WIDTH
    place = tl.arange(0, 8 * WIDTH)
    dim = place // WIDTH * BYTES + place % WIDTH
    stored = real[None, :] & (place % WIDTH < BYTES)[:, None]
    o = tl.load(o_out + out_head[None, :] * D + dim[:, None], mask=stored, other=0.0) * shrink[None, :]
    word = record + VALUE_PLANES + within // 4 * (4 * BYTES) + within % 4
    high = tl.trans(load_codes(word, P * BYTES, VALUE_SCAN_BITS, 4, BYTES, WIDTH, ASSEMBLY))
    if VALUE_LOW_BITS > 0:
        low = load_codes(
            record + VALUE_LOW + within * (VALUE_LOW_BITS * BYTES), BYTES, VALUE_LOW_BITS, 1, BYTES, WIDTH, ASSEMBLY
        )
        low = tl.trans(low)
        o_low = tl.zeros((8 * WIDTH, COLS), tl.float32)
    weights = tl.where(inside, p * halves(record + VALUE_SCALE, within)[:, None], 0.0)
    for turn in tl.static_range(PAGES):
        here = listed & (page == turn)
        own = tl.where(here[:, None], weights, 0.0)
        peak = tl.max(own, 0)
        integers = round_weight(own * (127.0 / tl.where(peak == 0, 1.0, peak))[None, :])
        unit = (peak * (level_unit(VALUE_BITS) / 127))[None, :]
        total = ((1 << VALUE_BITS) - 1) * tl.sum(integers.to(tl.int32), 0)[None, :]
        sums = tl.dot(high, integers, out_dtype=tl.int32)
        o += ((sums << (VALUE_LOW_BITS + 1)) - total).to(tl.float32) * unit
        if VALUE_LOW_BITS > 0:
            o_low += tl.dot(low, integers, out_dtype=tl.int32).to(tl.float32) * (2 * unit)
        mass = tl.sum(tl.where(here[:, None], p, 0.0), 0)
        # Where nothing is listed the page may not be sealed, and its centroid may be anything.
        used = tl.where(place % WIDTH < BYTES, tl.sum(here.to(tl.int32), 0), 0) > 0
        at = granule + (turn * heads + head).to(tl.int64) * RECORD + VALUE_CENTROID
        o += halves(at, dim, used)[:, None] * mass[None, :]

    if VALUE_LOW_BITS > 0:
        # The low planes' dims stand in another order: bit by bit of the bytes.
        order = dim % 8 * WIDTH + tl.minimum(dim, D - 1) // 8
        o += tl.gather(o_low, tl.broadcast_to(order[:, None], (8 * WIDTH, COLS)), 0)
    tl.store(m_out + out_head, m, mask=real)
    tl.store(l_out + out_head, l, mask=real)
    tl.store(o_out + out_head[None, :] * D + dim[:, None], o, mask=stored)
