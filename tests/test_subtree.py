"""Partials that are merged as they come, against the tree over all of them (bitkv_dist/subtree.py)."""

import pytest
import torch

from bitkv_dist import placement
from bitkv_dist.partial import Partial, lane_width, tree
from bitkv_dist.subtree import leaf_stride, walk

SHAPE = (2, 3, 1, 4)  # HK, n, G, D
HERE = torch.device("cpu")


def partials(count: int) -> Partial:
    torch.manual_seed(count)
    return Partial(3 * torch.randn(count, *SHAPE[:-1]), 1 + torch.rand(count, *SHAPE[:-1]), torch.randn(count, *SHAPE))


class Blocks:
    """Hands out the partials of the granules `held` here, and counts those that it holds at a time."""

    def __init__(self, part: Partial, held: list[int], most: int) -> None:
        self.part, self.held, self.most, self.asked = part, held, most, []

    def __call__(self, modulus: int, residue: int):
        found = [granule for granule in self.held if granule % modulus == residue]
        self.asked.append(len(found))
        for start in range(0, len(found), self.most):
            yield self.part.rows(torch.tensor(found[start : start + self.most]))


@pytest.mark.parametrize("granules", [1, 5, 64, 257, 700])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_are_those_of_all_granules_together(granules, ranks):
    part, nodes = partials(granules), placement.residue_count(ranks)
    whole = tree(part, torch.arange(granules), lane_width(granules, nodes), nodes)
    for rank in range(ranks):
        own = placement.residues(rank, 0, ranks)
        held = [granule for granule in range(granules) if granule % nodes in own]
        for most in (1, 2, 16, 1000):
            blocks = Blocks(part, held, most)
            found = walk(blocks, held, granules, nodes, most, SHAPE, HERE)
            for ours, theirs in zip(found, whole, strict=True):
                assert torch.equal(ours[list(own)], theirs[list(own)]), (rank, most)
            others = [node for node in range(nodes) if node not in own]
            assert torch.isneginf(found.m[others]).all() and not found.l[others].any() and not found.o[others].any()
            assert sum(blocks.asked) == len(held)
            lanes = -(-granules // 256)  # of a lane's granules, which come in turns
            assert max(blocks.asked, default=0) <= max(most, lanes)


def test_nodes_are_as_large_as_allowed():
    assert [leaf_stride(granules, 1, 16) for granules in (1, 16, 17, 256, 4096, 10**6)] == [1, 1, 2, 16, 256, 256]
    assert leaf_stride(20, 64, 16) == 64


def test_a_sequence_without_granules_is_empty():
    found = walk(Blocks(partials(1), [], 4), [], 0, 4, 4, SHAPE, HERE)
    assert torch.isneginf(found.m).all() and found.o.shape == (4, *SHAPE)
