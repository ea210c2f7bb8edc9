"""Codes, scales and integer products of the plain-torch kernels against definitions in numpy, candidate by candidate."""

import math

import numpy as np
import pytest
import torch
from test_reference import DEPTHS, SHAPES

from bitkv_dist.kernels import reference
from bitkv_dist.rotation import layer_signs

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
