"""Scores that are far from what powers count from, huge, or no numbers at all, in a scan without refinement."""

import pytest
import torch
from cpu_pages import KV_HEADS, Pages, both, isa, queries, relative  # noqa: F401

from bitkv_dist.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())


@pytest.mark.parametrize("centers", [(0, 90, 0, 50), (90, 0, 0, 0), (0, -90, 0, 0), (5000, 5100, 0, 0), (0, 3e5, 0, 0)])
@pytest.mark.parametrize(("spread", "group"), [(1, 3), (40, 4), (2000, 1)])
def test_scores_may_be_far_from_the_first_pages_center(centers, spread, group):
    """Powers of a scan without refinement count from the first page's q.c, unless a score is far from it."""
    torch.manual_seed(1)
    pages = Pages(64, 128, (1, 1), (1, 1))
    direction = torch.nn.functional.normalize(torch.randn(KV_HEADS, 1, 64), dim=-1)
    k = spread * torch.randn(4, KV_HEADS, 128, 64) + torch.tensor(centers)[:, None, None, None] * direction
    records = pages.encode(k.clamp(-60000, 60000), torch.randn(4, KV_HEADS, 128, 64)).unflatten(0, (1, 4))
    q = queries(64, 1, group) + direction[:, None]
    wanted, (m, l, o, _) = both(pages, q, records, torch.ones(1, 4, dtype=torch.bool), None)
    torch.testing.assert_close(m, wanted.m, atol=1e-5, rtol=3e-7)
    rounding = 1e-6 * wanted.m.abs().max().item()  # of scores of this size
    assert relative(l, wanted.l) < 1e-5 + rounding and relative(o, wanted.o) < 1e-3 + rounding


@pytest.mark.parametrize("size", [1e5, 1e9])
def test_huge_scores_are_right(size):
    torch.manual_seed(1)
    pages = Pages(64, 128, (1, 1), (1, 1))
    q = queries(64, 1, 3) * size
    wanted, (m, l, o, _) = both(pages, q, pages.random(1), torch.ones(1, 4, dtype=torch.bool), None)
    torch.testing.assert_close(m, wanted.m, atol=0, rtol=3e-7)
    assert l.isfinite().all() and relative(o, wanted.o) < 1e-3


def test_scores_that_are_no_numbers_do_not_pass_for_nothing():
    """Keys without a scale, and a query whose square is infinite: 0 * inf."""
    pages = Pages(64, 128, (1, 1), (1, 1))
    records = pages.encode(torch.zeros(4, KV_HEADS, 128, 64), torch.randn(4, KV_HEADS, 128, 64)).unflatten(0, (1, 4))
    _, (m, l, _, _) = both(pages, queries(64, 1, 3) * 1e20, records, torch.ones(1, 4, dtype=torch.bool), None)
    assert m.isnan().all() and l.isnan().all()
