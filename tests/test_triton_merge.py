"""The merge tree in Triton, in its interpreter: the order, the empty sides and the values of the plain one."""

import math

import pytest
import torch
from granule_partials import assert_is_tree, equal, granules

pytest.importorskip("triton")

from bitkv_dist import partial
from bitkv_dist.kernels.triton import merge
from bitkv_dist.partial import Partial


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel is given to write into holds NaN."""
    fresh = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *shape, **kind) -> torch.Tensor:
        found = fresh(self, *shape, **kind)
        return found.fill_(math.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 256, 257, 700])
def test_tree_is_that_of_the_partials(count):
    torch.manual_seed(count)
    found, index = granules(count), torch.arange(count)
    for nodes in (1, 4):
        width = partial.lane_width(count, nodes)
        if width > 32 and nodes > 1:
            continue  # the interpreter takes a program of `fill_lanes` per lane
        assert_is_tree(Partial(*merge.tree(*found, index, width, nodes)), found, index, width, nodes)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_tree_has_the_same_bits_for_any_number_of_ranks(ranks):
    nodes = ranks if ranks & (ranks - 1) == 0 else min(256, 1 << (4 * ranks - 1).bit_length())
    width = 16
    for count in (5, 40):  # lanes of none, one, and several granules
        torch.manual_seed(count)
        found, index = granules(count), torch.arange(count)
        wanted = merge.tree(*found, index, width, 1)
        sent = partial.empty((nodes, 2, 3), 24)
        for rank in range(ranks):  # residue u belongs to rank u mod ranks
            own = index[(index % nodes) % ranks == rank]
            mine = Partial(*merge.tree(*found.rows(own), own, width, nodes))
            for u in range(rank, nodes, ranks):
                for whole, part in zip(sent, mine, strict=True):
                    whole[u] = part[u]
        assert equal(merge.tree(*sent, torch.arange(nodes), nodes, 1), wanted), count


@pytest.mark.parametrize(("elements", "indices"), [(64, 4), (512, 16)])
def test_the_tile_of_a_program_changes_no_bit(elements, indices, monkeypatch):
    torch.manual_seed(1)
    found, index = granules(40, dim=80), torch.arange(40) + 3
    wanted = merge.tree(*found, index, 16, 2)
    monkeypatch.setattr(merge, "TILE_ELEMENTS", elements)
    monkeypatch.setattr(merge, "INDICES_AT_ONCE", indices)
    assert equal(merge.tree(*found, index, 16, 2), wanted)


def test_partials_without_outputs_and_without_rows():
    """Masses of a layer have no output (D = 0)."""
    found = granules(9)
    bare = Partial(found.m, found.l, found.o[..., :0])
    m, l, o = merge.tree(*bare, torch.arange(9), 16, 2)
    wanted = merge.tree(*found, torch.arange(9), 16, 2)
    assert torch.equal(m, wanted[0]) and torch.equal(l, wanted[1]) and o.shape == (2, 2, 3, 0)
    nothing = merge.tree(*(part[:, :0] for part in found), torch.arange(9), 16, 2)
    assert nothing[2].shape == (2, 0, 3, 24)
