"""The measurement of links: who meets whom, and that real ranks get sensible numbers."""

import itertools
import time

import pytest
import torch
from ranks import run_ranks

from bitkv_dist.parallel.links import tournament


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9])
def test_each_pair_meets_once_and_nobody_twice_in_a_round(ranks):
    rounds = tournament(ranks)
    assert sorted(pair for table in rounds for pair in table) == list(itertools.combinations(range(ranks), 2))
    assert len(rounds) <= ranks + ranks % 2 - 1 + (ranks == 1)
    for table in rounds:
        busy = [rank for pair in table for rank in pair]
        assert len(busy) == len(set(busy))


def measured(mesh):
    from bitkv_dist.parallel import links

    if mesh.world.rank == 2:  # a clock that is five seconds late
        real = time.time
        time.time = lambda: real() - 5
    skews = links.clock_skew_s(mesh)
    pause = links.collective_s(mesh, lambda: time.sleep(0.02 * mesh.world.rank))
    return links.pairs(mesh, 600), skews, pause, mesh.gather_sp(torch.ones(1)).shape


def test_three_ranks():
    first, *others = run_ranks(3, measured)
    assert all(other == first for other in others)
    pairs, skews, pause, _ = first
    assert [(row["a"], row["b"]) for row in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < row["latency_us"] < 1e6 and row["gb_s"] > 0 for row in pairs)
    assert skews[0] == 0 and abs(skews[1]) < 0.5 and abs(skews[2] + 5) < 0.5
    assert 0.04 <= pause < 0.5  # the slowest rank's
