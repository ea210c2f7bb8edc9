"""The two ends of a decode step in Triton, in its interpreter: queries in, outputs out, the rotation of the reference."""

import math

import pytest
import torch
from cpu_pages import KV_HEADS, queries, signs

pytest.importorskip("triton")

from bitkv_dist.kernels import reference
from bitkv_dist.kernels.triton import conclude, quantize_query
from bitkv_dist.partial import Partial, empty, merge

DIMS = (16, 64, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_query_codes_are_those_of_the_reference(dim):
    """Heads that do not fill a program, a row of zeros, a batch of two sequences."""
    torch.manual_seed(dim)
    q = torch.stack([queries(dim, 2, 3), queries(dim, 2, 3)])
    q[1, 0, 1, 2] = 0.0
    found, wanted = quantize_query(q, signs("K", dim)), reference.quantize_query(q, signs("K", dim))
    assert found.codes.dtype == torch.int8 and torch.equal(found.codes.float(), wanted.codes)
    assert torch.equal(found.rotated, wanted.rotated) and torch.equal(found.scale, wanted.scale)
    torch.testing.assert_close(found.norm2, wanted.norm2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_conclude_is_the_normalised_merge(dim):
    """Either side empty, or both: an empty one's l and o hold NaN."""
    torch.manual_seed(dim)
    shape = (KV_HEADS, 1, 5)
    sealed, exact = (Partial(4 * torch.randn(shape), torch.rand(shape) + 0.5, torch.randn(*shape, dim)) for _ in range(2))
    for side, hole in ((sealed, 1), (exact, 2), (sealed, 3), (exact, 3)):
        side.m[:, :, hole], side.l[:, :, hole], side.o[:, :, hole] = -math.inf, math.nan, math.nan
    back = reference.rotate_back(sealed.o, signs("V", dim)[:, None, None, :])
    wanted = merge(sealed._replace(o=back), exact).normalised()
    found = conclude(sealed, exact, signs("V", dim))
    assert not found[:, :, 3].any()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    alone, first = conclude(sealed, empty(shape, dim), signs("V", dim)), Partial(sealed.m, sealed.l, back)
    assert torch.equal(alone[:, :, 0], first.normalised()[:, :, 0])  # the bits of the rotation back
