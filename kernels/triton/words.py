"""Attention to pages of codebook words (codec tailored): split-KV over lanes of granules as in decode.py, one program per
(lane, KV head, some query rows).

A program takes a page tile by tile: the indices of words out of their bit planes, the words out of their books, which caches
hold, keys turned by RoPE, dots on tensor cores, the softmax online in base 2. What is linear stays outside of the tile: a
page's angle turns the query back and only the places in it turn keys; units, weights and the model's factor on RoPE multiply
the query and the output. Words are whole numbers, exact in fp16; what they are multiplied with, and keys once they are turned,
are two parts of fp16 each, 22 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.triton.attend import Table
from bitkv_dist.kernels.triton.numbers import exp2, halves
from bitkv_dist.kernels.triton.tables import config

LARGEST = tl.constexpr(1024.0)  # of the numbers that are multiplied in two parts of fp16, where what is below 2^-24 ends


@triton.constexpr_function
def index_bits(count: int) -> int:
    """Of an index among so many words."""
    return (count - 1).bit_length()


@triton.jit
def plane_bytes(codes, bit: tl.constexpr, at, inside, P: tl.constexpr, BITS: tl.constexpr):
    """uint32 of one byte of a plane; 0 where there is no such plane."""
    if bit < BITS:
        found = tl.load(codes + at + bit * (P // 8), mask=inside, other=0).to(tl.uint32)
    else:
        found = tl.zeros(at.shape, tl.uint32)
    return found


@triton.jit
def four_planes(codes, FIRST: tl.constexpr, at, inside, P: tl.constexpr, BITS: tl.constexpr):
    """uint32: bytes of four planes side by side, the 2 x 2 and then the 4 x 4 blocks of their bits transposed."""
    x = plane_bytes(codes, FIRST, at, inside, P, BITS) | (plane_bytes(codes, FIRST + 1, at, inside, P, BITS) << 8)
    x |= plane_bytes(codes, FIRST + 2, at, inside, P, BITS) << 16
    x |= plane_bytes(codes, FIRST + 3, at, inside, P, BITS) << 24
    moved = (x ^ (x >> 7)) & 0x00AA00AA
    x ^= moved ^ (moved << 7)
    moved = (x ^ (x >> 14)) & 0x0000CCCC
    return x ^ moved ^ (moved << 14)


@triton.jit
def word_indices(
    codes, first, P: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, REAL: tl.constexpr, BITS: tl.constexpr
):
    """int32 [TILE, GROUPS]: the words of the tokens from `first` on, planes uint8 [REAL groups, BITS, P / 8] at `codes`.

    Eight tokens' bytes of eight planes are an 8 x 8 matrix of bits, transposed by halves; further planes are added bit by bit.
    """
    group, byte = tl.arange(0, GROUPS)[:, None], tl.arange(0, TILE // 8)[None, :]
    at = group * (BITS * P // 8) + first // 8 + byte
    inside = (group < REAL) & (byte >= 0)
    low, high = four_planes(codes, 0, at, inside, P, BITS), four_planes(codes, 4, at, inside, P, BITS)
    moved = (low ^ (high << 4)) & 0xF0F0F0F0
    low, high = low ^ moved, high ^ (moved >> 4)
    tokens = ()
    for i in tl.static_range(8):
        tokens = tokens + (((low if i < 4 else high) >> (8 * (i % 4))) & 255,)  # noqa: RUF005
    for bit in tl.static_range(8, BITS):
        more, longer = plane_bytes(codes, bit, at, inside, P, BITS), ()
        for i in tl.static_range(8):
            longer = longer + (tokens[i] | ((more << (bit - i)) & (1 << bit)),)  # noqa: RUF005
        tokens = longer
    even = tl.join(tl.join(tokens[0], tokens[4]), tl.join(tokens[2], tokens[6]))
    odd = tl.join(tl.join(tokens[1], tokens[5]), tl.join(tokens[3], tokens[7]))
    return tl.trans(tl.reshape(tl.join(even, odd), (GROUPS, TILE))).to(tl.int32)


@triton.jit
def by_parts(index, PARTS: tl.constexpr):
    """int32 [TILE, GROUPS] as a tuple of PARTS (1, 2 or 4) tensors [TILE, GROUPS / PARTS]."""
    HALF: tl.constexpr = index.shape[1] // 2
    if PARTS == 1:
        found = (index,)
    else:
        first, second = tl.split(tl.permute(tl.reshape(index, (index.shape[0], 2, HALF)), (0, 2, 1)))
        found = by_parts(first, PARTS // 2) + by_parts(second, PARTS // 2)
    return found


@triton.jit
def looked_up(words, index, FIRST: tl.constexpr, REAL: tl.constexpr, COUNT: tl.constexpr):
    """fp16 [TILE, n, 8]: the words of a head's books [REAL, COUNT, 8] with indices [TILE, n] of n groups from FIRST on."""
    group = FIRST + tl.arange(0, index.shape[1])[None, :, None]
    at = (group * COUNT + index[:, :, None]) * 8 + tl.arange(0, 8)[None, None, :]
    return tl.load(words + at, mask=tl.broadcast_to(group < REAL, at.shape), other=0.0)


@triton.jit
def halves_of(x):
    """fp32 in two parts of fp16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def query_pairs(own, channels, factor, real, FIRST: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr):
    """The two channels of PAIRS pairs from FIRST on, fp32 [PAIRS, COLS] each, of the queries at own [1, COLS], times the pairs'
    factor; 0 where there is no pair."""
    pair = FIRST + tl.arange(0, PAIRS)[:, None]
    there = pair < D // 2
    weight = tl.load(factor + pair, mask=there, other=0.0)
    x = tl.load(own + tl.load(channels + 2 * pair, mask=there, other=0), mask=there & real[None, :], other=0.0)
    y = tl.load(own + tl.load(channels + 2 * pair + 1, mask=there, other=0), mask=there & real[None, :], other=0.0)
    return x * weight, y * weight


@triton.jit
def turned_back(x, y, unit, table, page, channels, FIRST: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    """Pairs x, y [PAIRS, COLS] of queries in units [COLS], turned back by a page's angle, in two parts of fp16 each.

    table [2, COUNT, HALF]: cosines and sines of pages; pairs of channels from HALF on are not turned.
    """
    pair = FIRST + tl.arange(0, x.shape[0])[:, None]
    channel = tl.load(channels + 2 * pair, mask=pair < D // 2, other=HALF)
    at = page * HALF + channel
    cos = tl.load(table + at, mask=channel < HALF, other=1.0)
    sin = tl.load(table + COUNT * HALF + at, mask=channel < HALF, other=0.0)
    x, y = x / unit[None, :], y / unit[None, :]
    return halves_of(x * cos + y * sin) + halves_of(y * cos - x * sin)


@triton.jit
def key_pairs(words, shares, FIRST: tl.constexpr, D: tl.constexpr):
    """The two channels [TILE, 4 n] of the pairs of fp32 words [TILE, n, 8], each times its share of the pair's factor."""
    TILE: tl.constexpr = words.shape[0]
    WIDTH: tl.constexpr = 8 * words.shape[1]
    place = FIRST + tl.arange(0, WIDTH)
    share = tl.load(shares + place, mask=place < D, other=0.0)
    return tl.split(tl.reshape(tl.reshape(words, (TILE, WIDTH)) * share[None, :], (TILE, WIDTH // 2, 2)))


@triton.jit
def dots(x, high, low, sums):
    """sums + x times the two parts of an operand."""
    x_high, x_low = halves_of(x)
    return tl.dot(x_high, high, tl.dot(x_high, low, tl.dot(x_low, high, sums)))


@triton.jit(do_not_specialize=["lanes", "slots", "rows"])
def words(
    records, granules, bounds, q, key_words, key_channels, key_factor, key_shares, correction, page_turns, place_turns,
    value_words, value_channels, value_factor, value_center, m_out, l_out, o_out, lanes, slots, heads, rows,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr, KEY_COUNT: tl.constexpr, VALUE_COUNT: tl.constexpr,
    KEY_CODES: tl.constexpr, VALUE_CODES: tl.constexpr, SCALE: tl.constexpr, SHARE: tl.constexpr,
    HALF: tl.constexpr, TABLED: tl.constexpr, CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr, BLOCKS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Partials m, l fp32 [B, lanes, HK, R], o fp32 [B, lanes, HK, R, D] of the sealed pages of each lane, R = `rows` queries.

    records, granules, bounds: see `decode`; a record begins with its page's index int32; from byte SCALE on it has SHARE of the
    page's fp16 scales, the first head's the first ones. q fp32 [B, HK, R, D] in base 2. Of keys and of values: words fp16 [HK,
    D / 8, COUNT, 8], whole numbers; channels int32 [HK, D]: which channel stands where in the groups. Keys: two neighbours are
    a pair of RoPE, worth fp32 key_factor [HK, D / 2] times key_shares [HK, D], at most 1. Values: worth value_factor [HK, D]
    each, and value_center [HK, D], by channel, is added. correction [HK, D]: what a score gains for the squares of the query's
    numbers and of the token's scale. page_turns [2, TABLED, HALF]: cosines and sines of pages, channels from 2 HALF on are not
    turned; place_turns [HK, 2, P, 4 GROUPS]: of a page's places, for the pairs as they stand in the groups. GROUPS: D / 8 as
    padded; a token's words are taken in PARTS parts. BLOCKS programs side by side serve COLS queries each.
    """
    REAL: tl.constexpr = D // 8
    PAGES: tl.constexpr = 512 // P
    PAIRS: tl.constexpr = 4 * GROUPS // PARTS
    lane, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    head, batch = tl.program_id(1), tl.program_id(2)
    row = block * COLS + tl.arange(0, COLS)
    real = row < rows
    own = q + ((batch * heads + head) * rows + row)[None, :] * D

    dim = tl.arange(0, 8 * GROUPS)
    if CORRECTED:
        due = tl.load(correction + head * D + dim, mask=dim < D, other=0.0)
        query = tl.load(own + dim[:, None], mask=real[None, :] & (dim < D)[:, None], other=0.0)
        variance = tl.sum(query * query * due[:, None], 0)
    query, peak = (), tl.zeros((COLS,), tl.float32)
    for i in tl.static_range(PARTS):
        part = query_pairs(own, key_channels + head * D, key_factor + head * (D // 2), real, i * PAIRS, PAIRS, D)
        peak = tl.maximum(peak, tl.max(tl.maximum(tl.abs(part[0]), tl.abs(part[1])), 0))
        query = query + part
    q_unit = tl.where(peak == 0, 1.0, peak * (1 / LARGEST))

    place_cos = place_turns + head * (2 * P * 4 * GROUPS)
    place_sin = place_cos + P * 4 * GROUPS
    key_words += head * (REAL * KEY_COUNT * 8)
    value_words += head * (REAL * VALUE_COUNT * 8)
    m = tl.full((COLS,), float("-inf"), tl.float32)
    l = tl.zeros((TILE, COLS), tl.float32)  # each place of a tile sums for itself
    o = ()
    for _ in tl.static_range(PARTS):
        o = o + (tl.zeros((2 * PAIRS, COLS), tl.float32),)  # noqa: RUF005
    first = tl.load(bounds + 2 * (batch * lanes + lane))
    end = tl.load(bounds + 2 * (batch * lanes + lane) + 1)
    for turn in tl.range(first, end):
        granule = tl.load(granules + batch.to(tl.int64) * slots + lane + turn // PAGES * lanes)
        scales = records + tl.multiple_of(granule + (turn % PAGES * heads).to(tl.int64) * RECORD, 16)
        page = scales + head.to(tl.int64) * RECORD
        index = tl.load(page.to(tl.pointer_type(tl.int32)))
        back = ()
        for i in tl.static_range(PARTS):
            back = back + turned_back(
                query[2 * i], query[2 * i + 1], q_unit, page_turns, index, key_channels + head * D, i * PAIRS, TABLED, HALF, D
            )
        for start in tl.range(0, P, TILE):
            token = start + tl.arange(0, TILE)
            indices = word_indices(page + KEY_CODES, start, P, TILE, GROUPS, REAL, index_bits(KEY_COUNT))
            indices = by_parts(indices, PARTS)
            # Plus 0, which the compiler does not know: loaded once for all tiles, they would fill registers.
            shares = key_shares + head * D + tl.multiple_of(start >> 30, 16)
            scores = tl.zeros((TILE, COLS), tl.float32)
            for i in tl.static_range(PARTS):
                found = looked_up(key_words, indices[i], i * PAIRS // 4, REAL, KEY_COUNT).to(tl.float32)
                x, y = key_pairs(found, shares, i * 2 * PAIRS, D)
                entry = token[:, None] * (4 * GROUPS) + i * PAIRS + tl.arange(0, PAIRS)[None, :]
                cos, sin = tl.load(place_cos + entry), tl.load(place_sin + entry)
                scores = dots(x * cos - y * sin, back[4 * i], back[4 * i + 1], scores)
                scores = dots(y * cos + x * sin, back[4 * i + 2], back[4 * i + 3], scores)
            scale = halves(scales + SCALE, token // SHARE * (RECORD // 2) + token % SHARE)
            scores *= q_unit[None, :]
            if CORRECTED:
                scores += variance[None, :] * scale[:, None]
            scores *= scale[:, None]

            base = tl.maximum(m, tl.max(scores, 0))
            shrink = exp2(m - base, ASSEMBLY)[None, :]
            weights = exp2(scores - base[None, :], ASSEMBLY)
            m, l = base, l * shrink + weights
            high, low = halves_of(weights * LARGEST)
            indices = word_indices(page + VALUE_CODES, start, P, TILE, GROUPS, REAL, index_bits(VALUE_COUNT))
            indices = by_parts(indices, PARTS)
            added = ()
            for i in tl.static_range(PARTS):
                found = looked_up(value_words, indices[i], i * PAIRS // 4, REAL, VALUE_COUNT)
                found = tl.trans(tl.reshape(found, (TILE, 2 * PAIRS)))
                added = added + (tl.dot(found, high, tl.dot(found, low, o[i] * shrink)),)  # noqa: RUF005
            o = added

    target = ((batch * lanes + lane).to(tl.int64) * heads + head) * rows + row
    total = tl.sum(l, 0)
    tl.store(m_out + target, m, mask=real)
    tl.store(l_out + target, total, mask=real)
    for i in tl.static_range(PARTS):
        place = i * 2 * PAIRS + tl.arange(0, 2 * PAIRS)
        inside = place < D
        channel = tl.load(value_channels + head * D + place, mask=inside, other=0)
        factor = tl.load(value_factor + head * D + place, mask=inside, other=0.0) * (1 / LARGEST)
        center = tl.load(value_center + head * D + channel, mask=inside, other=0.0)
        out = o[i] * factor[:, None] + total[None, :] * center[:, None]
        tl.store(o_out + target[None, :] * D + channel[:, None], out, mask=real[None, :] & inside[:, None])


class Keys(NamedTuple):
    """The codebooks of keys as the kernel takes them: see `words`."""

    words: torch.Tensor
    channels: torch.Tensor
    factor: torch.Tensor
    shares: torch.Tensor


class Values(NamedTuple):
    """Those of values."""

    words: torch.Tensor
    channels: torch.Tensor
    factor: torch.Tensor
    center: torch.Tensor


@dataclass(frozen=True)
class WordPages:
    """Sizes and byte offsets of a page record (codes: of keys and of values), and what all pages share: books, the correction
    fp32 [HK, D] or None, RoPE's tables of pages [2, pages, half] and of places (see `words`)."""

    tokens: int
    dim: int
    record_bytes: int
    codes: tuple[int, int]
    scale: int
    share: int
    keys: Keys
    values: Values
    correction: torch.Tensor | None
    page_turns: torch.Tensor
    place_turns: torch.Tensor


def padded_groups(dim: int) -> int:
    """Words of a token as the kernel pads them: a power of two, and a tensor core's step of pairs or more."""
    return max(4, triton.next_power_of_2(dim // 8))


def attend_words(pages: WordPages, q: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of the lanes: m, l fp32 [B, lanes, HK, Q, G], o [.., D] of queries fp32 [B, HK, Q, G, D] in base 2."""
    chosen, groups = config(q.device), padded_groups(pages.dim)
    batch, heads, queries, group, dim = q.shape
    shape, rows, tile = (batch, table.lanes, heads, queries, group), queries * group, chosen.word_tile(groups)
    m, l, o = q.new_empty(shape), q.new_empty(shape), q.new_empty(*shape, dim)
    blocks, corrected = triton.cdiv(rows, chosen.columns), pages.correction is not None
    words[(table.lanes * blocks, heads, batch)](
        table.base, table.offsets, table.bounds, q.contiguous(), *pages.keys, pages.correction if corrected else q,
        pages.page_turns, pages.place_turns, *pages.values, m, l, o, table.lanes, table.offsets.shape[1], heads, rows,
        D=dim, P=pages.tokens, RECORD=pages.record_bytes,
        KEY_COUNT=pages.keys.words.shape[-2], VALUE_COUNT=pages.values.words.shape[-2],
        KEY_CODES=pages.codes[0], VALUE_CODES=pages.codes[1], SCALE=pages.scale, SHARE=pages.share,
        HALF=pages.page_turns.shape[-1], TABLED=pages.page_turns.shape[1], CORRECTED=corrected,
        GROUPS=groups, PARTS=min(tile.parts, groups // 4), TILE=min(pages.tokens, tile.tokens), COLS=chosen.columns,
        BLOCKS=blocks, ASSEMBLY=chosen.assembly, num_warps=tile.warps, num_stages=1, **chosen.registers(),
    )  # fmt: skip
    return m, l, o
