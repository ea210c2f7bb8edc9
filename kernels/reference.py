"""Plain-torch twin of every kernel: readable first, and the definition that the fast ones are tested against.

Shapes use the letters of the design: HK KV heads, G query heads of a group, Q query positions, P page tokens, D head dim,
B stored bits, S scanned bits, n granules of `pages` pages each. Integer parts are exact: sums of small integers held in
fp32 stay below 2^24, so any order of summation gives the same number.

Two kinds of sums appear. `tree_sum` adds adjacent pairs and belongs to the format: encoding uses it, so its bytes are the
same on every machine. `fold_sum` adds the two halves of a row, which vectorises; it fixes an order that depends neither on the
number of threads nor on how many rows are computed together.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

HALF_MAX = 65504.0
SCALE_FACTORS = tuple(round(0.40 + 0.05 * i, 2) for i in range(17))


# ---------------------------------------------------------------------------------------------------------- sums


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` as a tree of adjacent pairs, zero-padded to a power of two."""
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        if x.shape[0] % 2:
            x = torch.cat((x, torch.zeros_like(x[:1])))
        x = x[0::2] + x[1::2]
    return x[0]


def fold_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim by adding its second half to its first, zero-padded to a power of two."""
    n = x.shape[-1]
    size = 1 << max(0, n - 1).bit_length()
    x = F.pad(x, (0, size - n)) if size != n else x
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x through `torch.exp`: torch.exp2 differs in the last bit between its vector body and its scalar tail, so that a value would
    depend on its place in the tensor."""
    return torch.exp(x * math.log(2))


def divide(x: torch.Tensor, value: float) -> torch.Tensor:
    """IEEE-rounded x / value: torch on CUDA would multiply by the reciprocal of a Python number."""
    return x / torch.full((), value, dtype=x.dtype, device=x.device)


# ------------------------------------------------------------------------------------------------------ rotation


def split_dim(dim: int) -> tuple[int, int]:
    """dim = 2^a * m -> (2^a, m) with m in {1, 3, 5, 7}; raises ValueError for head dims that have no rotation."""
    power = dim & -dim
    if dim % 8 or dim // power not in (1, 3, 5, 7):
        raise ValueError(f"head_dim {dim}: must be a multiple of 8 of the form 2^a * m with m in 1, 3, 5, 7; serve it with --kv-bits 16")
    return power, dim // power


@functools.cache
def dct_matrix(m: int) -> tuple[tuple[float, ...], ...]:
    """Rows of the orthonormal DCT-II of size m (Ahmed, Natarajan, Rao 1974)."""
    def row(k: int) -> tuple[float, ...]:
        return tuple(math.sqrt((2 if k else 1) / m) * math.cos(math.pi * (j + 0.5) * k / m) for j in range(m))
    return tuple(row(k) for k in range(m))


def small_matmul(x: torch.Tensor, rows: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    """x [..., m] times the matrix of `rows`, each output a plain left-to-right sum."""
    outputs = []
    for row in rows:
        total = x[..., 0] * row[0]
        for j in range(1, len(row)):
            total = total + x[..., j] * row[j]
        outputs.append(total)
    return torch.stack(outputs, dim=-1)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform over dim -2 of x [..., 2^a, m], butterflies of stride 1, 2, 4, .."""
    size, m = x.shape[-2:]
    stride = 1
    while stride < size:
        a, b = x.reshape(*x.shape[:-2], size // (2 * stride), 2, stride, m).unbind(-3)
        x = torch.stack((a + b, a - b), dim=-3).reshape(*x.shape[:-2], size, m)
        stride *= 2
    return x * (1.0 / math.sqrt(size))


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R x = (H_{2^a} (x) Q_m) diag(signs) x, fp32 [..., D]; `signs` [.., D] broadcasts against x. Dim = i * m + j."""
    size, m = split_dim(x.shape[-1])
    y = (x * signs).unflatten(-1, (size, m))
    if m > 1:
        y = small_matmul(y, dct_matrix(m))
    return hadamard(y).flatten(-2)


def rotate_back(z: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R^T z, fp32 [..., D]: the inverse of `rotate`."""
    size, m = split_dim(z.shape[-1])
    y = hadamard(z.unflatten(-1, (size, m)))
    if m > 1:
        y = small_matmul(y, tuple(zip(*dct_matrix(m), strict=True)))
    return y.flatten(-2) * signs


# ------------------------------------------------------------------------------------------- mid-rise codes, scales


def to_half(x: torch.Tensor) -> torch.Tensor:
    """fp16 that saturates at +-65504 instead of becoming infinite."""
    return x.clamp(-HALF_MAX, HALF_MAX).half()


class Codes(NamedTuple):
    """Mid-rise codes of vectors: code uint8 [..., D]; full and scan fp16 [...], the same tensor when all planes are scanned."""

    code: torch.Tensor
    full: torch.Tensor
    scan: torch.Tensor


def quantize(z: torch.Tensor, bits: int, scan_bits: int, unbiased: bool = False) -> Codes:
    """B-bit mid-rise codes of z fp32 [..., D]: z ~ full * (code - (2^B - 1) / 2), whose top bit is sign(z).

    B = 1: full = |z|_1 / D, the least-squares scale. B >= 2: of 17 candidates fp16(f * max|z| / ((2^B - 1) / 2)) the one with the
    least squared error, ties to the smaller. scan = least-squares scale of the top S planes, whose levels are -1, +1 for
    S = 1 and code_top - (2^S - 1) / 2 otherwise. `unbiased` takes <z, z> / <z, level> for scan instead (RaBitQ, Gao and Long,
    SIGMOD 2024): right for ranking by inner product, wrong under softmax.
    """
    dim = z.shape[-1]
    z = z.movedim(-1, 0).contiguous()  # dim first: the tree then adds whole rows
    magnitude = z.abs()
    if bits == 1:
        code = (z >= 0).to(torch.uint8)
        full = to_half(divide(tree_sum(magnitude, 0), dim))
    else:
        code, full = search_scale(z, magnitude.amax(0), bits)
    if scan_bits == bits and not unbiased:
        scan = full
    elif scan_bits == 1:
        total = tree_sum(magnitude, 0)
        scan = to_half(safe_divide(tree_sum(z * z, 0), total) if unbiased else divide(total, dim))
    else:
        level = (code >> (bits - scan_bits)).float() - ((1 << scan_bits) - 1) / 2
        cross = tree_sum(z * level, 0)
        scan = to_half(safe_divide(tree_sum(z * z, 0), cross) if unbiased else cross / tree_sum(level * level, 0))
    full = scan if scan_bits == bits else full
    return Codes(code.movedim(0, -1), full, scan)


def safe_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / torch.where(y == 0, 1.0, y))


def search_scale(z: torch.Tensor, peak: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(code uint8 [D, ...], scale fp16 [...]) of z [D, ...] with the least squared error over SCALE_FACTORS."""
    half_range = ((1 << bits) - 1) / 2
    best_error = torch.full_like(peak, math.inf)
    best_code = torch.zeros_like(z)
    best_scale = torch.zeros_like(peak)
    for factor in SCALE_FACTORS:
        scale = to_half(divide(peak * factor, half_range)).float()
        cell = torch.floor(z / torch.where(scale == 0, 1.0, scale)).clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        error = cell.add(0.5).mul_(scale).sub_(z)
        error = tree_sum(error.mul_(error), 0)
        better = error < best_error
        if factor == SCALE_FACTORS[0]:
            better = torch.ones_like(better)  # an error that overflows to infinity still leaves a code and a scale
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_code = torch.where(better, cell, best_code)
    return (best_code + (1 << (bits - 1))).to(torch.uint8), best_scale.half()


# ------------------------------------------------------------------------------------------------- the page layout


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8] of 0/1 -> uint8 [...], element j in bit j."""
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


@functools.cache
def bit_table(device: torch.device) -> torch.Tensor:
    """fp32 [256, 8]: row = byte, column j = its bit j."""
    return ((torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1).float()


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [...] -> fp32 [..., 8] of 0/1: the inverse of `pack_bits`."""
    return F.embedding(packed.int(), bit_table(packed.device))


def pack_key_plane(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., P, D] of 0/1 -> int32 words [..., D/4, P/8]: bit 8b + j of word [g][i] is dim 4g + b of token i + (P/8) j."""
    tokens, dim = bits.shape[-2:]
    grid = bits.unflatten(-1, (dim // 4, 4)).unflatten(-3, (8, tokens // 8))  # [.., j, i, g, b]
    return pack_bits(move_last(grid, (2, 1, 3, 0))).view(torch.int32).squeeze(-1)


def unpack_key_plane(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_key_plane`, as fp32 0/1 [..., P, D]."""
    bits = unpack_bits(words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)))  # [.., g, i, b, j]
    return move_last(bits, (3, 1, 0, 2)).flatten(-2).flatten(-3, -2)


def pack_value_plane(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., P, D] of 0/1 -> int32 words [..., P/4, D/8]: bit 8b + j of word [u][i] is token 4u + b of dim i + (D/8) j."""
    tokens, dim = bits.shape[-2:]
    grid = bits.unflatten(-1, (8, dim // 8)).unflatten(-3, (tokens // 4, 4))  # [.., u, b, j, i]
    return pack_bits(move_last(grid, (0, 3, 1, 2))).view(torch.int32).squeeze(-1)


def unpack_value_plane(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_value_plane`, as fp32 0/1 [..., P, D]."""
    bits = unpack_bits(words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)))  # [.., u, i, b, j]
    return move_last(bits, (0, 2, 3, 1)).flatten(-2).flatten(-3, -2)


def move_last(x: torch.Tensor, order: tuple[int, int, int, int]) -> torch.Tensor:
    """Permute the last four dims of x and make it contiguous."""
    lead = x.dim() - 4
    return x.permute(*range(lead), *(lead + i for i in order)).contiguous()


def pack_planes(code: torch.Tensor, bits: int, scan_bits: int, side: str) -> torch.Tensor:
    """The S scanned planes, sign plane first: code uint8 [..., P, D] -> int32 [..., S, D/4, P/8] (side K) or [..., S, P/4, D/8] (V)."""
    pack = pack_key_plane if side == "K" else pack_value_plane
    return torch.stack([pack((code >> shift) & 1) for shift in range(bits - 1, bits - scan_bits - 1, -1)], dim=-3)


def unpack_planes(planes: torch.Tensor, side: str) -> torch.Tensor:
    """fp32 codes [..., P, D] of the scanned planes: the inverse of `pack_planes`."""
    unpack = unpack_key_plane if side == "K" else unpack_value_plane
    code = unpack(planes[..., 0, :, :])
    for plane in range(1, planes.shape[-3]):
        code = code.mul_(2).add_(unpack(planes[..., plane, :, :]))
    return code


def pack_low(code: torch.Tensor, low_bits: int) -> torch.Tensor:
    """The low bits, token-major: code uint8 [..., P, D] -> uint8 [..., P, low_bits * D/8], most significant plane first, bit d % 8 of byte d / 8."""
    rows = [pack_bits(((code >> shift) & 1).unflatten(-1, (-1, 8))) for shift in range(low_bits - 1, -1, -1)]
    return torch.cat(rows, dim=-1) if rows else code.new_empty(*code.shape[:-1], 0)


def unpack_low(low: torch.Tensor, low_bits: int) -> torch.Tensor:
    """fp32 [..., P, D] of the low bits: the inverse of `pack_low`, low_bits >= 1."""
    planes = unpack_bits(low.unflatten(-1, (low_bits, -1))).flatten(-2)  # [.., P, plane, D]
    code = planes[..., 0, :]
    for plane in range(1, low_bits):
        code = code * 2 + planes[..., plane, :]
    return code


# --------------------------------------------------------------------------------------------------------- encode


class Plane(NamedTuple):
    """Keys or values of pages in stored form; leading dims are those of the pages and KV heads.

    planes int32 [.., S, D/4, P/8] (keys) or [.., S, P/4, D/8] (values); low uint8 [.., P, (B - S) D/8]; scan, full fp16 [.., P];
    centroid fp16 [.., D], in the rotated space.
    """

    planes: torch.Tensor
    low: torch.Tensor
    scan: torch.Tensor
    full: torch.Tensor
    centroid: torch.Tensor


def encode(x: torch.Tensor, signs: torch.Tensor, bits: int, scan_bits: int, side: str, unbiased: bool = False) -> Plane:
    """Encode whole pages x fp32 [pages, HK, P, D] with rotation signs [HK, D]; finite input only.

    The centroid is the mean of the *rotated* page, rounded to fp16; what is coded is the distance to it as stored. Rotation is
    linear, so this is R (x - c) with c rounded in the rotated space: q.c and the values' centroid then need no second rotation.
    """
    z = rotate(x, signs[:, None, :])
    centroid = to_half(tree_sum(z, -2) / x.shape[-2])
    z = z - centroid.float().unsqueeze(-2)
    code, full, scan = quantize(z, bits, scan_bits, unbiased)
    return Plane(pack_planes(code, bits, scan_bits, side), pack_low(code, bits - scan_bits), scan, full, centroid)


def levels(plane: Plane, side: str, low_bits: int) -> torch.Tensor:
    """Odd integers 2 i - (2^B - 1) of the full codes, fp32 [.., P, D]; low_bits = 0 gives those of the scanned planes."""
    code = unpack_planes(plane.planes, side)
    bits = plane.planes.shape[-3] + low_bits
    if low_bits:
        code = code * (1 << low_bits) + unpack_low(plane.low, low_bits)
    return code.mul_(2).sub_((1 << bits) - 1)


def level_unit(bits: int) -> float:
    """What one odd integer of `levels` is worth in scales: the sign plane's levels are -1, +1, all others are half-integers."""
    return 1.0 if bits == 1 else 0.5


def decode(plane: Plane, signs: torch.Tensor, bits: int, scan_bits: int, side: str) -> torch.Tensor:
    """The vectors that the full codes stand for, fp32 [.., HK, P, D], rotated back."""
    unit = level_unit(bits)
    z = levels(plane, side, bits - scan_bits) * (plane.full.float() * unit).unsqueeze(-1) + plane.centroid.float().unsqueeze(-2)
    return rotate_back(z, signs[:, None, :])


# --------------------------------------------------------------------------------------------------------- attend


class Query(NamedTuple):
    """Rotated queries of one layer. codes fp32 integers -127..127 [HK, Q, G, D]; scale, norm2 fp32 [HK, Q, G]; rotated fp32 [HK, Q, G, D].

    All in base 2: the query was multiplied by softmax scale * log2(e). norm2 = |q'|^2.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor


def quantize_query(q: torch.Tensor, signs: torch.Tensor) -> Query:
    """q fp32 [HK, Q, G, D] in base 2 -> Query: codes = rint(127 * qr / max|qr|) per head, half to even."""
    rotated = rotate(q, signs[:, None, None, :])
    peak = rotated.abs().amax(-1)
    codes = torch.round(127.0 * rotated / torch.where(peak == 0, 1.0, peak).unsqueeze(-1))
    return Query(codes, divide(peak, 127.0), fold_sum(rotated * rotated), rotated)


def score_integers(codes: torch.Tensor, key_levels: torch.Tensor) -> torch.Tensor:
    """Exact integer dot products: codes [HK, Q, G, D] x levels [n, HK, T, D] -> fp32 integers [n, HK, Q, G, T]."""
    rows = codes.flatten(1, 2)
    return (rows @ key_levels.transpose(-1, -2)).unflatten(-2, codes.shape[1:3])


def score(query: Query, key_levels: torch.Tensor, scales: torch.Tensor, unit: float, centroid: torch.Tensor, noise: float) -> torch.Tensor:
    """Base-2 scores [n, HK, Q, G, T] = q.c + a_t <q, level> + 0.5 ln2 |q'|^2 noise a_t^2 (log-normal mean; `noise` = r^2 / (D a^2)).

    key_levels [n, HK, T, D]; scales fp32 [n, HK, T]; centroid fp32 [n, pages, HK, D], T = pages * P.
    """
    pages = centroid.shape[1]
    scales = scales[:, :, None, None, :]
    integers = score_integers(query.codes, key_levels)
    base = fold_sum(query.rotated[None, None] * centroid[:, :, :, None, None, :]).movedim(1, -1)  # [n, HK, Q, G, pages]
    out = integers * query.scale.unsqueeze(-1) * (scales * unit)
    if noise:
        out = out + (query.norm2 * (0.5 * math.log(2) * noise)).unsqueeze(-1) * (scales * scales)
    return (out.unflatten(-1, (pages, -1)) + base.unsqueeze(-1)).flatten(-2)


def value_integers(weights: torch.Tensor, value_levels: torch.Tensor) -> torch.Tensor:
    """Exact integer sums per page: weights 0..127 [n, pages, HK, R, P] x levels [n, pages, HK, P, D] -> fp32 integers [.., R, D]."""
    return weights @ value_levels


def quantize_weights(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative fp32 [.., P] -> (integers 0..127 as fp32, scale fp32 [..] = page maximum / 127); an all-zero page gives zeros."""
    peak = weights.amax(-1)
    return torch.round(127.0 * weights / torch.where(peak == 0, 1.0, peak).unsqueeze(-1)), divide(peak, 127.0)


def value_pass(weights: torch.Tensor, value_levels: torch.Tensor, unit: float) -> torch.Tensor:
    """sum_t w_t level_t per page with integer weights: weights fp32 [n, HK, R, pages, P], levels [n, pages, HK, P, D] -> [n, pages, HK, R, D]."""
    integers, scale = quantize_weights(weights.permute(0, 3, 1, 2, 4))
    return value_integers(integers, value_levels) * (scale * unit).unsqueeze(-1)


class Selection(NamedTuple):
    """How tokens are chosen for refinement inside a granule: `value` is the share, at least `min_tokens`; `group` = one set for all G heads."""

    value: float
    min_tokens: int
    group: bool


def select(scores: torch.Tensor, sealed: torch.Tensor, rule: Selection) -> torch.Tensor:
    """Boolean mask like scores [n, HK, Q, G, T]: the tokens with the largest weight in each granule, ties to the lower position.

    sealed int64 [n] counts the valid tokens of each granule; k = max(min_tokens, ceil(value * sealed)), at most sealed. For a group a
    token counts with its largest (score - log-sum-exp of that head inside the granule).
    """
    ranked = scores
    if rule.group and scores.shape[-2] > 1:
        peak = scores.amax(-1, keepdim=True)
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        mass = fold_sum(exp2(scores - peak)).unsqueeze(-1)
        ranked = (scores - (peak + torch.log2(mass))).amax(-2, keepdim=True)
    counts = torch.ceil(sealed.double() * rule.value).long().clamp(min=rule.min_tokens).minimum(sealed)
    return largest(ranked, counts[:, None, None, None]).expand_as(scores) & ~torch.isinf(scores)


def largest(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of the counts[..] largest entries of each row of x [.., T], ties to the lower position."""
    most = int(counts.max())
    if most == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    top = x.topk(most, dim=-1).values
    index = (counts - 1).clamp(min=0).expand(x.shape[:-1]).unsqueeze(-1)
    threshold = top.gather(-1, index)
    mask = x > threshold
    ties = x == threshold
    room = counts.unsqueeze(-1) - mask.sum(-1, keepdim=True)
    return mask | (ties & (ties.cumsum(-1) <= room))


class Attended(NamedTuple):
    """Partials per granule in the rotated space: m, l fp32 [n, HK, Q, G], o fp32 [n, HK, Q, G, D]; refined = mask [n, HK, Q, G, T] or None."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor
    refined: torch.Tensor | None


def attend(query: Query, keys: Plane, values: Plane, page_valid: torch.Tensor, key_low: int, value_low: int,
           noise: dict[tuple[int, int], float], selection: Selection | None) -> Attended:
    """Attention of one sequence's queries to n granules of sealed pages: scan, select, refine, softmax, values.

    keys and values: Plane with leading dims [n, pages, HK]. page_valid bool [n, pages]. key_low, value_low: bits below the scanned
    planes. noise[(S, B)] = lost energy r^2 / (D a^2) of the top S planes of a B-bit code. Without `selection` the scanned planes
    are all that is used. Selected tokens take their B-bit score and value; the tail keeps its scanned ones.
    """
    pages, tokens = keys.full.shape[1], keys.full.shape[-1]
    key_scan, value_scan = keys.planes.shape[-3], values.planes.shape[-3]
    valid = page_valid.repeat_interleave(tokens, 1)[:, None, None, None, :]
    key_centroid, value_centroid = keys.centroid.float(), values.centroid.float()

    def key_scores(scanned: bool) -> torch.Tensor:
        low = 0 if scanned else key_low
        scales = (keys.scan if scanned else keys.full).float().transpose(1, 2).flatten(2)  # [n, HK, T]
        codes = levels(keys, "K", low).transpose(1, 2).flatten(2, 3)  # [n, HK, T, D]
        found = score(query, codes, scales, level_unit(key_scan + low), key_centroid, noise[key_scan + low, key_scan + key_low])
        return torch.where(valid, found, -math.inf)

    scores = key_scores(scanned=True)
    refined = None
    if selection is not None:
        refined = select(scores, page_valid.sum(1) * tokens, selection)
        if key_low:
            scores = torch.where(refined, key_scores(scanned=False), scores)

    m = scores.amax(-1)
    p = exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1))
    l = fold_sum(p)

    rows = p.flatten(2, 3).unflatten(-1, (pages, tokens))  # [n, HK, R, pages, P]
    mass = fold_sum(rows).permute(0, 3, 1, 2).unsqueeze(-1)  # [n, pages, HK, R, 1]
    out = mass * value_centroid.unsqueeze(-2)
    scan_weights = rows * values.scan.float().permute(0, 2, 1, 3).unsqueeze(2)
    if refined is None or not value_low:
        out = out + value_pass(scan_weights, levels(values, "V", 0), level_unit(value_scan))
    else:
        chosen = refined.flatten(2, 3).unflatten(-1, (pages, tokens))
        out = out + value_pass(scan_weights.masked_fill(chosen, 0.0), levels(values, "V", 0), level_unit(value_scan))
        full_weights = (rows * values.full.float().permute(0, 2, 1, 3).unsqueeze(2)).masked_fill(~chosen, 0.0)
        out = out + value_pass(full_weights, levels(values, "V", value_low), level_unit(value_scan + value_low))
    o = tree_sum(out, 1).unflatten(2, p.shape[2:4])
    return Attended(m, l, o, refined)


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of q fp32 [HK, Q, G, D] (base 2) over k, v fp32 [n, HK, T, D]: m, l [n, HK, Q, G], o [n, HK, Q, G, D].

    valid: bool broadcastable to [n, HK, Q, G, T], or None. T = 0 gives the empty partial. Never SDPA: with one query its last bits
    depend on the number of threads.
    """
    shape = (k.shape[0], *q.shape[:3])
    if k.shape[-2] == 0:
        return q.new_full(shape, -math.inf), q.new_zeros(shape), q.new_zeros(*shape, q.shape[-1])
    if k.shape[:2] == (1, 1):  # a lone matrix product may be split among threads, in an order of its own; one of two never is
        k, v = k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)
    scores = (q.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(-2, q.shape[1:3])
    if valid is not None:
        scores = torch.where(valid, scores, -math.inf)
    m = scores.amax(-1)
    p = exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1))
    o = (p.flatten(2, 3) @ v).unflatten(-2, q.shape[1:3])
    return m[: shape[0]], fold_sum(p)[: shape[0]], o[: shape[0]]
