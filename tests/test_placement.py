"""Which rank owns which granule: every one exactly once, for any number of ranks, without looking at the length."""

import pytest

from bitkv_dist.cache_config import GRANULE_TOKENS, LANES
from bitkv_dist.placement import owner, residue_count, residues, rounds, slots

RANKS = (*range(1, 18), 31, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256)


def test_residues_of_the_tree():
    """V = N for a power of two, else the smallest power of two >= 4 N, at most 256."""
    wanted = {1: 1, 2: 2, 3: 16, 4: 4, 5: 32, 6: 32, 7: 32, 8: 8, 12: 64, 16: 16, 63: 256, 65: 256, 128: 128, 256: 256}
    assert {ranks: residue_count(ranks) for ranks in wanted} == wanted


@pytest.mark.parametrize("ranks", [0, -1, 257, 1000])
def test_other_numbers_of_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match=f"sp {ranks}: 1 to 256"):
        residue_count(ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sequence", [0, 1, 7])
def test_every_granule_has_one_owner(ranks, sequence):
    """The rank that `owner` names is the one that computes the granule's residue, and no residue is computed twice."""
    shares = [residues(rank, sequence, ranks) for rank in range(ranks)]
    assert sorted(u for share in shares for u in share) == list(range(residue_count(ranks)))
    for granule in (*range(40), 255, 256, 257, 2047, 2**31):
        assert granule % residue_count(ranks) in shares[owner(granule, sequence, ranks)]
    assert max(map(len, shares)) == slots(ranks) <= 8
    assert all(list(share) == sorted(share) for share in shares)


@pytest.mark.parametrize("ranks", RANKS)
def test_work_is_spread_over_ranks_and_sequences(ranks):
    """Long sequences: no rank has over a third more than its share. A batch of short ones does not all land on rank 0."""
    counts = [0] * ranks
    for granule in range(8 * LANES):
        counts[owner(granule, 0, ranks)] += 1
    if ranks <= 64:
        assert max(counts) <= 8 * LANES / ranks * 1.34
    assert {owner(0, sequence, ranks) for sequence in range(ranks)} == set(range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 17, 33, 70, 513, 1100])
def test_every_position_is_owned_once(tokens, ranks):
    """C25, by position."""
    for sequence in range(3):
        owners = [owner(position // GRANULE_TOKENS, sequence, ranks) for position in range(tokens)]
        assert all(0 <= rank < ranks for rank in owners)
        assert owners[0] == sequence % ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunks_per_granule", [1, 4])
@pytest.mark.parametrize("lengths", [(1,), (5, 3, 9), (17, 1, 1, 1, 2)])
def test_rounds_of_a_prefill(lengths, chunks_per_granule, ranks):
    """Every chunk once; a rank has at most one chunk in a round, of its own; a sequence's chunks never swap rounds."""
    chunks = [(sequence, chunk) for sequence, length in enumerate(lengths) for chunk in range(length)]
    grouped = rounds(chunks, chunks_per_granule, ranks)
    assert [chunk for group in grouped for chunk in group] == chunks
    for group in grouped:
        owners = [owner(chunk // chunks_per_granule, sequence, ranks) for sequence, chunk in group]
        assert len(set(owners)) == len(owners)
    if ranks == 1:
        assert len(grouped) == len(chunks)


def test_rounds_use_all_ranks():
    assert rounds([(0, chunk) for chunk in range(8)], 1, 4) == [[(0, c) for c in range(4)], [(0, c) for c in range(4, 8)]]
    assert len(rounds([(sequence, 0) for sequence in range(8)], 1, 4)) == 2
