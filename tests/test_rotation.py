"""Rotations: signs from integers alone, the same everywhere; R = (H (x) DCT) diag(signs) is orthonormal for every head dim."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.fft import dct
from scipy.linalg import hadamard

from bitkv_dist.kernels.reference import rotate, rotate_back, split_dim
from bitkv_dist.rotation import GOLDEN, MASK, layer_signs, mix64, sign_words, signs_from_words

DIMS = (16, 24, 32, 40, 64, 80, 96, 112, 128, 192, 256)

FINGERPRINT = """
import hashlib
from bitkv_dist.rotation import sign_words
words = [sign_words(7, layer, head, side, 80).tobytes() for layer in range(3) for head in range(3) for side in "KV"]
print(hashlib.sha256(b"".join(words)).hexdigest())
"""


def test_mixer_is_splitmix64():
    """The published first outputs for the states 0 and 1234567."""
    for state, outputs in (
        (0, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)),
        (1234567, (6457827717110365317, 3203168211198807973, 9817491932198370423)),
    ):
        assert tuple(mix64((state + GOLDEN * (i + 1)) & MASK) for i in range(3)) == outputs


def test_words_are_pinned():
    """Sealed caches on disk depend on these words: a change here is a change of the format."""
    assert [hex(word) for word in sign_words(0, 0, 0, "K", 128)] == ["0x78ae5a9a6b5fd45e", "0xb9895a2b68592df1"]
    assert [hex(word) for word in sign_words(2**64 - 1, 31, 7, "V", 64)] == ["0x1da533aa0212e4"]


def test_words_are_the_same_in_another_process():
    words = [sign_words(7, layer, head, side, 80).tobytes() for layer in range(3) for head in range(3) for side in "KV"]
    other = subprocess.run([sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hashlib.sha256(b"".join(words)).hexdigest()


def test_building_signs_leaves_the_global_generator_alone():
    torch.manual_seed(10)
    layer_signs(0, 3, 0, 8, "K", 128)
    np.testing.assert_allclose(torch.randn(3).numpy(), [-0.6014, -1.0122, -0.3023], atol=5e-5)


def test_every_field_of_the_key_matters():
    base = (0, 0, 0, "K")
    others = [(1, 0, 0, "K"), (0, 1, 0, "K"), (0, 0, 1, "K"), (0, 0, 0, "V"), (2**63, 0, 0, "K")]
    words = {tuple(sign_words(*key, 64).tolist()) for key in (base, *others)}
    assert len(words) == 6


@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_words_of_a_smaller_dim_are_a_prefix(dim):
    assert len(sign_words(5, 2, 1, "V", dim)) == -(-dim // 64)
    np.testing.assert_array_equal(sign_words(5, 2, 1, "V", dim), sign_words(5, 2, 1, "V", 256)[: -(-dim // 64)])


def test_signs_are_read_from_bit_0_up():
    words = np.array([0b1011, 1 << 63, 1], dtype=np.uint64)
    signs = signs_from_words(words, 136)
    negative = {0, 1, 3, 127, 128}
    assert signs.tolist() == [-1.0 if dim in negative else 1.0 for dim in range(136)]


def test_signs_are_balanced():
    signs = layer_signs(0, 0, 0, 64, "K", 256)
    assert abs(signs.mean().item()) < 5 / (64 * 256) ** 0.5


def test_heads_are_counted_over_all_ranks():
    whole = layer_signs(3, 5, 0, 8, "V", 96)
    for first, heads in ((0, 3), (2, 1), (3, 5)):
        assert torch.equal(layer_signs(3, 5, first, heads, "V", 96), whole[first : first + heads])


def rotation_matrix(dim: int, signs: torch.Tensor) -> np.ndarray:
    """(H_{2^a} (x) Q_m) diag(signs) in float64, from scipy."""
    size, m = split_dim(dim)
    return np.kron(hadamard(size) / np.sqrt(size), dct(np.eye(m), axis=0, norm="ortho")) @ np.diag(signs.double().numpy())


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_the_defined_orthonormal_matrix(dim):
    signs = layer_signs(0, 1, 2, 1, "K", dim)[0]
    matrix = rotate(torch.eye(dim), signs).T  # columns: images of the unit vectors
    np.testing.assert_allclose(matrix.numpy(), rotation_matrix(dim, signs), atol=1e-6)
    assert (matrix @ matrix.T - torch.eye(dim)).abs().max() < 1e-5


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_keeps_products_and_can_be_undone(dim):
    torch.manual_seed(dim)
    q, k = torch.randn(2, 33, dim) * 3
    signs = layer_signs(9, 0, 0, 1, "K", dim)[0]
    products = (rotate(q, signs).double() * rotate(k, signs).double()).sum(-1)
    torch.testing.assert_close(products, (q.double() * k.double()).sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(rotate_back(rotate(k, signs), signs), k, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_a_constant_vector_leaves_no_spike(dim):
    """Signs come first: without them the transform would put all of a constant vector into one coefficient of size sqrt(D)."""
    ones = torch.ones(dim)
    for head in range(8):
        assert rotate(ones, layer_signs(0, 0, head, 1, "K", dim)[0]).abs().max() < 0.6 * dim**0.5
    assert rotate(ones, ones).abs().max() == pytest.approx(dim**0.5, rel=1e-5)


@pytest.mark.parametrize("dim", [4, 12, 20, 72, 88, 100, 104])
def test_other_dims_are_refused(dim):
    with pytest.raises(ValueError, match=f"head_dim {dim}: .*2\\^a"):
        split_dim(dim)
