"""Bit planes to tensor-core operands: packed words expand to int8 in registers, four operands per 32-bit register.

A plane is words [HEIGHT][WIDTH] of the page layout: keys [D/4][P/8], values [P/4][D/8]. Bit 8 b + j of word [h][i] belongs to
index 4 h + b of the summed dim (K of the dot: dims of a key, tokens of values) and to row i + WIDTH j (M: tokens, dims). A
mask per j therefore yields a whole operand, without a shift for one plane: 0 or 2^e(j) per code bit, and the dot is divided by
2^e(j) where its scale is applied anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ASSEMBLY of the kernels: what expands a word, NVIDIA's and AMD's assembly and the plain twin of each. NVIDIA's takes four
# bytes as one register; LLVM has no register of four bytes for AMD, so there it works on words that are cut into bytes later.
PLAIN, PTX, PLAIN_WORDS, GCN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.constexpr_function
def in_words(assembly: int) -> bool:
    return assembly >= 2


@triton.constexpr_function
def shifted(bits: int, plane: int, j: int, exact: bool) -> tuple[int, int]:
    """(left shift of a plane's words, bit) at which mask j finds the code bit of that plane.

    A code's bits end side by side below bit 7. `exact`: at the bottom of the byte, for one shift per mask. Otherwise where
    they give code * 2^e(j): shifts differ only between the lower and the upper four masks, and one plane needs none.
    """
    place = bits - 1 - plane
    if exact:
        return place - j, place
    if bits == 1:
        return 0, j
    left = place if j < 4 else place - bits
    return left, j + left


@triton.constexpr_function
def expansion(bits: int, exact: bool) -> str:
    """PTX of `expand`: outputs $0..$7, one register of four operands per mask, from the planes' registers $8.. ."""
    lines, held = [".reg .b32 s, t;"], None
    for plane in range(bits):
        for j in range(8):
            left, bit = shifted(bits, plane, j, exact)
            source, mask = f"${8 + plane}" if left == 0 else "s", 0x01010101 << bit
            if left and held != (plane, left):
                lines.append(f"sh{'l' if left > 0 else 'r'}.b32 s, ${8 + plane}, {abs(left)};")
                held = plane, left
            if plane == 0:
                lines.append(f"and.b32 ${j}, {source}, {mask};")
            else:
                lines.append(f"and.b32 t, {source}, {mask}; or.b32 ${j}, ${j}, t;")
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def constraints(bits: int) -> str:
    return ",".join(["=&r"] * 8 + ["r"] * bits)


@triton.constexpr_function
def gcn_expansion(bits: int) -> str:
    """The same for AMD: outputs $0..$7, a register $8 to shift in, the planes' from $9 on, then the eight masks'."""
    lines, held = [], None
    for plane in range(bits):
        for j in range(8):
            left, bit = shifted(bits, plane, j, False)
            source, mask = f"${9 + plane}" if left == 0 else "$8", f"${9 + bits + bit}"
            if left and held != (plane, left):
                lines.append(f"v_lsh{'l' if left > 0 else 'r'}rev_b32 $8, {abs(left)}, ${9 + plane}")
                held = plane, left
            lines.append(f"v_and_b32 ${j}, {mask}, {source}" if plane == 0 else f"v_and_or_b32 ${j}, {source}, {mask}, ${j}")
    return "\n\t".join(lines)


@triton.constexpr_function
def gcn_constraints(bits: int) -> str:
    return ",".join(["=&v"] * 9 + ["v"] * bits + ["s"] * 8)


@triton.jit
def code_bit(words, LEFT: tl.constexpr, BIT: tl.constexpr):
    """Bit BIT of bytes shifted left, with LEFT < 0 right."""
    return (words << LEFT if LEFT > 0 else words >> -LEFT) & (1 << BIT)


@triton.jit
def expand(words, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Planes of bytes uint8 [..], sign plane first -> 8 tensors int8 [..]: mask j's operands code * 2^e(j), with EXACT e =
    0."""
    BITS: tl.constexpr = len(words)
    if ASSEMBLY == PTX:
        parts = tl.inline_asm_elementwise(
            expansion(BITS, EXACT), constraints(BITS), words, dtype=(tl.int8,) * 8, is_pure=True, pack=4
        )
    else:
        parts = ()
        for j in tl.static_range(8):
            part = code_bit(words[0], shifted(BITS, 0, j, EXACT)[0], shifted(BITS, 0, j, EXACT)[1])
            for plane in tl.static_range(1, BITS):
                part |= code_bit(words[plane], shifted(BITS, plane, j, EXACT)[0], shifted(BITS, plane, j, EXACT)[1])
            parts = parts + (part.to(tl.int8, bitcast=True),)  # noqa: RUF005
    return parts


@triton.constexpr_function
def word_mask(bit: int) -> int:
    """The int32 with this bit set in its four bytes."""
    return (0x01010101 << bit) - (1 << 32 if bit == 7 else 0)


@triton.jit
def word_bits(words, LEFT: tl.constexpr, BIT: tl.constexpr):
    """Bit BIT of the bytes of words shifted left, with LEFT < 0 right."""
    return (words << LEFT if LEFT > 0 else words >> -LEFT) & word_mask(BIT)


@triton.jit
def expand_words(words, ASSEMBLY: tl.constexpr):
    """Planes of words int32 [..], sign plane first -> 8 tensors int32 [..]: in their bytes what `expand` makes of those of
    `words`."""
    BITS: tl.constexpr = len(words)
    parts = ()
    if ASSEMBLY == GCN:
        # What assembly yields is opaque to the compiler, which would otherwise mask byte by byte.
        masks = ()
        for bit in tl.static_range(8):
            masks = masks + (tl.full(words[0].shape, word_mask(bit), tl.int32),)  # noqa: RUF005
        parts = tl.inline_asm_elementwise(
            gcn_expansion(BITS), gcn_constraints(BITS), words + masks, dtype=(tl.int32,) * 9, is_pure=True, pack=1
        )
    else:
        for j in tl.static_range(8):
            part = word_bits(words[0], shifted(BITS, 0, j, False)[0], shifted(BITS, 0, j, False)[1])
            for plane in tl.static_range(1, BITS):
                part |= word_bits(words[plane], shifted(BITS, plane, j, False)[0], shifted(BITS, plane, j, False)[1])
            parts = parts + (part,)  # noqa: RUF005
    return parts


@triton.jit
def bytes_of(words):
    """int32 [ROWS, N] -> int8 [ROWS, 4 N], low bytes first."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def load_planes(plane, plane_bytes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr,
                ASSEMBLY: tl.constexpr):  # fmt: skip
    """BITS tensors of words [HEIGHT][STRIDE] from `plane` on, `plane_bytes` apart: uint8 [HEIGHT, WIDTH, 4], or int32
    [HEIGHT, WIDTH, 1].

    WIDTH = STRIDE rounded up to a power of two: where it is more, rows run into the next, and what they find is not used.
    """
    SIZE: tl.constexpr = 1 if in_words(ASSEMBLY) else 4
    words = ()
    for _ in tl.static_range(BITS):
        at = plane.to(tl.pointer_type(tl.int32)) if in_words(ASSEMBLY) else plane
        if WIDTH == STRIDE:
            flat = tl.load(at + tl.arange(0, HEIGHT * WIDTH * SIZE))
        else:
            flat = tl.load(at + tl.arange(0, HEIGHT)[:, None] * (SIZE * STRIDE) + tl.arange(0, WIDTH * SIZE)[None, :])
        words = words + (tl.reshape(flat, (HEIGHT, WIDTH, SIZE)),)  # noqa: RUF005
        plane += plane_bytes
    return words


@triton.jit
def stack(parts):
    """1, 2, 4 or 8 consecutive masks' tensors [HEIGHT, WIDTH, SIZE] -> [masks * WIDTH, HEIGHT * SIZE], row = i + WIDTH j."""
    HEIGHT: tl.constexpr = parts[0].shape[0]
    WIDTH: tl.constexpr = parts[0].shape[1]
    SIZE: tl.constexpr = parts[0].shape[2]
    if len(parts) == 1:
        rows = tl.permute(parts[0], (1, 0, 2))
    elif len(parts) == 2:
        rows = tl.permute(tl.join(parts[0], parts[1]), (3, 1, 0, 2))
    elif len(parts) == 4:
        low, high = tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])
        rows = tl.permute(tl.join(low, high), (3, 4, 1, 0, 2))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        rows = tl.permute(tl.join(even, odd), (3, 4, 5, 1, 0, 2))
    return tl.reshape(rows, (len(parts) * WIDTH, HEIGHT * SIZE))


@triton.jit
def plane_dots(words, operand, sums, ASSEMBLY: tl.constexpr):
    """SETS tensors int32 [8 WIDTH / SETS, COLS] += the codes of `words` times operand int8 [4 HEIGHT, COLS]: the s-th those of
    set s, 8 / SETS of the masks, in all columns."""
    MASKS: tl.constexpr = 8 // len(sums)
    parts = expand_words(words, ASSEMBLY) if in_words(ASSEMBLY) else expand(words, False, ASSEMBLY)
    found = ()
    for s in tl.static_range(len(sums)):
        rows = stack(parts[s * MASKS : (s + 1) * MASKS])
        if in_words(ASSEMBLY):
            rows = bytes_of(rows)
        found = found + (tl.dot(rows, operand, sums[s], out_dtype=tl.int32),)  # noqa: RUF005
    return found


@triton.jit
def no_dots(ROWS: tl.constexpr, COLS: tl.constexpr, SETS: tl.constexpr):
    """What `plane_dots` adds to."""
    sums = ()
    for _ in tl.static_range(SETS):
        sums = sums + (tl.zeros((ROWS // SETS, COLS), tl.int32),)  # noqa: RUF005
    return sums


@triton.jit
def own_set(sums, column_set):
    """int32 [ROWS, COLS]: each column of those of its set, column_set int32 [1, COLS].

    Choosing between sums costs less than operands that are zero outside a set's columns: those of keys would stay in registers,
    those of values be sent through shared memory.
    """
    out = sums[0]
    for s in tl.static_range(1, len(sums)):
        out = tl.where(column_set == s, sums[s], out)
    return out


@triton.jit
def unscale(ROWS: tl.constexpr, column_set, WIDTH: tl.constexpr, SETS: tl.constexpr, BITS: tl.constexpr):
    """fp32 [ROWS, COLS] of 2^-e(j), turned in sign where `expand` turns it; column_set int32 [1, COLS]."""
    j = tl.arange(0, ROWS)[:, None] // WIDTH + (8 // SETS) * column_set
    if BITS == 1:
        scale = ((127 - j) << 23).to(tl.float32, bitcast=True)
        return tl.where(j == 7, -scale, scale)
    else:
        return ((127 - tl.where(j < 4, j, j - BITS)) << 23).to(tl.float32, bitcast=True)
