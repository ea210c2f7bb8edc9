"""The plain-torch kernels against definitions written out slowly here: bit by bit, token by token, in numpy and float64."""

import math

import numpy as np
import pytest
import torch

from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import Selection

SHAPES = [(64, 64), (128, 64), (128, 80), (64, 96), (128, 128), (64, 256)]  # page tokens, head dim
DEPTHS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4), (8, 3), (8, 8)]  # stored, scanned bits
RULES = [Selection(*rule) for rule in ((0.05, 1, True), (0.05, 1, False), (0.001, 7, True), (1.0, 0, True), (0.0, 0, False))]


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same floats to the last bit, NaN and the sign of zero included."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---------------------------------------------------------------------------------------------------------- sums


def adjacent_pairs(values: list[np.float32]) -> np.float32:
    while len(values) > 1:
        values = values + [np.float32(0)] * (len(values) % 2)
        values = [a + b for a, b in zip(values[0::2], values[1::2], strict=True)]
    return values[0]


def halves(values: list[np.float32]) -> np.float32:
    size = 1 << max(0, len(values) - 1).bit_length()
    values = values + [np.float32(0)] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 31, 33, 63, 64, 65, 80, 127, 129, 512])
def test_sums_have_the_defined_order(n):
    torch.manual_seed(n)
    x = torch.randn(7, n) * torch.logspace(-4, 4, n)
    rows = [list(row) for row in x.numpy()]
    assert equal_bits(reference.tree_sum(x, 1), torch.tensor([adjacent_pairs(row) for row in rows]))
    assert equal_bits(reference.tree_sum(x.T.contiguous(), 0), reference.tree_sum(x, 1))
    assert equal_bits(reference.fold_sum(x), torch.tensor([halves(row) for row in rows]))


def test_another_order_would_show():
    """The order matters in the last bits, so the test above can fail."""
    torch.manual_seed(0)
    x = torch.randn(100, 128)
    assert not equal_bits(reference.tree_sum(x, 1), reference.fold_sum(x))


def test_exp2_does_not_depend_on_the_place_in_a_tensor():
    x = torch.linspace(-126, 20, 199)
    alone = torch.cat([reference.exp2(x[i : i + 1]) for i in range(199)])
    for start in range(17):
        assert equal_bits(reference.exp2(x[start:]), alone[start:])
    np.testing.assert_allclose(alone.double(), 2.0 ** x.double(), rtol=2e-5)
    assert reference.exp2(torch.tensor([-math.inf, 0.0])).tolist() == [0.0, 1.0]


def test_division_is_ieee_rounded():
    torch.manual_seed(0)
    x = torch.randn(10_000)
    for value in (3.0, 7.5, 127.0, 80.0):
        np.testing.assert_array_equal(reference.divide(x, value).numpy(), x.numpy() / np.float32(value))
        assert not np.array_equal(x.numpy() * np.float32(1 / value), x.numpy() / np.float32(value))


# ------------------------------------------------------------------------------------------------- the page layout


def bit_of(words: torch.Tensor, row: int, column: int, position: int) -> int:
    return (int(words[row, column]) & 0xFFFFFFFF) >> position & 1


@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_key_plane_bit_by_bit(tokens, dim):
    """Bit 8b + j of word [g][i] belongs to dim 4g + b of token i + (P/8) j."""
    torch.manual_seed(0)
    bits = torch.randint(0, 2, (tokens, dim), dtype=torch.uint8)
    words = reference.pack_key_plane(bits)
    assert words.shape == (dim // 4, tokens // 8) and words.dtype == torch.int32
    for token in range(tokens):
        j, i = divmod(token, tokens // 8)
        assert [bit_of(words, d // 4, i, 8 * (d % 4) + j) for d in range(dim)] == bits[token].tolist()
    assert torch.equal(reference.unpack_key_plane(words), bits.float())


@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_value_plane_bit_by_bit(tokens, dim):
    """Bit 8b + j of word [u][i] belongs to token 4u + b, dim i + (D/8) j."""
    torch.manual_seed(1)
    bits = torch.randint(0, 2, (tokens, dim), dtype=torch.uint8)
    words = reference.pack_value_plane(bits)
    assert words.shape == (tokens // 4, dim // 8) and words.dtype == torch.int32
    for token in range(tokens):
        places = [divmod(d, dim // 8) for d in range(dim)]  # j, i
        assert [bit_of(words, token // 4, i, 8 * (token % 4) + j) for j, i in places] == bits[token].tolist()
    assert torch.equal(reference.unpack_value_plane(words), bits.float())


@pytest.mark.parametrize("j", range(8))
def test_a_mask_makes_four_int8_operands(j):
    """Why the layout is as it is: word & (0x01010101 << j) holds four consecutive dims of one token as 0 or 2^j, one a byte."""
    torch.manual_seed(j)
    bits = torch.randint(0, 2, (128, 64), dtype=torch.uint8)
    words = reference.pack_key_plane(bits).numpy().view(np.uint32)
    operands = (words & np.uint32(0x01010101 << j)).view(np.int8).reshape(16, 16, 4)  # g, i, b
    tokens = bits.numpy().astype(int).reshape(8, 16, 16, 4)[j]  # i, g, b
    np.testing.assert_array_equal(operands.astype(int), tokens.transpose(1, 0, 2) * (2**j if j < 7 else -128))


@pytest.mark.parametrize(("bits", "scan_bits"), DEPTHS)
@pytest.mark.parametrize("side", "KV")
def test_planes_and_low_bits_hold_the_code(bits, scan_bits, side):
    """Sign plane first; the low bits of a token are contiguous, most significant plane first, bit d % 8 of byte d / 8."""
    torch.manual_seed(bits)
    tokens, dim = 64, 40
    code = torch.randint(0, 1 << bits, (2, 3, tokens, dim), dtype=torch.uint8)
    planes = reference.pack_planes(code, bits, scan_bits, side)
    pack = reference.pack_key_plane if side == "K" else reference.pack_value_plane
    for plane in range(scan_bits):
        assert torch.equal(planes[:, :, plane], pack(code >> (bits - 1 - plane) & 1))
    assert torch.equal(reference.unpack_planes(planes, side), (code >> (bits - scan_bits)).float())

    low_bits = bits - scan_bits
    low = reference.pack_low(code, low_bits)
    assert low.shape == (2, 3, tokens, low_bits * dim // 8)
    for plane in range(low_bits):
        for d in range(dim):
            byte = low[..., plane * dim // 8 + d // 8]
            assert torch.equal(byte >> (d % 8) & 1, code[..., d] >> (low_bits - 1 - plane) & 1)
    if low_bits:
        assert torch.equal(reference.unpack_low(low, low_bits), (code & ((1 << low_bits) - 1)).float())
        plane = reference.Plane(planes, low, *[torch.empty(0)] * 3)
        assert torch.equal(reference.levels(plane, side, low_bits), 2.0 * code - ((1 << bits) - 1))
        assert torch.equal(reference.levels(plane, side, 0), 2.0 * (code >> low_bits) - ((1 << scan_bits) - 1))


def test_all_byte_values():
    every = torch.arange(256, dtype=torch.uint8)
    bits = reference.unpack_bits(every)
    assert bits.tolist() == [[float(value >> j & 1) for j in range(8)] for value in range(256)]
    assert torch.equal(reference.pack_bits(bits.to(torch.uint8)), every)


@pytest.mark.parametrize("word", [0x80000000, 0xC0000000, 0xFFFFFFFF, 0xAAAAAAAA, 0x55555555, 0x80808080, 0x7FFFFFFF, 1, 0])
@pytest.mark.parametrize("side", "KV")
def test_words_with_the_top_bit_set(word, side):
    """C07. Bit 31 is the last of four dims (of tokens, for values) in the last eighth of the page; in both planes: code 3."""
    signed = word - (1 << 32) if word >> 31 else word
    planes = torch.full((2, 16, 16) if side == "K" else (2, 32, 8), signed, dtype=torch.int32)
    code = reference.unpack_planes(planes, side)
    assert torch.equal(reference.pack_planes(code.to(torch.uint8), 2, 2, side), planes)
    top = code[7 * 16 :, 3::4] if side == "K" else code[3::4, 7 * 8 :]
    assert (top == (3 if word >> 31 else 0)).all()


def test_one_bit_touches_one_bit():
    """C05: neighbours in the same word stay as they are."""
    bits = torch.zeros(128, 64, dtype=torch.uint8)
    for pack in (reference.pack_key_plane, reference.pack_value_plane):
        before = reference.unpack_bits(pack(bits).view(torch.uint8)).sum()
        for token, d in ((0, 0), (127, 63), (17, 3), (64, 31)):
            bits[token, d] = 1
            assert reference.unpack_bits(pack(bits).view(torch.uint8)).sum() == before + 1
            bits[token, d] = 0
