"""The plain-torch kernels against definitions written out slowly here: bit by bit, token by token, in numpy and float64."""

import math

import numpy as np
import pytest
import torch

from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import Selection
from bitkv_dist.rotation import layer_signs

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


# ------------------------------------------------------------------------------------------- mid-rise codes, scales


def candidates(peak: float, bits: int) -> list[float]:
    """The scales fp16(f * max|z| / ((2^B - 1) / 2)), f = 0.40, 0.45, .. 1.20."""
    factors = np.array([round(0.40 + 0.05 * i, 2) for i in range(17)], np.float32)
    return (np.float32(peak) * factors / np.float32((2**bits - 1) / 2)).astype(np.float16).astype(float).tolist()


def nearest(z: np.ndarray, scale: float, bits: int) -> np.ndarray:
    """float64 level of every element, found by trying all codes."""
    table = scale * (np.arange(2**bits) - (2**bits - 1) / 2)
    return table[np.abs(z[:, None] - table).argmin(1)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_codes_are_the_best_of_all_candidates(bits, dim):
    torch.manual_seed(bits * dim)
    z = torch.randn(12, dim) * torch.logspace(-3, 3, 12)[:, None]
    z[3] = z[3].sign() * 0.7
    z[4, 5] *= 40
    found = reference.quantize(z, bits, bits)
    assert found.full is found.scan and found.full.dtype == torch.float16 and found.code.dtype == torch.uint8
    for row, code, scale in zip(z.double().numpy(), found.code.numpy(), found.full.double().numpy(), strict=True):
        possible = candidates(np.abs(row).max(), bits)
        errors = [((row - nearest(row, s, bits)) ** 2).sum() for s in possible]
        assert scale in possible
        levels = scale * (code - (2**bits - 1) / 2)
        np.testing.assert_allclose(np.abs(row - levels), np.abs(row - nearest(row, scale, bits)), atol=1e-6 * scale)
        assert ((row - levels) ** 2).sum() <= min(errors) * (1 + 1e-5)


@pytest.mark.parametrize(("bits", "scan_bits"), DEPTHS)
def test_the_top_bit_is_the_sign(bits, scan_bits):
    torch.manual_seed(0)
    z = torch.randn(50, 64)
    code = reference.quantize(z, bits, scan_bits).code
    assert torch.equal(code >> (bits - 1), (z >= 0).to(torch.uint8))


def scanned_levels(code: torch.Tensor, bits: int, scan_bits: int) -> np.ndarray:
    top = (code >> (bits - scan_bits)).double().numpy()
    return 2 * top - 1 if scan_bits == 1 else top - (2**scan_bits - 1) / 2


@pytest.mark.parametrize(("bits", "scan_bits"), [depth for depth in DEPTHS if depth[1] < depth[0] or depth[0] == 1])
def test_scan_scales_are_least_squares(bits, scan_bits):
    torch.manual_seed(1)
    z = torch.randn(40, 80)
    found = reference.quantize(z, bits, scan_bits)
    level, exact = scanned_levels(found.code, bits, scan_bits), z.double().numpy()
    wanted = (exact * level).sum(1) / (level * level).sum(1)
    np.testing.assert_allclose(found.scan.double(), wanted, rtol=2**-11 + 1e-5)  # half an fp16 step
    if scan_bits == 1:
        np.testing.assert_allclose(wanted, np.abs(exact).mean(1))
    if scan_bits < bits:
        assert torch.equal(found.full, reference.quantize(z, bits, bits).full)  # scanning less does not change the code


@pytest.mark.parametrize(("bits", "scan_bits"), [(1, 1), (2, 2), (4, 1), (4, 2)])
def test_the_unbiased_scale_keeps_the_product_with_the_vector_itself(bits, scan_bits):
    torch.manual_seed(2)
    z = torch.randn(40, 64)
    found = reference.quantize(z, bits, scan_bits, unbiased=True)
    decoded = scanned_levels(found.code, bits, scan_bits) * found.scan.double().numpy()[:, None]
    exact = z.double().numpy()
    np.testing.assert_allclose((exact * decoded).sum(1), (exact * exact).sum(1), rtol=1e-3)
    biased = reference.quantize(z, bits, scan_bits)
    decoded = scanned_levels(biased.code, bits, scan_bits) * biased.scan.double().numpy()[:, None]
    assert ((exact * decoded).sum(1) < 0.999 * (exact * exact).sum(1)).mean() > 0.9


@pytest.mark.parametrize(("bits", "scan_bits"), DEPTHS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 2.0, -40_000.0, 3e38])
def test_extreme_vectors_have_finite_scales_and_one_code(bits, scan_bits, value):
    """C05, C06. Ties go to the smaller scale, so zeros have scale 0, and +0 and -0 the same code."""
    z = torch.full((2, 64), value)
    found = reference.quantize(z, bits, scan_bits)
    assert torch.isfinite(found.full).all() and torch.isfinite(found.scan).all()
    assert found.code.unique().numel() == 1
    if abs(value) < 1e-20:
        assert found.full.tolist() == [0, 0] and found.code[0, 0] == 1 << (bits - 1)
    if value == 3e38:
        assert found.full.tolist() == [65504, 65504] and found.code[0, 0] == (1 << bits) - 1


def test_of_two_equal_errors_the_smaller_scale_wins():
    """Near the end of fp16 the candidates are whole steps u = 2^-24: levels 1.5 * 2 u and 1.5 * 3 u lie as far from 3.75 u."""
    found = reference.quantize(torch.full((1, 16), 3.75 * 2**-24), 2, 2)
    assert found.full.item() == 2 * 2**-24 and (found.code == 3).all()


def test_half_saturates():
    x = torch.tensor([1e9, -1e9, math.inf, 65504.0, 65519.0, 1e-9])
    assert reference.to_half(x).tolist() == [65504, -65504, 65504, 65504, 65504, 0]


@pytest.mark.parametrize("side", "KV")
def test_encode_takes_the_rounded_mean_of_the_rotated_page(side):
    torch.manual_seed(3)
    x = torch.randn(2, 3, 64, 48) + 5 * torch.randn(48)
    signs = layer_signs(0, 0, 0, 3, side, 48)
    plane = reference.encode(x, signs, 4, 2, side)
    rotated = torch.stack([reference.rotate(x[:, head], signs[head]) for head in range(3)], dim=1)
    np.testing.assert_allclose(plane.centroid.double(), rotated.double().mean(2), rtol=2**-10, atol=1e-6)
    coded = reference.quantize(rotated - plane.centroid.float().unsqueeze(2), 4, 2)  # against the centroid as stored
    assert torch.equal(reference.levels(plane, side, 2), 2.0 * coded.code - 15)
    assert torch.equal(plane.scan, coded.scan) and torch.equal(plane.full, coded.full)
    restored = reference.decode(plane, signs, 4, 2, side)
    assert ((restored - x).square().sum() / (x - x.mean(2, keepdim=True)).square().sum()) < 0.015


# ------------------------------------------------------------------------------------------------ the integer core


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_score_integers_equal_int64(bits, dim):
    torch.manual_seed(bits)
    top = (1 << bits) - 1
    codes = torch.randint(-127, 128, (2, 3, 2, dim)).float()
    levels = 2.0 * torch.randint(0, top + 1, (4, 2, 129, dim)) - top
    codes[0, 0, 0], levels[0, 0, 0] = 127, top  # the largest sum there is
    levels[0, 0, 1] = -top
    found = reference.score_integers(codes, levels)
    wanted = np.einsum("hqgd,nhtd->nhqgt", codes.numpy().astype(np.int64), levels.numpy().astype(np.int64))
    np.testing.assert_array_equal(found.numpy().astype(np.int64), wanted)
    assert found[0, 0, 0, 0, :2].tolist() == [127 * top * dim, -127 * top * dim]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(("tokens", "dim"), SHAPES)
def test_value_integers_equal_int64(bits, tokens, dim):
    torch.manual_seed(bits)
    top = (1 << bits) - 1
    weights = torch.randint(0, 128, (2, 3, 2, 5, tokens)).float()
    levels = 2.0 * torch.randint(0, top + 1, (2, 3, 2, tokens, dim)) - top
    weights[0, 0, 0, 0], levels[0, 0, 0] = 127, top
    found = reference.value_integers(weights, levels)
    wanted = weights.numpy().astype(np.int64) @ levels.numpy().astype(np.int64)
    np.testing.assert_array_equal(found.numpy().astype(np.int64), wanted)
    assert (found[0, 0, 0, 0] == 127 * top * tokens).all()


def test_query_codes_round_half_to_even():
    """With signs of +1 and D = 16 the rotation is exact on small integers, so the halves are real ones."""
    signs = torch.ones(1, 16)
    rotated = torch.tensor([127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0, 0.25, 3, 4, 5, 6, 7, 64])
    query = reference.quantize_query(reference.rotate_back(rotated, signs[0]).view(1, 1, 1, 16), signs)
    assert torch.equal(query.rotated.flatten(), rotated)
    assert query.codes.flatten().tolist() == [127, -127, 0, 2, 2, 0, -2, 126, 0, 0, 3, 4, 5, 6, 7, 64]
    assert query.scale.item() == 1.0
    assert query.norm2.item() == pytest.approx(rotated.square().sum().item(), rel=1e-6)


def test_query_of_zeros():
    query = reference.quantize_query(torch.zeros(2, 1, 3, 64), torch.ones(2, 64))
    assert not query.codes.any() and not query.scale.any() and not query.norm2.any()


def test_weights_are_0_to_127():
    weights = torch.tensor([[4.0, 0.0, 2.0, 4 * 0.5 / 127, 4 * 1.5 / 127], [0, 0, 0, 0, 0], [1e-30, 0, 0, 0, 0]])
    integers, scale = reference.quantize_weights(weights)
    assert integers.tolist() == [[127, 0, 64, 0, 2], [0] * 5, [127, 0, 0, 0, 0]]
    np.testing.assert_array_equal(scale.numpy(), np.array([4, 0, 1e-30], np.float32) / np.float32(127))


# --------------------------------------------------------------------------------------------- scores and selection


def granules(n: int, pages: int, heads: int, tokens: int, dim: int, key_bits=(4, 1), value_bits=(4, 1), seed=0):
    """(signs K, keys, values): encoded pages whose means and norms differ, leading dims [n, pages, heads]."""
    torch.manual_seed(seed)
    shape = (n * pages, heads, tokens, dim)

    def encoded(side: str, bits: tuple[int, int]) -> reference.Plane:
        x = torch.randn(shape) * torch.rand(*shape[:3], 1) + torch.randn(*shape[:2], 1, dim)
        plane = reference.encode(x, layer_signs(seed, 0, 0, heads, side, dim), *bits, side)
        return reference.Plane(*(part.unflatten(0, (n, pages)) for part in plane))

    return layer_signs(seed, 0, 0, heads, "K", dim), encoded("K", key_bits), encoded("V", value_bits)


def base2_query(heads: int, queries: int, group: int, dim: int) -> torch.Tensor:
    return torch.randn(heads, queries, group, dim) * dim**-0.5 * math.log2(math.e)


def slow_scores(query: reference.Query, keys: reference.Plane, low_bits: int, noise: float) -> np.ndarray:
    """float64 [n, HK, Q, G, T]: q.c + a_t <q, level> + 0.5 ln2 |q'|^2 r_t^2 / D, with the INT8 query in the second term."""
    bits = keys.planes.shape[-3] + low_bits
    levels = reference.levels(keys, "K", low_bits).double().numpy() * (1 if bits == 1 else 0.5)
    a = (keys.full if low_bits else keys.scan).double().numpy()
    q = (query.codes * query.scale.unsqueeze(-1)).double().numpy()
    exact_q, norm2 = query.rotated.double().numpy(), query.norm2.double().numpy()
    base = np.einsum("hqgd,nphd->nhqgp", exact_q, keys.centroid.double().numpy(), optimize=True)
    product = np.einsum("hqgd,nphtd,npht->nhqgpt", q, levels, a, optimize=True)
    lost = 0.5 * math.log(2) * noise * np.einsum("hqg,npht->nhqgpt", norm2, a * a)
    scores = base[..., None] + product + lost
    return scores.reshape(*scores.shape[:-2], -1)


@pytest.mark.parametrize(("bits", "scan_bits"), [(1, 1), (2, 2), (4, 1), (4, 2), (8, 8)])
@pytest.mark.parametrize("dim", [64, 80])
def test_score_is_the_formula(bits, scan_bits, dim):
    signs, keys, _ = granules(2, 2, 3, 64, dim, key_bits=(bits, scan_bits))
    query = reference.quantize_query(base2_query(3, 2, 2, dim), signs)
    for low_bits in {0, bits - scan_bits}:
        a = (keys.full if low_bits else keys.scan).float().transpose(1, 2).flatten(2)
        codes = reference.levels(keys, "K", low_bits).transpose(1, 2).flatten(2, 3)
        unit = reference.level_unit(scan_bits + low_bits)
        for noise in (0.0, 0.571):
            found = reference.score(query, codes, a, unit, keys.centroid.float(), noise)
            np.testing.assert_allclose(found.double(), slow_scores(query, keys, low_bits, noise), atol=2e-5)


def test_the_correction_makes_sealed_tokens_weigh_like_exact_ones():
    """Summed over many keys, 2^score of a sign code is too small by the lost variance; the log-normal term gives it back."""
    torch.manual_seed(0)
    dim = 64
    keys = torch.randn(64, 1, 128, dim)
    q = torch.randn(1, 1, 4, dim) * dim**-0.5 * math.log2(math.e) * 1.2
    signs = layer_signs(0, 0, 0, 1, "K", dim)
    plane = reference.encode(keys, signs, 1, 1, "K")
    query = reference.quantize_query(q, signs)
    true_mass = (2 ** (q[0, 0].double() @ keys[:, 0].flatten(0, 1).double().T)).sum(-1)

    def mass(noise: float) -> torch.Tensor:
        codes, scales = reference.levels(plane, "K", 0), plane.scan.float()
        scores = reference.score(query, codes, scales, 1.0, plane.centroid.float().unsqueeze(1), noise)
        return (2 ** scores.double()).sum((0, 1, 2, 4))

    assert ((mass(0.571) / true_mass - 1).abs() < 0.04).all()
    assert ((mass(0.0) / true_mass) < 0.85).all()


def slow_select(scores: np.ndarray, sealed: list[int], rule: Selection) -> np.ndarray:
    """The largest by (weight, lower position first), with float64 log-sum-exps."""
    chosen = np.zeros(scores.shape, bool)
    for n, count in enumerate(sealed):
        k = min(count, max(rule.min_tokens, math.ceil(rule.value * count)))
        for head, query in np.ndindex(scores.shape[1:3]):
            rows = scores[n, head, query].astype(np.float64)  # [G, T]
            if rule.group and len(rows) > 1:
                weights = rows - np.log2(np.exp2(rows).sum(-1, keepdims=True)) if count else rows
                rows = np.tile(weights.max(0), (len(rows), 1))
            for g, row in enumerate(rows):
                order = sorted(range(len(row)), key=lambda t, row=row: (-row[t], t))
                chosen[n, head, query, g, order[:k]] = True
    return chosen & ~np.isinf(scores)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_selection_with_many_ties(group, rule):
    """Integer scores, so that almost every boundary falls into a tie; granules with fewer sealed tokens, one with none."""
    torch.manual_seed(0)
    scores = torch.randint(-3, 4, (4, 2, 3, group, 128)).float()
    sealed = torch.tensor([128, 64, 0, 65])
    scores = torch.where(torch.arange(128) < sealed[:, None, None, None, None], scores, -math.inf)
    found = reference.select(scores, sealed, rule)
    np.testing.assert_array_equal(found.numpy(), slow_select(scores.numpy(), sealed.tolist(), rule))


def test_selection_counts_of_a_granule():
    for sealed, tokens in ((512, 26), (384, 20), (128, 7), (64, 4)):  # ceil(0.05 * sealed)
        scores = torch.where(torch.arange(512) < sealed, torch.randn(1, 1, 1, 1, 512), -math.inf)
        assert reference.select(scores, torch.tensor([sealed]), Selection(0.05, 1, True)).sum() == tokens


def test_a_head_with_small_scores_still_chooses_for_its_group():
    """A group ranks by weight inside each head, not by raw score."""
    scores = torch.zeros(1, 1, 1, 2, 64)
    scores[0, 0, 0, 0] += 100  # a head whose weights are all alike, on a high level
    scores[0, 0, 0, 1, 33] = 9  # the only token that carries a head
    found = reference.select(scores, torch.tensor([64]), Selection(0.0, 1, True))
    assert found.nonzero()[:, -1].tolist() == [33, 33]


# ---------------------------------------------------------------------------------------------------------- attend


def slow_attend(query, keys, values, page_valid, key_low, value_low, noise, chosen):
    """(m, l, o) in float64: weights are 127ths of the page's largest; chosen tokens at their full code, the tail as scanned."""
    pages = page_valid.shape[1]
    tokens = keys.scan.shape[-1]
    valid = np.repeat(page_valid.numpy(), tokens, 1)[:, None, None, None, :]
    key_scan, value_scan = keys.planes.shape[-3], values.planes.shape[-3]
    scores = slow_scores(query, keys, 0, noise[key_scan, key_scan + key_low])
    if key_low:
        scores = np.where(chosen, slow_scores(query, keys, key_low, noise[key_scan + key_low, key_scan + key_low]), scores)
    scores = np.where(valid, scores, -np.inf)
    m = scores.max(-1)
    p = np.exp2(scores - np.where(np.isinf(m), 0, m)[..., None])
    out = np.zeros((*m.shape, values.centroid.shape[-1]))
    for refined in {False, bool(value_low)}:
        bits = value_scan + (value_low if refined else 0)
        levels = reference.levels(values, "V", value_low if refined else 0).double().numpy() * (1 if bits == 1 else 0.5)
        a = (values.full if refined else values.scan).double().numpy()
        w = p if not value_low else np.where(chosen == refined, p, 0)
        w = w.reshape(*m.shape, pages, tokens) * a.transpose(0, 2, 1, 3)[:, :, None, None]
        peak = w.max(-1, keepdims=True)
        rounded = np.rint(127 * w / np.where(peak == 0, 1, peak)) * peak / 127
        out += np.einsum("nhqgpt,nphtd->nhqgd", rounded, levels, optimize=True)
    mass = p.reshape(*m.shape, pages, tokens).sum(-1)
    return m, p.sum(-1), out + np.einsum("nhqgp,nphd->nhqgd", mass, values.centroid.double().numpy())


NOISE = {(s, b): 0.5 / s for b in range(1, 9) for s in range(1, b + 1)}
ATTENTIONS = [  # key bits, value bits (stored, scanned), selection
    ((1, 1), (1, 1), None),
    ((2, 2), (4, 4), None),
    ((4, 1), (4, 1), Selection(0.05, 1, True)),
    ((4, 2), (2, 2), Selection(0.1, 1, False)),
    ((1, 1), (3, 1), Selection(0.05, 3, True)),
    ((4, 1), (4, 1), Selection(1.0, 1, True)),
]


@pytest.mark.parametrize(("key_bits", "value_bits", "selection"), ATTENTIONS)
def test_attention_is_the_formula(key_bits, value_bits, selection):
    signs, keys, values = granules(3, 2, 2, 64, 48, key_bits, value_bits)
    valid = torch.tensor([[True, True], [False, True], [False, False]])
    query = reference.quantize_query(base2_query(2, 3, 2, 48), signs)
    lows = key_bits[0] - key_bits[1], value_bits[0] - value_bits[1]
    found = reference.attend(query, keys, values, valid, *lows, NOISE, selection)
    if selection is None:
        assert found.refined is None
    else:
        scanned = slow_scores(query, keys, 0, NOISE[key_bits[1], key_bits[0]])
        scanned = np.where(np.repeat(valid.numpy(), 64, 1)[:, None, None, None], scanned, -np.inf)
        np.testing.assert_array_equal(found.refined.numpy(), slow_select(scanned, [128, 64, 0], selection))
    chosen = None if selection is None else found.refined.numpy()
    m, l, o = slow_attend(query, keys, values, valid, *lows, NOISE, chosen)
    np.testing.assert_allclose(found.m.double(), m, atol=2e-5)
    np.testing.assert_allclose(found.l.double(), l, rtol=5e-5)
    error = np.abs(found.o.double().numpy() - o).max(-1) / np.maximum(1e-9, np.abs(o).max(-1))
    assert np.median(error) < 2e-5 and error.max() < 3e-3  # a weight on the edge between two integers may go either way
    assert torch.isneginf(found.m[2]).all() and not found.l[2].any() and not found.o[2].any()


def with_threads(threads: int, function, *args):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*args)
    finally:
        torch.set_num_threads(before)


def granule_of(plane: reference.Plane, index: int) -> reference.Plane:
    return reference.Plane(*(part[index : index + 1] for part in plane))


@pytest.mark.parametrize(("key_bits", "value_bits", "selection"), [ATTENTIONS[1], ATTENTIONS[2]])
def test_a_granule_does_not_depend_on_its_neighbours_or_on_threads(key_bits, value_bits, selection):
    signs, keys, values = granules(3, 4, 1, 128, 64, key_bits, value_bits)
    valid = torch.tensor([[False, True, True, True], [True] * 4, [True, False, False, False]])
    query = reference.quantize_query(base2_query(1, 1, 7, 64), signs)
    rest = (key_bits[0] - key_bits[1], value_bits[0] - value_bits[1], NOISE, selection)
    together = with_threads(1, reference.attend, query, keys, values, valid, *rest)
    threaded = with_threads(2, reference.attend, query, keys, values, valid, *rest)
    assert all(equal_bits(a, b) for a, b in zip(together[:3], threaded[:3], strict=True))
    for i in range(3):
        alone = reference.attend(query, granule_of(keys, i), granule_of(values, i), valid[i : i + 1], *rest)
        assert all(equal_bits(a[i : i + 1], b) for a, b in zip(together[:3], alone[:3], strict=True))


# ---------------------------------------------------------------------------------------------------- attend_dense


@pytest.mark.parametrize("tokens", [1, 31, 4096])
@pytest.mark.parametrize(("heads", "group"), [(1, 7), (3, 2)])
def test_dense_attention_against_float64(tokens, heads, group):
    """C02: the log-sum-exp within 1e-4 of torch's."""
    torch.manual_seed(tokens)
    q, k, v = base2_query(heads, 2, group, 64), torch.randn(3, heads, tokens, 64), torch.randn(3, heads, tokens, 64)
    m, l, o = reference.attend_dense(q, k, v, None)
    logits = torch.einsum("hqgd,nhtd->nhqgt", q.double(), k.double()) * math.log(2)
    lse = (m + l.log2()) * math.log(2)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1), atol=1e-5, rtol=0)
    wanted = torch.einsum("nhqgt,nhtd->nhqgd", logits.softmax(-1), v.double())
    torch.testing.assert_close((o / l.unsqueeze(-1)).double(), wanted, atol=1e-5, rtol=0)


def test_dense_attention_over_nothing():
    q, k = torch.randn(2, 1, 3, 64), torch.randn(4, 2, 31, 64)
    nothing_valid = torch.zeros(1, 1, 1, 1, 31, dtype=torch.bool)
    for keys, valid in ((k[:, :, :0], None), (k, nothing_valid)):
        found = reference.attend_dense(q, keys, keys, valid)
        assert [part.shape for part in found] == [(4, 2, 1, 3), (4, 2, 1, 3), (4, 2, 1, 3, 64)]
        assert torch.isneginf(found[0]).all() and not found[1].any() and not found[2].any()


@pytest.mark.parametrize("tokens", [31, 128, 384])
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 12])
def test_dense_attention_of_one_matrix_has_the_bits_of_a_batch(tokens, rows):
    """One KV head and one set of tokens: torch would split that product among threads, which changes last bits."""
    torch.manual_seed(rows)
    q, k, v = base2_query(1, 1, rows, 64), torch.randn(3, 1, tokens, 64), torch.randn(3, 1, tokens, 64)
    batch = reference.attend_dense(q, k, v, None)
    for threads in (1, 2):
        alone = with_threads(threads, reference.attend_dense, q, k[:1], v[:1], None)
        assert all(equal_bits(a[:1], b) for a, b in zip(batch, alone, strict=True))
