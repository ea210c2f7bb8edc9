"""Partials of granules for the tests of the kernels' merge trees, and the plain tree that theirs is compared with."""

import math

import torch

from bitkv_dist import partial
from bitkv_dist.partial import Partial


def granules(count: int, dim: int = 24) -> Partial:
    """Random partials [count, 2, 3] of granules, every seventh row empty with NaN in it."""
    m, l, o = 8 * torch.randn(count, 2, 3), torch.rand(count, 2, 3) + 0.5, torch.randn(count, 2, 3, dim)
    hole = torch.arange(m.numel()).view_as(m) % 7 == 3
    return Partial(m.masked_fill(hole, -math.inf), l.masked_fill(hole, math.nan), o.masked_fill(hole.unsqueeze(-1), math.nan))


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_is_tree(mine: Partial, found: Partial, index: torch.Tensor, width: int, nodes: int) -> None:
    """`mine` are the first nodes of the tree over the partials `found` of granules `index`."""
    wanted = partial.reduce_lanes(partial.fill_lanes(found, index, width), nodes)
    empty = torch.isneginf(wanted.m)  # whose l and o the reference leaves as they are when nothing is merged
    wanted = Partial(wanted.m, wanted.l.masked_fill(empty, 0.0), wanted.o.masked_fill(empty.unsqueeze(-1), 0.0))
    assert torch.equal(mine.m, wanted.m)
    torch.testing.assert_close(mine.l, wanted.l, rtol=2e-6, atol=0)
    torch.testing.assert_close(mine.o, wanted.o, rtol=2e-6, atol=2e-6)
