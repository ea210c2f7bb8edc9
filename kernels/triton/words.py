"""Attention to pages of codebook words (codec tailored): split-KV over lanes of granules as in decode.py, one program per (lane,
KV head, 16 query rows).

A program takes a page tile by tile: the words' indices out of their bit planes, the words out of their books (numbers small
enough to be exact in fp16), keys turned by RoPE, dots on tensor cores, the softmax online in base 2. All that is linear stays
outside of the tile: a position is that of the tile and the place in it, the tile's angle turns the query back, the places'
cosines and sines never change; units, weights and the model's factor on RoPE multiply the query and the output. Values are
multiplied as they lie in the books, by weights in two parts of fp16 each.
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

WEIGHT_UNIT = tl.constexpr(1024.0)  # weights are multiplied by it in fp16, where numbers below 2^-24 end


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
def word_indices(codes, first, P: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, REAL: tl.constexpr, BITS: tl.constexpr):
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
def looked_up(words, index, REAL: tl.constexpr, COUNT: tl.constexpr):
    """fp16 [TILE, GROUPS, 8]: the words of a head's books [REAL, COUNT, 8] with these indices [TILE, GROUPS]."""
    group = tl.arange(0, index.shape[1])[None, :, None]
    at = (group * COUNT + index[:, :, None]) * 8 + tl.arange(0, 8)[None, None, :]
    return tl.load(words + at, mask=tl.broadcast_to(group < REAL, at.shape), other=0.0)


@triton.jit
def turns(table, place, pair, turned, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines of places (or pages) and pairs in a table [2, COUNT, HALF]; 1 and 0 of pairs that are not turned."""
    at = place * HALF + pair
    return tl.load(table + at, mask=turned, other=1.0), tl.load(table + COUNT * HALF + at, mask=turned, other=0.0)


@triton.jit
def halves_of(x):
    """fp32 in two parts of fp16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=["lanes", "slots"])
def words(
    records, granules, bounds, q, key_words, key_channels, key_factor, correction, page_turns, place_turns,
    value_words, value_channels, value_factor, value_center, m_out, l_out, o_out, lanes, slots, heads, rows,
    D: tl.constexpr, P: tl.constexpr, RECORD: tl.constexpr, KEY_COUNT: tl.constexpr, VALUE_COUNT: tl.constexpr,
    KEY_CODES: tl.constexpr, VALUE_CODES: tl.constexpr, SCALE: tl.constexpr, SHARE: tl.constexpr,
    HALF: tl.constexpr, TABLED: tl.constexpr, CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Partials m, l fp32 [B, lanes, HK, R], o fp32 [B, lanes, HK, R, D] of the sealed pages of each lane, R = `rows` queries.

    records, granules, bounds: see `decode`. q fp32 [B, HK, R, D] in base 2. Of keys and of values: words fp16 [HK, D / 8,
    COUNT, 8]; channels int32 [HK, D], which channel stands where in the groups, two neighbours a pair of RoPE; factor fp32
    [HK, D], in that order, what a word's numbers are multiplied by; center fp32 [HK, D], by channel, is added to values.
    correction fp32 [HK, D]: what a score gains for the squares of the query's numbers and the token's scale. page_turns,
    place_turns: `Rope.pages` (of TABLED pages) and `Rope.places`, whose pairs below HALF are turned. SCALE: a record's scales of
    SHARE tokens, those of a page lie in its heads' records one after another. GROUPS = D / 8 rounded up to a power of two.
    """
    REAL: tl.constexpr = D // 8
    TILES: tl.constexpr = P // TILE
    PAGES: tl.constexpr = 512 // P
    lane, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    head, batch = tl.program_id(1), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    source = (batch * heads + head) * rows + row

    dim = tl.arange(0, 8 * GROUPS)
    inside = real[:, None] & (dim < D)[None, :]
    if CORRECTED:
        own = tl.load(q + source[:, None] * D + dim[None, :], mask=inside, other=0.0)
        due = tl.load(correction + head * D + dim, mask=dim < D, other=0.0)
        variance = tl.sum(own * own * due[None, :], 1)
    pair = tl.arange(0, 4 * GROUPS)
    there = pair < D // 2
    at = head * D + 2 * pair
    x_channel = tl.load(key_channels + at, mask=there, other=0)
    y_channel = tl.load(key_channels + at + 1, mask=there, other=0)
    x_factor = tl.load(key_factor + at, mask=there, other=1.0)
    ratio = tl.load(key_factor + at + 1, mask=there, other=0.0) / x_factor
    inside = real[:, None] & there[None, :]
    qx = tl.load(q + source[:, None] * D + x_channel[None, :], mask=inside, other=0.0) * x_factor[None, :]
    qy = tl.load(q + source[:, None] * D + y_channel[None, :], mask=inside, other=0.0) * x_factor[None, :]
    turned = there & (x_channel < HALF)
    place = tl.arange(0, TILE)[:, None]
    cos, sin = turns(place_turns, place, x_channel[None, :], turned[None, :] & (place >= 0), P, HALF)

    key_words += head * (REAL * KEY_COUNT * 8)
    value_words += head * (REAL * VALUE_COUNT * 8)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS, TILE), tl.float32)  # each place of a tile sums for itself
    o = tl.zeros((ROWS, 8 * GROUPS), tl.float32)
    first = tl.load(bounds + 2 * (batch * lanes + lane))
    end = tl.load(bounds + 2 * (batch * lanes + lane) + 1)
    for turn in tl.range(first * TILES, end * TILES):
        number, start = turn // TILES, turn % TILES * TILE
        granule = tl.load(granules + batch.to(tl.int64) * slots + lane + number // PAGES * lanes)
        page = records + tl.multiple_of(granule + (number % PAGES * heads).to(tl.int64) * RECORD, 16)
        token = start + tl.arange(0, TILE)
        scale = halves(page + SCALE, (token // SHARE * (RECORD // 2) + token % SHARE))
        page += head.to(tl.int64) * RECORD
        keys = word_indices(page + KEY_CODES, start, P, TILE, GROUPS, REAL, index_bits(KEY_COUNT))
        values = word_indices(page + VALUE_CODES, start, P, TILE, GROUPS, REAL, index_bits(VALUE_COUNT))

        x, y = tl.split(tl.reshape(looked_up(key_words, keys, REAL, KEY_COUNT).to(tl.float32), (TILE, 4 * GROUPS, 2)))
        y = y * ratio[None, :]
        index = tl.load(page.to(tl.pointer_type(tl.int32)))
        page_cos, page_sin = turns(page_turns, index, x_channel, turned, TABLED, HALF)
        tile_cos, tile_sin = turns(place_turns, start, x_channel, turned, P, HALF)
        back_cos = page_cos * tile_cos - page_sin * tile_sin
        back_sin = page_sin * tile_cos + page_cos * tile_sin
        back_x = qx * back_cos[None, :] + qy * back_sin[None, :]
        back_y = qy * back_cos[None, :] - qx * back_sin[None, :]
        scores = tl.dot(back_x, tl.trans(x * cos - y * sin), input_precision=PRECISION)
        scores = tl.dot(back_y, tl.trans(y * cos + x * sin), scores, input_precision=PRECISION)
        if CORRECTED:
            scores += variance[:, None] * scale[None, :]
        scores *= scale[None, :]

        base = tl.maximum(m, tl.max(scores, 1))
        shrink = exp2(m - base, ASSEMBLY)[:, None]
        weights = exp2(scores - base[:, None], ASSEMBLY)
        m, l = base, l * shrink + weights
        high, low = halves_of(weights * WEIGHT_UNIT)
        found = tl.reshape(looked_up(value_words, values, REAL, VALUE_COUNT), (TILE, 8 * GROUPS))
        o = tl.dot(high, found, tl.dot(low, found, o * shrink))

    target = ((batch * lanes + lane).to(tl.int64) * heads + head) * rows + row
    total = tl.sum(l, 1)
    tl.store(m_out + target, m, mask=real)
    tl.store(l_out + target, total, mask=real)
    at, inside = head * D + dim, dim < D
    channel = tl.load(value_channels + at, mask=inside, other=0)
    factor = tl.load(value_factor + at, mask=inside, other=0.0) * (1 / WEIGHT_UNIT)
    center = tl.load(value_center + head * D + channel, mask=inside, other=0.0)
    o = o * factor[None, :] + total[:, None] * center[None, :]
    tl.store(o_out + target[:, None] * D + channel[None, :], o, mask=real[:, None] & inside[None, :])


class Words(NamedTuple):
    """One side's codebooks as the kernel takes them: see `words`."""

    words: torch.Tensor
    channels: torch.Tensor
    factor: torch.Tensor
    center: torch.Tensor


@dataclass(frozen=True)
class WordPages:
    """Sizes and byte offsets of a page record (see Layout), and what all pages share: both sides' books, the correction fp32
    [HK, D] or None, and RoPE's tables [2, pages, half] and [2, P, half]."""

    tokens: int
    dim: int
    record_bytes: int
    codes: tuple[int, int]
    scale: int
    share: int
    keys: Words
    values: Words
    correction: torch.Tensor | None
    page_turns: torch.Tensor
    place_turns: torch.Tensor


def attend_words(pages: WordPages, q: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of the lanes: m, l fp32 [B, lanes, HK, Q, G], o [.., D] of queries fp32 [B, HK, Q, G, D] in base 2."""
    chosen = config(q.device)
    batch, heads, queries, group, dim = q.shape
    shape, rows = (batch, table.lanes, heads, queries, group), queries * group
    m, l, o = q.new_empty(shape), q.new_empty(shape), q.new_empty(*shape, dim)
    groups, blocks = triton.next_power_of_2(dim // 8), triton.cdiv(rows, chosen.word_rows)
    words[(table.lanes * blocks, heads, batch)](
        table.base, table.offsets, table.bounds, q.contiguous(), *pages.keys[:3],
        pages.keys.center if pages.correction is None else pages.correction, pages.page_turns, pages.place_turns,
        *pages.values, m, l, o, table.lanes, table.offsets.shape[1], heads, rows,
        D=dim, P=pages.tokens, RECORD=pages.record_bytes,
        KEY_COUNT=pages.keys.words.shape[-2], VALUE_COUNT=pages.values.words.shape[-2],
        KEY_CODES=pages.codes[0], VALUE_CODES=pages.codes[1], SCALE=pages.scale, SHARE=pages.share,
        HALF=pages.place_turns.shape[-1], TABLED=pages.page_turns.shape[1], CORRECTED=pages.correction is not None,
        GROUPS=groups, TILE=min(pages.tokens, chosen.word_tile(groups)), ROWS=chosen.word_rows, BLOCKS=blocks,
        PRECISION=chosen.precision, ASSEMBLY=chosen.assembly, num_warps=chosen.word_warps, num_stages=1,
    )  # fmt: skip
    return m, l, o
