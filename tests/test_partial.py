"""Merging of partial attention states: values, empty sets, and one order of merging for every number of ranks."""

import math
from itertools import pairwise

import pytest
import torch

from bitkv_dist.cache_config import LANES
from bitkv_dist.kernels import dispatch
from bitkv_dist.kernels.reference import attend_dense
from bitkv_dist.parallel.exchange import combine
from bitkv_dist.partial import Partial, empty, fill_lanes, lane_width, merge, reduce_lanes, tree
from bitkv_dist.placement import owner, residue_count, slots

INF = math.inf
NAN = math.nan


def state(out: float, lse: float) -> Partial:
    """The partial of one row whose normalised output is `out` and whose natural log-sum-exp is `lse`."""
    return Partial(torch.tensor([lse]) * math.log2(math.e), torch.ones(1) * (lse != -INF), torch.tensor([[out]]))


def equal_bits(a: Partial, b: Partial) -> bool:
    pairs = zip((x.contiguous() for x in a), (y.contiguous() for y in b), strict=True)
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in pairs)


@pytest.mark.parametrize(
    ("a", "b", "out", "lse"),
    [
        ((0, -INF), (0, -INF), 0, -INF),
        ((0, -INF), (7, 2), 7, 2),
        ((7, 2), (0, -INF), 7, 2),
        ((NAN, -INF), (7, 2), 7, 2),
        ((7, 2), (NAN, -INF), 7, 2),
        ((NAN, -INF), (NAN, -INF), 0, -INF),
        ((1, 0), (5, math.log(3)), 4, 1.386294),
        ((1, 500), (5, -500), 1, 500),
        ((1, -3000), (5, -3000), 3, -3000 + math.log(2)),
    ],
)
def test_merge(a, b, out, lse):
    """C01, and C02: (1, 0) + (5, ln 3) in another base would give 4.3196."""
    merged = merge(state(*a), state(*b))
    assert merged.normalised().item() == pytest.approx(out, rel=1e-6)
    assert merged.log_sum_exp().item() == pytest.approx(lse, rel=1e-6)


def test_an_empty_side_is_passed_over_without_arithmetic():
    """Its l and o may hold anything; the other side comes back bit for bit, and two empty sides are the empty set."""
    torch.manual_seed(0)
    full = Partial(torch.randn(50) * 9, torch.rand(50) * 7, torch.randn(50, 3))
    void = Partial(torch.full((50,), -INF), torch.full((50,), NAN), torch.full((50, 3), INF))
    assert equal_bits(merge(full, void), full)
    assert equal_bits(merge(void, full), full)
    assert equal_bits(merge(void, void), empty((50,), 3))


def test_the_empty_partial():
    none = empty((2, 3), 5)
    assert none.m.tolist() == [[-INF] * 3] * 2 and not none.l.any() and none.o.shape == (2, 3, 5)
    assert not none.normalised().any() and torch.isneginf(none.log_sum_exp()).all()


def test_log_sum_exps_travel_in_fp32():
    """C02: 11.77 and 11.75 weigh .505 and .495; in bf16 they would tie."""
    share = merge(state(1, 11.77), state(0, 11.75)).normalised().item()
    assert share == pytest.approx(1 / (1 + math.exp(-0.02)), abs=1e-5)
    assert torch.tensor(11.77).bfloat16() == torch.tensor(11.75).bfloat16()


@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 300])
@pytest.mark.parametrize("splits", [1, 2, 4, 64])
def test_any_split_gives_the_whole_softmax(tokens, splits):
    """More splits than tokens too: then some are empty."""
    torch.manual_seed(tokens)
    q, k, v = torch.randn(2, 1, 3, 16), torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16)
    bounds = [tokens * i // splits for i in range(splits + 1)]
    total = empty((1, 2, 1, 3), 16)
    for start, stop in pairwise(bounds):
        total = merge(total, Partial(*attend_dense(q, k[:, :, start:stop], v[:, :, start:stop], None)))
    logits = torch.einsum("hqgd,nhtd->nhqgt", q, k).double() * math.log(2)
    wanted = torch.einsum("nhqgt,nhtd->nhqgd", logits.softmax(-1), v.double())
    torch.testing.assert_close(total.normalised().double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(total.log_sum_exp().double(), logits.logsumexp(-1), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- the tree

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64)
COUNTS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 63, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300)


def granules(count: int, seed: int = 0) -> Partial:
    """Partials [count, 2 heads, 3] of granules whose weights differ a lot; granule 0 is empty for head 1."""
    torch.manual_seed(seed)
    made = Partial(torch.randn(count, 2) * 4, torch.rand(count, 2) * 500 + 1, torch.randn(count, 2, 3) * 100)
    made.m[0, 1], made.l[0, 1], made.o[0, 1] = -INF, 0, 0
    return made


def defined(parts: Partial) -> Partial:
    """Lanes in token order, then node(stride, off) = merge(node(2 stride, off), node(2 stride, off + stride)): the root."""
    lanes: dict[int, Partial] = {}
    for g in range(len(parts.m)):
        lanes[g % LANES] = merge(lanes[g % LANES], parts.rows(g)) if g >= LANES else parts.rows(g)

    def node(stride: int, off: int) -> Partial | None:
        if stride == LANES:
            return lanes.get(off)
        a, b = node(2 * stride, off), node(2 * stride, off + stride)
        return merge(a, b) if a and b else a or b

    return node(1, 0)


def nodes_of_rank(parts: Partial, rank: int, ranks: int, sequence: int) -> Partial:
    """What a rank computes from the granules that it owns."""
    own = torch.tensor([g for g in range(len(parts.m)) if owner(g, sequence, ranks) == rank], dtype=torch.int64)
    count = residue_count(ranks)
    return tree(parts.rows(own), own, lane_width(len(parts.m), count), count)


def root_of_ranks(parts: Partial, ranks: int, sequence: int) -> Partial:
    """The exchange of `ranks` simulated ranks, as the last of them sees its result."""
    sent = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return torch.stack(sent) if len(sent) == ranks else tensor.new_full((ranks, *tensor.shape), NAN)

    for rank in range(ranks):
        root = combine([nodes_of_rank(parts, rank, ranks, sequence)], [sequence], rank, ranks, gather)[0]
    assert ranks == 1 or {(t.shape, t.dtype) for t in sent} == {((1, slots(ranks), 2, 5), torch.float32)}
    return root


@pytest.mark.parametrize("count", COUNTS)
def test_the_root_has_the_same_bits_for_every_number_of_ranks(count):
    parts = granules(count)
    wanted = root_of_ranks(parts, 1, 0)
    for ranks in RANKS:
        for sequence in {0, 1, 5 * (count % 3)}:  # a batch index moves the owners, never the result
            assert equal_bits(root_of_ranks(parts, ranks, sequence), wanted), (ranks, sequence)


@pytest.mark.parametrize("count", COUNTS)
def test_the_root_is_merged_in_the_defined_order(count):
    """To the bit in plain torch; compiled kernels round 2^x in their own way."""
    parts = granules(count)
    with dispatch.forced("reference"):
        for ranks in (1, 3, 8):
            assert equal_bits(root_of_ranks(parts, ranks, 0), defined(parts))
    for found, wanted in zip(root_of_ranks(parts, 3, 0), defined(parts), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


def test_another_order_of_merging_would_show():
    """Left to right, and pairs of neighbours: both differ in the last bits, so the test above can fail."""
    parts = granules(64)
    chain = parts.rows(0)
    for g in range(1, 64):
        chain = merge(chain, parts.rows(g))
    neighbours = parts
    while len(neighbours.m) > 1:
        neighbours = merge(neighbours.rows(slice(0, None, 2)), neighbours.rows(slice(1, None, 2)))
    wanted = defined(parts)
    for other in (chain, neighbours.rows(0)):
        torch.testing.assert_close(other.normalised(), wanted.normalised(), rtol=1e-4, atol=1e-4)
        assert not equal_bits(other, wanted)


@pytest.mark.parametrize("count", [3, 200, 300])
def test_the_root_is_the_union_of_all_granules(count):
    parts = granules(count)
    weights = (parts.m - parts.m.amax(0)).double().exp2()
    wanted = (weights.unsqueeze(-1) * parts.o.double()).sum(0) / (weights * parts.l).sum(0).unsqueeze(-1)
    torch.testing.assert_close(root_of_ranks(parts, 3, 0).normalised().double(), wanted, rtol=1e-4, atol=1e-5)


def test_growing_context_keeps_the_shape_of_the_tree():
    """A narrower set of lanes than 256 only leaves out empty leaves."""
    parts = granules(20)
    index = torch.arange(20)
    narrow = reduce_lanes(fill_lanes(parts, index, 32), 1)
    wide = reduce_lanes(fill_lanes(parts, index, LANES), 1)
    assert equal_bits(narrow, wide)


def test_lane_width():
    """(granules, nodes) -> lanes: the next power of two that holds both, 256 at most."""
    wanted = {(0, 1): 1, (1, 1): 1, (2, 1): 2, (3, 1): 4, (3, 16): 16, (33, 4): 64, (257, 1): 256, (9999, 8): 256}
    assert {key: lane_width(*key) for key in wanted} == wanted


def test_a_lane_takes_its_granules_in_token_order():
    parts = granules(600)
    lanes = fill_lanes(parts, torch.arange(600), LANES)
    for lane in (0, 87, 88, 255):
        wanted = merge(parts.rows(lane), parts.rows(lane + 256))
        if lane < 88:
            wanted = merge(wanted, parts.rows(lane + 512))
        assert equal_bits(lanes.rows(lane), wanted)
