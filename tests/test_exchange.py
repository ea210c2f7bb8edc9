"""The exchange of a layer: what each rank sends, and that all of them end with the root of the whole tree."""

import math

import pytest
import simulated
import torch

from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel.exchange import Exchange, combine, combine_heads, combine_sums, in_tree_order
from bitkv_dist.partial import Partial, root
from bitkv_dist.placement import residue_count, residues, slots
from bitkv_dist.split import Split

DIM = 4


def random_nodes(count: int, rows: tuple[int, ...], seed: int) -> Partial:
    torch.manual_seed(seed)
    return Partial(torch.randn(count, *rows) * 5, torch.rand(count, *rows) + 1, torch.randn(count, *rows, DIM))


def only(nodes: Partial, own: range) -> Partial:
    """The rank's own nodes; the others hold NaN, which must never reach anyone."""
    kept = Partial(*(torch.full_like(part, math.nan) for part in nodes))
    for part, whole in zip(kept, nodes, strict=True):
        part[list(own)] = whole[list(own)]
    return kept


def exchange(nodes: list[Partial], sequences: list[int], ranks: int) -> list[list[Partial]]:
    """Every rank's roots. Ranks are run one after the other: once to collect what they send, once to receive."""
    own, sent = [], []
    for rank in range(ranks):
        own.append([only(node, residues(rank, sequence, ranks)) for node, sequence in zip(nodes, sequences, strict=True)])
        combine(own[rank], sequences, rank, ranks, lambda t: sent.append(t) or t.expand(ranks, *t.shape))
    stacked = torch.stack(sent)  # raises when the ranks' shapes differ
    assert stacked.dtype == torch.float32
    assert stacked.shape[1:3] == (len(sequences), slots(ranks))
    assert not stacked.isnan().any()
    return [combine(own[rank], sequences, rank, ranks, lambda t: stacked) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("sequences", [[0], [1], [0, 1, 2], [4, 1]])
def test_every_rank_gets_the_root(ranks, sequences):
    nodes = [random_nodes(residue_count(ranks), (2, 1, 3), sequence) for sequence in sequences]
    wanted = [root(node) for node in nodes]
    for roots in exchange(nodes, sequences, ranks):
        for found, whole in zip(roots, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_one_rank_exchanges_nothing():
    node = random_nodes(1, (2, 1, 3), 0)

    def gather(tensor):
        raise AssertionError("a world of one needs no exchange")

    (found,) = combine([node], [0], 0, 1, gather)
    assert all(torch.equal(a, b[0]) for a, b in zip(found, node, strict=True))


def test_padding_is_the_empty_partial():
    """5 ranks share 32 nodes: three of them send 6, the others pad to 7."""
    sent = []
    nodes = random_nodes(32, (1,), 0)
    for rank in range(5):
        combine([nodes], [0], rank, 5, lambda t: sent.append(t) or t.new_zeros(5, *t.shape))
    counts = [len(residues(rank, 0, 5)) for rank in range(5)]
    assert counts == [7, 7, 6, 6, 6]
    for count, tensor in zip(counts, sent, strict=True):
        padding = tensor[0, count:, 0]
        assert padding.tolist() == [[-math.inf] + [0.0] * (1 + DIM)] * (7 - count)


@pytest.mark.parametrize(("ranks", "sequence"), [(2, 1), (3, 0), (3, 2), (6, 1)])
def test_received_nodes_are_put_in_tree_order(ranks, sequence):
    """Every node carries its residue as its maximum."""
    gathered = torch.full((ranks, slots(ranks), 2 + DIM), -math.inf)
    for rank in range(ranks):
        for slot, residue in enumerate(residues(rank, sequence, ranks)):
            gathered[rank, slot] = residue
    assert in_tree_order(gathered, sequence, ranks).m.tolist() == list(range(residue_count(ranks)))


def own_heads(everyone: list[list[Partial]], heads: list[range], wanted: list[Partial]) -> bool:
    """Whether each rank has the bits of `wanted` for its heads, and nothing for the others; Partials [HK, n, G]."""
    for roots, own in zip(everyone, heads, strict=True):
        for found, whole in zip(roots, wanted, strict=True):
            flat = [Partial(*(part.transpose(0, 1).flatten(1, 2) for part in partial)) for partial in (found, whole)]
            index = list(own)
            if not all(torch.equal(a[:, index], b[:, index]) for a, b in zip(*flat, strict=True)):
                return False
            rest = [head for head in range(flat[0].m.shape[1]) if head not in own]
            if not torch.isneginf(flat[0].m[:, rest]).all() or flat[0].o[:, rest].any():
                return False
    return True


def received(own: list[Partial], rank: int, sequences: list[int], ranks: int, heads: list[range], sent: torch.Tensor) -> list:
    return combine_heads(own, sequences, rank, ranks, heads, lambda t: sent[:, rank])


@pytest.mark.parametrize(("ranks", "sequences"), [(2, [0]), (3, [2]), (4, [0, 1]), (8, [1, 0, 5]), (12, [0])])
def test_all_to_all_leaves_each_rank_its_heads(ranks, sequences):
    """9 heads in 3 groups, two queries: shares of the 9 x 64 dims of the output projection's input touch whole heads."""
    heads = [Split(1, ranks, 0, rank, "helix").touched_heads(9, 64) for rank in range(ranks)]
    nodes = [random_nodes(residue_count(ranks), (3, 2, 3), sequence) for sequence in sequences]
    wanted = [root(node) for node in nodes]
    own, sent = [], []
    for rank in range(ranks):
        own.append([only(node, residues(rank, sequence, ranks)) for node, sequence in zip(nodes, sequences, strict=True)])
        combine_heads(own[rank], sequences, rank, ranks, heads, lambda t: sent.append(t) or t.clone())
    stacked = torch.stack(sent)  # [from, to, ..]
    assert stacked.shape[4:] == (2, max(map(len, heads)), 2 + DIM) and not stacked.isnan().any()
    place = sequences, ranks, heads
    everyone = [received(own[rank], rank, *place, stacked) for rank in range(ranks)]
    assert own_heads(everyone, heads, wanted)


def merged(mesh, nodes: list[Partial], own: range) -> tuple[list[Partial], bool, int, int]:
    """The roots, whether they are of all heads, and what was received and would be sent for one sequence."""
    exchange = Exchange(mesh, [own] * mesh.sp, 4)
    mine = [only(node, residues(mesh.sp_rank, sequence, mesh.sp)) for sequence, node in enumerate(nodes)]
    return exchange(mine, [0, 1]), exchange.all_heads, mesh.sp_bytes, exchange.collective(DIM, torch.device("cpu"))[0]


@pytest.mark.parametrize("own", [range(0, 2), range(2, 4), range(3, 4), range(0, 4)])
@pytest.mark.parametrize("kind", ["allgather", "allreduce"])
def test_heads_that_nobody_goes_on_with_are_not_sent(kind, own):
    """Four heads of a KV head that several TP ranks keep: each sends those that are its own, with all their bits."""
    nodes = [random_nodes(2, (1, 3, 4), sequence) for sequence in range(2)]
    for roots, all_heads, received, sent in simulated.run(2, merged, nodes, own, exchange=kind):
        assert all_heads == (len(own) == 4)
        assert sent == 4 * len(own) * (2 + DIM)
        if kind == "allgather":
            assert received == 2 * 3 * sent  # two sequences, three queries
        for found, whole in zip(roots, map(root, nodes), strict=True):
            rest = [head for head in range(4) if head not in own]
            assert torch.isneginf(found.m[..., rest]).all() and not found.o[..., rest, :].any()
            for part, wanted in zip(found, whole, strict=True):
                kept = part[:, :, list(own)], wanted[:, :, list(own)]
                if kind == "allgather":
                    assert torch.equal(*kept)
            ours, wanted = (part.normalised()[..., list(own), :] for part in (found, whole))
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


def test_nine_heads_on_four_ranks():
    """144 dims each: a rank gets every head that it touches, two of them from two sides."""
    heads = [Split(1, 4, 0, rank, "helix").touched_heads(9, 64) for rank in range(4)]
    assert [list(own) for own in heads] == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_all_reduce_is_the_root_up_to_rounding(ranks):
    """An empty set too; what a rank holds of other ranks' nodes reaches nobody."""
    nodes = random_nodes(residue_count(ranks), (2, 1, 3), 0)
    for part, nothing in zip(nodes, (-math.inf, 0.0, 0.0), strict=True):
        part[:, 0, 0, 1] = nothing
    tops, sums = [], []
    for round_ in range(3):
        for rank in range(ranks):
            mine = [only(nodes, residues(rank, 0, ranks))]
            largest = (lambda t: tops.append(t) or t) if round_ == 0 else lambda t: torch.stack(tops).amax(0)
            total = (lambda t: t) if round_ == 0 else (lambda t: sums.append(t) or t)
            if round_ == 2:
                total = lambda t: torch.stack(sums).sum(0)  # noqa: E731
            (found,) = combine_sums(mine, [0], rank, ranks, largest, total)
    whole = root(nodes)
    torch.testing.assert_close(found.log_sum_exp(), whole.log_sum_exp(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.normalised(), whole.normalised(), atol=1e-5, rtol=0)
    assert torch.isneginf(found.m[0, 0, 1])


def test_an_exchange_can_be_part_of_a_recorded_step():
    """Nothing in it comes from the host; replayed on what other ranks send, it gives the root of that."""
    pytest.importorskip("triton")
    from tape import TapeRecorder

    ranks, sequences, sent = 3, [0, 2], []
    nodes = [random_nodes(residue_count(ranks), (2, 1, 3), sequence) for sequence in sequences]
    for rank in range(ranks):
        combine(nodes, sequences, rank, ranks, lambda t: sent.append(t) or t.expand(ranks, *t.shape))
    received = torch.zeros(ranks, *sent[0].shape)
    with dispatch.forced("triton"):
        replay, output = TapeRecorder().record(
            lambda: torch.stack([part.o for part in combine(nodes, sequences, 1, ranks, lambda t: received)])
        )
        received.copy_(torch.stack(sent))
        replay()
        assert torch.equal(output, torch.stack([root(node).o for node in nodes]))
