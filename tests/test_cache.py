"""The packed cache, fed with keys and values directly: what is sealed, with which bytes, and what it accounts for."""

import math

import pytest
import simulated
import torch
from fed_cache import (
    CODECS,
    DIM,
    EVERY_CODEC,
    KERNELS,
    KV_HEADS,
    SCALING,
    feed,
    kernels,  # noqa: F401
    make,
    prefill,
    sealed_bytes,
    sealed_keys_and_values,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bitkv_dist import placement
from bitkv_dist.cache import PackedCache, Shard, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel.exchange import combine

# ------------------------------------------------------------------------------------------- what is sealed, and when

FEEDINGS = ([200], [32, *[1] * 168], [57, *[1] * 13, 130], [1] * 200, [*[16] * 12, 8])


@EVERY_CODEC
def test_any_feeding_gives_the_same_bytes(codec):
    """C03, C04: prefill at once or in chunks, packed chunks and decode steps in any mix, plain torch or compiled kernels."""
    q, kv = tokens(200)
    caches = []
    for counts in FEEDINGS:
        caches.append(make(codec))
        feed(caches[-1], q, kv, counts)
    for chunk in (512, 64):
        caches.append(make(codec))
        prefill(caches[-1], q, kv, chunk)
    with dispatch.forced("reference"):
        caches.append(make(codec))
        feed(caches[-1], q, kv, [100, *[1] * 70, 30])
    wanted = sealed_bytes(caches[0])
    assert list(wanted) == [0, 1]  # 200 tokens, of which at least 32 stay exact: 128 are sealed
    for cache in caches:
        assert sealed_bytes(cache) == wanted
        assert cache.sealed_tokens(0) == 128 and cache.length(0) == 200
    error = (sealed_keys_and_values(caches[0]) - kv[:, :, :128]).abs().max()
    assert error == 0 if codec == "exact" else 1e-3 < error < 4


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([64, 128]),
    st.sampled_from([0, 1, 64, 100, 128]),
    st.sampled_from([0, 1, 31, 64, 128, 200]),
    st.lists(st.sampled_from([1, 1, 1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 300]), min_size=1, max_size=8),
)
def test_what_is_not_sealed_is_kept_to_the_bit(page_tokens, sink_tokens, recent_tokens, counts):
    """After any feeding the sealed pages are a function of the length, and all other tokens are there as they came."""
    q, kv = tokens(sum(counts))
    cache = make(page_tokens=page_tokens, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
    for count in counts:
        feed(cache, q, kv, [count])
        length, state = cache.length(0), cache.layers[0].states[0]
        sink = math.ceil(sink_tokens / page_tokens) * page_tokens
        end = max(sink, (length - max(1, recent_tokens)) // page_tokens * page_tokens)
        assert state.sealed_end == end
        assert cache.sealed_tokens(0) == max(0, min(end, length) - sink) == len(sealed_bytes(cache)) * page_tokens
        kept = torch.cat((kv[:, :, : min(sink, length)], kv[:, :, end:length]), dim=2)
        assert torch.equal(state.exact[:, :, : kept.shape[2]], kept)


@pytest.mark.parametrize("recent_tokens", [0, 1, 32, 128])
@pytest.mark.parametrize("sink_tokens", [0, 64, 128])
def test_a_page_seals_when_it_is_older_than_the_window(sink_tokens, recent_tokens):
    """Prefills of every length around a page boundary: the newest max(1, recent) tokens are exact."""
    page = sink_tokens + 64  # the end of the first page after the sink
    newest = max(1, recent_tokens)
    for length in (1, 63, page - 1, page, page + newest - 1, page + newest, page + newest + 63, page + newest + 64):
        q, kv = tokens(length)
        cache = make(sink_tokens=sink_tokens, recent_tokens=recent_tokens)
        prefill(cache, q, kv)
        assert cache.sealed_tokens(0) == max(0, (length - newest) // 64 * 64 - sink_tokens)


def shard_of(mesh) -> Shard:
    """A rank's shard as the engine makes it."""
    rank, ranks = mesh.sp_rank, mesh.sp
    return Shard(
        rank, ranks, placement.residue_count(ranks),
        owns=lambda granule, sequence: placement.owner(granule, sequence, ranks) == rank,
        reduce=lambda nodes, sequences: combine(nodes, sequences, rank, ranks, mesh.gather_sp),
        gather=mesh.gather_sp,
    )  # fmt: skip


def decode_shards(mesh, codec: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], audit: bool):
    """Store all but 5 tokens of each sequence, then decode those; (bytes per sequence, outputs, digests) of this rank."""
    cache = make(codec, sequences=len(pairs), shard=shard_of(mesh), audit=audit)
    layer, outputs = cache.layers[0], []
    for sequence, (q, kv) in enumerate(pairs):
        stored = kv.shape[2] - 5
        layer.begin_prompt(sequence, stored)
        for start in range(0, stored, 512):
            parts = [None] * mesh.sp
            owner = placement.owner(start // 512, sequence, mesh.sp)
            parts[owner] = (sequence, start, min(512, stored - start))
            cache.step = Step([], round=parts)
            layer.receive(kv[:, :, start : min(start + 512, stored)] if owner == mesh.sp_rank else None)
        layer.finish_prompt(sequence)
        outputs.append(feed(cache, q, kv, [1] * 5, sequence))
    return [sealed_bytes(cache, sequence) for sequence in range(len(pairs))], torch.stack(outputs), cache.page_digests()


@pytest.mark.parametrize("codec", ["4bit", "tiered4", "minmax"])
@KERNELS
def test_shards_hold_the_pages_of_one_rank(kernels, codec):  # noqa: F811
    """C03: the shards of 2 to 8 ranks, put in token order, are the bytes of one rank, and every rank has its answer."""
    pairs = [tokens(length, sequence) for sequence, length in enumerate((1300, 100, 2100))]
    ((wanted, answer, digests),) = simulated.run(1, decode_shards, codec, pairs, False)
    for ranks in (2, 3, 8):
        shards = simulated.run(ranks, decode_shards, codec, pairs, False)
        for sequence, pages in enumerate(wanted):
            held = [page for shard, _, _ in shards for page in shard[sequence]]
            assert sorted(held) == sorted(pages)  # each page on one rank
            assert {page: record for shard, _, _ in shards for page, record in shard[sequence].items()} == pages
        assert all(torch.equal(output, answer) for _, output, _ in shards)
        assert {key: value for _, _, found in shards for key, value in found.items()} == digests
    for _, _, audited in simulated.run(3, decode_shards, codec, pairs, True):
        assert audited == digests  # with audit every rank encodes all pages, and finds the same


@pytest.mark.parametrize("reserved", [0, 600, 3000])
def test_reserved_and_grown_caches_hold_the_same(reserved):
    q, kv = tokens(1500)
    cache, plain = make(), make()
    cache.reserve(0, reserved)
    outputs = [feed(c, q, kv, [512, 512, 470, *[1] * 6]) for c in (cache, plain)]
    assert sealed_bytes(cache) == sealed_bytes(plain) and torch.equal(*outputs)
    if reserved == 3000:
        assert len(cache.layers[0].states[0].sealed.slabs) == 1


# --------------------------------------------------------------------------------------------------------- accounting


def storages(thing, found: dict[int, int]) -> dict[int, int]:
    """Address -> bytes of the storage of every tensor reachable from a cache, without the signs that its codecs compute."""
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, (list, tuple)):
        for element in thing:
            storages(element, found)
    elif isinstance(thing, dict):
        storages(list(thing.values()), found)
    elif type(thing).__module__.startswith("bitkv_dist.") and ".codec." not in type(thing).__module__:
        kept = [value for name, value in vars(thing).items() if name not in ("cache", "finite", "refined", "rows")]
        storages(kept, found)
    return found


@EVERY_CODEC
def test_bytes_are_those_of_all_storages(codec):
    q, kv = tokens(900)
    cache = make(codec, layers=2, sequences=2)
    cache.reserve(1, 2000)
    feed(cache, q, kv, [500, *[1] * 3, 397])
    prefill(cache, q, kv, sequence=1)
    assert cache.bytes == sum(storages(cache, {}).values())
    exact = 2 * 2 * 2 * KV_HEADS * (32 + 64) * DIM * 4  # layers, sequences, K and V
    slots = 16 + math.ceil((2000 - 32) // 64 * 64 / 512)  # granules: grown for one sequence, reserved for the other
    assert cache.bytes == exact + 2 * slots * 8 * KV_HEADS * cache.layers[0].codec.record_bytes


@pytest.mark.parametrize(
    ("codec", "dim", "least"), [("2bit", 64, 6.6), ("2bit", 128, 7.0), ("1bit", 64, 11.4), ("1bit", 128, 12.6)]
)
def test_ratio_to_bf16(codec, dim, least):
    """All metadata of sealed tokens counted, at the default page of 128."""
    config = CacheConfig(**CODECS[codec])
    cache = PackedCache(config, HeadShape(1, 0, 1, dim, torch.bfloat16), 1)
    kv = torch.randn(2, 1, 3000, dim).bfloat16()
    layer = cache.layers[0]
    layer.begin_prompt(0, 3000)
    cache.step = Step([0], round=[(0, 0, 3000)])
    layer.receive(kv)
    layer.finish_prompt(0)
    sealed = sum(record.numel() for _, record in layer.states[0].pages())
    assert cache.sealed_tokens(0) == 2816 - 128
    assert cache.sealed_tokens(0) * dim * 2 * 2 / sealed == pytest.approx(16 / cache.stored_bits_per_element)
    assert 16 / cache.stored_bits_per_element >= least


def test_exact_rows_do_not_grow():
    q, kv = tokens(2500)
    cache = make(sink_tokens=64)
    feed(cache, q, kv, [64])
    before = cache.layers[0].states[0].exact.untyped_storage().data_ptr()
    feed(cache, q, kv, [512] * 4 + [1] * 10)
    state = cache.layers[0].states[0]
    assert state.exact.untyped_storage().data_ptr() == before and state.exact.shape[2] == 64 + 32 + 64
    assert state.prompt is None


def test_reads_of_a_step():
    """A counted step reads every sealed page once, and the exact rows that its query sees."""
    q, kv = tokens(301)
    cache = make(sink_tokens=64)
    feed(cache, q, kv, [300])
    assert cache.reads.bits == cache.exact_reads.bits == 0  # chunks are not counted
    cache.step = Step([0], count_reads=True)
    cache.update(kv[None, 0, :, 300:], kv[None, 1, :, 300:], 0)
    cache.layers[0].attend(q[None, :, 300:], SCALING)
    sealed, exact = 192, 301 - 192
    assert cache.reads.scanned == sealed * KV_HEADS
    assert cache.reads.bits == sealed // 64 * KV_HEADS * cache.layers[0].codec.record_bytes * 8
    assert cache.exact_reads.elements == exact * KV_HEADS * DIM * 2
    assert cache.exact_reads.bits == cache.exact_reads.elements * 32


# --------------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("feeding", ["steps", "chunk", "prefill"])
@pytest.mark.parametrize(("side", "name"), [(0, "key"), (1, "value")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_key_or_value_is_named_when_it_would_be_sealed(feeding, side, name, bad):
    """C05: layer and token, also on a rank that does not own the page."""
    q, kv = tokens(200)
    kv[side, 1, 77, 3] = bad
    for cache in (make(), make(shard=Shard(owns=lambda granule, sequence: False))):
        with pytest.raises(FloatingPointError, match=f"layer 0, token 77: {name} is not finite"):
            if feeding == "prefill":
                prefill(cache, q, kv)
            else:
                feed(cache, q, kv, [1] * 200 if feeding == "steps" else [200])
