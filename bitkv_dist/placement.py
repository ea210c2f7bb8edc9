"""Which sequence rank owns which granule, a pure function of indices: no rank count changes what is merged with what.

With N ranks let V = N if N is a power of two, else min(256, the smallest power of two >= 4 N). Granule g of sequence b has
residue g mod V, which rank (residue + b) mod N computes as one node of the merge tree (partial.py).
"""

from __future__ import annotations

from bitkv_dist.cache_config import LANES


def residue_count(ranks: int) -> int:
    """V: the number of merge-tree nodes that the ranks share."""
    if not 1 <= ranks <= LANES:
        raise ValueError(f"sp {ranks}: 1 to {LANES} sequence ranks are served; use more tensor-parallel ranks instead")
    return ranks if ranks & (ranks - 1) == 0 else min(LANES, 1 << (4 * ranks - 1).bit_length())


def owner(granule: int, sequence: int, ranks: int) -> int:
    """The rank that seals and attends to this granule of the sequence with this index in the batch."""
    return (granule % residue_count(ranks) + sequence) % ranks


def owned_granules(granules: int, sequence: int, ranks: int) -> list[int]:
    """How many of a sequence's first granules each rank owns."""
    modulus, found = residue_count(ranks), [0] * ranks
    for residue in range(min(modulus, granules)):
        found[owner(residue, sequence, ranks)] += -(-(granules - residue) // modulus)
    return found


def residues(rank: int, sequence: int, ranks: int) -> range:
    """The residues that `rank` computes for a sequence."""
    return range((rank - sequence) % ranks, residue_count(ranks), ranks)


def slots(ranks: int) -> int:
    """How many nodes a rank sends per sequence and head: the same on every rank, the shorter ones padded with empty
    partials."""
    return -(-residue_count(ranks) // ranks)


def rounds(chunks: list[tuple[int, int]], chunks_per_granule: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Groups (sequence, chunk) pairs, in the given order, into rounds in which every rank has at most one chunk.

    A later chunk of a sequence never comes in an earlier round, so that a round's exchange completes all keys that its queries
    see.
    """
    grouped: list[list[tuple[int, int]]] = []
    busy: set[int] = set()
    for sequence, chunk in chunks:
        rank = owner(chunk // chunks_per_granule, sequence, ranks)
        if not grouped or rank in busy:
            grouped.append([])
            busy = set()
        grouped[-1].append((sequence, chunk))
        busy.add(rank)
    return grouped
