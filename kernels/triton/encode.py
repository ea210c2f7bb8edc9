"""Encoding of whole pages: rotate, centroid, code, scale, pack. Byte for byte that of kernels/reference.

One program encodes one side (keys or values) of one page and KV head. It walks the page twice, a few tokens at a time, and
rotates them each time anew: the centroid needs all tokens before the first can be coded, and a rotated page of 128 x 256
numbers does not fit into registers. Every sum is a tree of adjacent pairs, quotients are IEEE-rounded, nothing is fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.triton.rotate import FACTORS, constants, log2, rotate_rows, rotation_of, tree_sum
from bitkv_dist.kernels.triton.tables import config

TILE_ELEMENTS = 2048  # of a page that a program holds in registers at a time; with so many warps nothing spills
WARPS = 8


@triton.jit
def to_half(x):
    """fp16 that saturates at +-65504 instead of becoming infinite."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def safe_divide(x, y):
    """x / y, and 0 where y is 0."""
    return tl.where(y == 0, 0.0, tl.div_rn(x, tl.where(y == 0, 1.0, y)))


@triton.jit
def cells(z, scale, BITS: tl.constexpr):
    """floor(z / scale), cut to the 2^BITS cells; scale 0 counts as 1. fp32 [tokens, WIDE].

    Through an integer: the floor of a GPU takes a negative subnormal for zero.
    """
    half: tl.constexpr = 1 << (BITS - 1)
    step = tl.where(scale == 0, 1.0, scale)
    ratio = tl.div_rn(z, tl.broadcast_to(step[:, None], z.shape))
    ratio = tl.minimum(tl.maximum(ratio, -half), half)
    whole = ratio.to(tl.int32).to(tl.float32)
    return tl.minimum(tl.where(whole > ratio, whole - 1.0, whole), half - 1)


@triton.jit
def search_scale(z, inside, factors, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """fp32 [tokens]: of the candidate scales the one with the least squared error, ties to the smaller."""
    peak = tl.max(tl.abs(z), 1)
    best_scale = to_half(tl.div_rn(peak * tl.load(factors), ((1 << BITS) - 1) / 2)).to(tl.float32)
    best_error = tl.full(peak.shape, float("inf"), tl.float32)
    for i in range(FACTORS):
        scale = to_half(tl.div_rn(peak * tl.load(factors + i), ((1 << BITS) - 1) / 2)).to(tl.float32)
        error = (cells(z, scale, BITS) + 0.5) * scale[:, None] - z
        error = tree_sum(tl.where(inside[None, :], error * error, 0.0), LEVELS)
        better = error < best_error
        best_error = tl.where(better, error, best_error)
        best_scale = tl.where(better, scale, best_scale)
    return best_scale


@triton.jit
def scan_scale(z, code, inside, DIM: tl.constexpr, BITS: tl.constexpr, SCAN_BITS: tl.constexpr, UNBIASED: tl.constexpr,
               LEVELS: tl.constexpr):  # fmt: skip
    """fp16 [tokens]: the least-squares scale of the top SCAN_BITS planes, or the unbiased one."""
    if SCAN_BITS == 1:
        cross = tree_sum(tl.abs(z), LEVELS)
        length = cross * 0.0 + DIM
    else:
        level = (code >> (BITS - SCAN_BITS)).to(tl.float32) - ((1 << SCAN_BITS) - 1) / 2
        cross = tree_sum(tl.where(inside[None, :], z * level, 0.0), LEVELS)
        length = tree_sum(tl.where(inside[None, :], level * level, 0.0), LEVELS)
    if UNBIASED:
        return to_half(safe_divide(tree_sum(z * z, LEVELS), cross))
    return to_half(tl.div_rn(cross, length))


@triton.jit
def page_centroid(x, token_stride, dim_stride, signs, dct, TOKENS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
                  WIDE: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr):  # fmt: skip
    """fp16 [WIDE]: the mean of the rotated page."""
    tiles: tl.constexpr = TOKENS // TILE
    place = tl.arange(0, tiles)
    sums = tl.zeros((WIDE, tiles), tl.float32)
    for tile in range(tiles):
        token = tile * TILE + tl.arange(0, TILE)
        z = rotate_rows(x, token, token_stride, dim_stride, signs, dct, DIM, WIDE, SIZE, STEPS, ROOT)
        sums = tl.where(place[None, :] == tile, tree_sum(tl.trans(z), log2(TILE))[:, None], sums)
    return to_half(tree_sum(sums, log2(tiles)) * (1.0 / TOKENS))


@triton.jit
def pack_words(code, planes, tile, SIDE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
               WIDE: tl.constexpr, BITS: tl.constexpr, SCAN_BITS: tl.constexpr):  # fmt: skip
    """Store a tile's words of the scanned planes; code int32 [TILE, WIDE], rows and planes as the kernel lays them out."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, WIDE)[None, :]
    if SIDE == 0:  # rows (i, j), columns (g, b): word [g][i]
        shift = 8 * (column % 4) + row % 8
        i, g = tile * (TILE // 8) + tl.arange(0, TILE // 8)[:, None], tl.arange(0, WIDE // 4)[None, :]
        word, stored = g * (TOKENS // 8) + i, (i >= 0) & (g < DIM // 4)
    else:  # rows (u, b), columns are brought into the order (i, j): word [u][i]
        source = column // 8 + (DIM // 8) * (column % 8)
        code = tl.gather(code, tl.broadcast_to(tl.minimum(source, WIDE - 1), code.shape), 1)
        shift = 8 * (row % 4) + column % 8
        u, i = tile * (TILE // 4) + tl.arange(0, TILE // 4)[:, None], tl.arange(0, WIDE // 8)[None, :]
        word, stored = u * (DIM // 8) + i, (u >= 0) & (i < DIM // 8)
    for plane in tl.static_range(SCAN_BITS):
        bit = ((code >> (BITS - 1 - plane)) & 1) << shift
        if SIDE == 0:
            words = tl.sum(tl.sum(tl.reshape(bit, (TILE // 8, 8, WIDE // 4, 4)), 3), 1)
        else:
            words = tl.sum(tl.sum(tl.reshape(bit, (TILE // 4, 4, WIDE // 8, 8)), 3), 1)
        tl.store(planes + plane * (TOKENS * DIM // 32) + word, words.to(tl.int32), mask=stored)


@triton.jit
def pack_low(code, low, token, TILE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, LOW_BITS: tl.constexpr):
    """Store the low bits of the tile's tokens, token-major, most significant plane first."""
    byte = tl.arange(0, WIDE // 8)
    at = low + token[:, None] * (LOW_BITS * DIM // 8) + byte[None, :]
    for plane in tl.static_range(LOW_BITS):
        bit = ((code >> (LOW_BITS - 1 - plane)) & 1) << (tl.arange(0, WIDE) % 8)[None, :]
        packed = tl.sum(tl.reshape(bit, (TILE, WIDE // 8, 8)), 2)
        tl.store(at + plane * (DIM // 8), packed.to(tl.uint8), mask=(byte < DIM // 8)[None, :])


@triton.jit
def encode_side(x, page_stride, head_stride, token_stride, dim_stride, signs, table, records, kv_heads, record_bytes,
                planes_at, scan_at, full_at, low_at, centroid_at,
                SIDE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
                SIZE: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr, BITS: tl.constexpr, SCAN_BITS: tl.constexpr,
                UNBIASED: tl.constexpr):  # fmt: skip
    """Program p encodes page p // HK, head p % HK of x [pages, HK, P, D] into that side's fields of its record."""
    levels: tl.constexpr = log2(WIDE)
    program = tl.program_id(0)
    page, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    x += page * page_stride + head * head_stride
    signs += head * DIM
    record = records + program.to(tl.int64) * record_bytes
    planes = (record + planes_at).to(tl.pointer_type(tl.int32))
    scans, fulls = (record + scan_at).to(tl.pointer_type(tl.float16)), (record + full_at).to(tl.pointer_type(tl.float16))
    dct = table + FACTORS

    centroid = page_centroid(x, token_stride, dim_stride, signs, dct, TOKENS, TILE, DIM, WIDE, SIZE, STEPS, ROOT)
    d = tl.arange(0, WIDE)
    inside = d < DIM
    tl.store((record + centroid_at).to(tl.pointer_type(tl.float16)) + d, centroid, mask=inside)

    for tile in range(TOKENS // TILE):
        row = tl.arange(0, TILE)
        token = tile * TILE + row
        if SIDE == 0:  # a word of keys takes its eight tokens from all over the page
            token = tile * (TILE // 8) + row // 8 + (TOKENS // 8) * (row % 8)
        z = rotate_rows(x, token, token_stride, dim_stride, signs, dct, DIM, WIDE, SIZE, STEPS, ROOT)
        z = z - centroid.to(tl.float32)[None, :]
        if BITS == 1:
            code = (z >= 0).to(tl.int32)
        else:
            full = search_scale(z, inside, table, BITS, levels)
            code = cells(z, full, BITS).to(tl.int32) + (1 << (BITS - 1))
        if BITS == 1 or SCAN_BITS < BITS or UNBIASED:
            scan = scan_scale(z, code, inside, DIM, BITS, SCAN_BITS, UNBIASED, levels)
        else:
            scan = full.to(tl.float16)
        tl.store(scans + token, scan)
        if SCAN_BITS < BITS:
            tl.store(fulls + token, full.to(tl.float16))
            pack_low(code, record + low_at, token, TILE, DIM, WIDE, BITS - SCAN_BITS)
        pack_words(code, planes, tile, SIDE, TOKENS, TILE, DIM, WIDE, BITS, SCAN_BITS)


def encode(layout, k: torch.Tensor, v: torch.Tensor, key_signs: torch.Tensor, value_signs: torch.Tensor,
           unbiased: bool) -> torch.Tensor:
    """k, v [pages, HK, P, D] of any strides in fp32, fp16 or bf16, finite; signs fp32 [HK, D] -> records uint8
    [pages, HK, record_bytes], the bytes of the reference. unbiased: the keys' scan scale is <z, z> / <z, level>."""
    pages, kv_heads, tokens, dim = k.shape
    records = torch.zeros(pages, kv_heads, layout.record_bytes, dtype=torch.uint8, device=k.device)
    rotation, options = rotation_of(dim), config(k.device).registers()
    tile = max(8, min(tokens, TILE_ELEMENTS // rotation.WIDE))
    for side, (x, signs) in enumerate(((k, key_signs), (v, value_signs))):
        if pages:
            encode_side[(pages * kv_heads,)](
                x, *x.stride(), signs, constants(dim, k.device), records, kv_heads, layout.record_bytes,
                layout.planes[side], layout.scan[side], layout.full[side], layout.low[side], layout.centroid[side],
                SIDE=side, TOKENS=tokens, TILE=tile, **rotation._asdict(), BITS=layout.bits[side],
                SCAN_BITS=layout.scan_bits[side], UNBIASED=bool(unbiased and side == 0),
                num_warps=WARPS, enable_fp_fusion=False, **options,
            )  # fmt: skip
    return records
