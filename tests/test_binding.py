"""Cores of a rank: dealt out evenly, near the GPU, and never fewer than its threads."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import run_ranks

from bitkv_dist.parallel.binding import choose, listed, parsed
from bitkv_dist.parallel.world import Place


def place(local_rank: int, local_size: int) -> Place:
    return Place(local_rank, local_size, local_rank, local_size, "torchrun")


def siblings(cpu: int) -> tuple[int, int]:
    """Two sockets of 4 cores, whose second threads are numbered 8 to 15."""
    core = cpu % 8
    return core // 4, core, cpu


def test_cores_are_dealt_out_by_socket_and_core():
    found = [choose(place(rank, 4), set(range(16)), None, 4, siblings) for rank in range(4)]
    assert found == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, 8), (4, 3, 1), (2, 4, 3)], ids=["alone", "fewer cores than ranks", "more threads"]
)
def test_left_as_it_is(ranks, cores, threads):
    assert choose(place(0, ranks), set(range(cores)), None, threads, lambda cpu: (cpu,)) is None


def test_ranks_of_gpus_share_the_cores_near_them():
    assert choose(place(1, 4), set(range(16)), {4, 5, 6, 7, 20}, 4) == {4, 5, 6, 7}
    assert choose(place(1, 4), {0, 1}, {4, 5}, 1) is None  # none of those may be used


def test_lists_of_cores():
    assert parsed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11} and parsed("\n") == set()
    assert listed({11, 3, 0, 1, 2, 8, 10}) == "0-3,8,10-11" and listed([]) == ""


def cores(mesh) -> tuple[set[int], str, int]:
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    assert all(own == threads[0] for own in threads)
    return threads[0], mesh.roll[mesh.world.rank].cores, torch.get_num_threads()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_ranks_have_cores_of_their_own():
    (first, said, threads), (second, *_) = run_ranks(2, cores)
    assert first and second and not first & second and parsed(said) == first and threads == 1
