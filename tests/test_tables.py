"""The tables of a decode step: they say what the sequences hold, and change only what changed."""

import pytest
import torch

pytest.importorskip("triton")

from bitkv_dist import placement
from bitkv_dist.cache import PackedCache, Shard
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels import dispatch

PAGE, SINK, RECENT, DIM = 64, 64, 32, 16
CONFIG = CacheConfig(key_bits=1, value_bits=1, page_tokens=PAGE, sink_tokens=SINK, recent_tokens=RECENT)


@pytest.fixture(autouse=True)
def kernels():
    with dispatch.forced("triton"):
        yield


def cache_of(rank: int = 0, ranks: int = 1) -> PackedCache:
    """Two layers and two sequences, of which the second begins empty."""
    nodes = placement.residue_count(ranks)
    shard = Shard(rank, ranks, nodes, owns=lambda granule, sequence: placement.owner(granule, sequence, ranks) == rank)
    cache = PackedCache(CONFIG, HeadShape(2, 0, 1, DIM, torch.float32, group=2), 2, shard)
    for layer in cache.layers:
        layer.begin_prompt(0, 560)
        layer.states[0].prompt.rows.normal_()
        layer.finish_prompt(0)
    return cache


def pages_in(tables, sequence: int, layer: int) -> list[tuple[int, int]]:
    """(global page, address of its records) that the tables of a sequence name, lane by lane."""
    found, per_granule = [], GRANULE_TOKENS // PAGE
    _, offsets, bounds = tables.tables[layer]
    lanes = bounds.shape[1]
    for lane, (first, end) in enumerate(bounds[sequence].tolist()):
        for place in range(first, end):
            granule, page = lane + place // per_granule * lanes, place % per_granule
            address = tables.anchor.data_ptr() + offsets[sequence, granule].item()
            found.append((granule * per_granule + page, address + page * tables.cache.layers[layer].codec.record_bytes))
    return sorted(found)


@pytest.mark.parametrize("ranks", [1, 3])
def test_tables_name_the_sealed_pages_that_a_rank_holds(ranks):
    """Steps that seal nothing, a page of one sequence, and one that opens a granule; every page of all ranks exactly once."""
    caches = [cache_of(rank, ranks) for rank in range(ranks)]
    for step in range(115):
        seen = [[], []]
        for cache in caches:
            tables = cache.step_tables([0, 1])
            tables.advance([7, step])
            if step not in (0, 14, 15, 79, 114):
                continue
            assert tables.token.tolist() == [[7], [step]] and tables.position.tolist() == [[560 + step], [step]]
            states = tables.states(1)
            assert tables.row.tolist() == [state.exact_count() - 1 for state in states]
            for sequence, state in enumerate(states):
                pages = pages_in(tables, sequence, layer=1)
                held = [(page, record.data_ptr()) for page, record in state.pages()]
                assert pages == held
                seen[sequence] += [page for page, _ in pages]
        if any(seen):
            assert [sorted(pages) for pages in seen] == [
                list(range(SINK // PAGE, state.sealed_end // PAGE)) for state in caches[0].layers[0].states
            ]


def test_tables_stay_where_they_are_until_they_are_outgrown():
    cache = cache_of()
    cache.reserve(0, 1000)
    first = cache.step_tables([0, 1])
    assert first.slots == 2 and cache.step_tables([0]) is not first  # other sequences, other tables
    again = cache.step_tables([0, 1])
    places = [tensor.data_ptr() for tensor in (again.numbers, again.bounds, *again.offsets)]
    while cache.layers[0].states[0].sealed_at(cache.length(0) + 1) <= 2 * GRANULE_TOKENS:
        assert cache.step_tables([0, 1]) is again
        again.advance([1, 1])
    assert [tensor.data_ptr() for tensor in (again.numbers, again.bounds, *again.offsets)] == places
    grown = cache.step_tables([0, 1])
    assert again.stale and grown is not again and grown.slots == 3
    assert cache.bytes > grown.bytes > 0
