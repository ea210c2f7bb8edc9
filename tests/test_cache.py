"""The packed cache, fed with keys and values directly: what is sealed, with which bytes, and what attention over it gives."""

import math

import pytest
import simulated
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitkv_dist import placement
from bitkv_dist.cache import PackedCache, Shard, Step
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels import dispatch
from bitkv_dist.parallel.exchange import combine

DIM, KV_HEADS, GROUP = 32, 2, 3
SCALING = DIM**-0.5
CODECS = {
    "4bit": {"key_bits": 4, "value_bits": 4},
    "2bit": {"key_bits": 2, "value_bits": 2},
    "1bit": {"key_bits": 1, "value_bits": 1},
    "k4v2": {"key_bits": 4, "value_bits": 2},
    "tiered4": {"key_bits": 4, "value_bits": 4, "scan_bits": 1},
    "minmax": {"codec": "minmax", "key_bits": 4, "value_bits": 4, "value_group_channels": 16},
    "exact": {"codec": "exact", "key_bits": 16, "value_bits": 16},
}
SMALL = {"page_tokens": 64, "sink_tokens": 0, "recent_tokens": 32}
KERNELS = pytest.mark.parametrize("kernels", ["reference", "compiled"], indirect=True)
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS)


def make(codec="4bit", layers=1, sequences=1, shard=None, audit=False, dtype=torch.float32, **fields) -> PackedCache:
    heads = HeadShape(layers, 0, KV_HEADS, DIM, dtype, group=GROUP)
    return PackedCache(CacheConfig(**CODECS[codec] | SMALL | fields), heads, sequences, shard, audit)


@pytest.fixture
def kernels(request):
    """Plain torch, or whatever is the fastest here."""
    if request.param == "compiled":
        yield
    else:
        with dispatch.forced("reference"):
            yield


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [H, T, D], kv [2, HK, T, D]) of a sequence whose keys have a mean and rows of different length, as real ones do."""
    torch.manual_seed(seed)
    kv = torch.randn(2, KV_HEADS, count, DIM)
    kv[0] = kv[0] * (0.5 + torch.rand(KV_HEADS, count, 1)) + torch.randn(KV_HEADS, 1, DIM)
    return 1.5 * torch.randn(KV_HEADS * GROUP, count, DIM), kv


def feed(cache: PackedCache, q: torch.Tensor, kv: torch.Tensor, counts: list[int], sequence: int = 0) -> torch.Tensor:
    """Append the tokens in pieces of `counts`, as decode steps (1) and chunks (more); attention output [T, H, D] of layer 0."""
    outputs, start = [], cache.length(sequence)
    for count in counts:
        part = slice(start, start + count)
        cache.step = Step([sequence])
        for index, layer in enumerate(cache.layers):
            cache.update(kv[None, 0, :, part], kv[None, 1, :, part], index)
            out = layer.attend(q[None, :, part], SCALING)[0]
            outputs += [out] if index == 0 else []
        start += count
    return torch.cat(outputs)


def prefill(cache: PackedCache, q: torch.Tensor, kv: torch.Tensor, chunk: int = 512, sequence: int = 0) -> torch.Tensor:
    """Exact prefill of one sequence by one rank; attention output [T, H, D] of the last layer."""
    count = kv.shape[2]
    for index, layer in enumerate(cache.layers):
        outputs = []
        layer.begin_prompt(sequence, count)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            cache.step = Step([sequence], round=[(sequence, start, part.stop - start)])
            cache.update(kv[None, 0, :, part], kv[None, 1, :, part], index)
            outputs.append(layer.attend(q[None, :, part], SCALING)[0])
        layer.finish_prompt(sequence)
    return torch.cat(outputs)


def sealed_bytes(cache: PackedCache, sequence: int = 0, layer: int = 0) -> dict[int, bytes]:
    """Global page -> its record."""
    return {page: record.numpy().tobytes() for page, record in cache.layers[layer].states[sequence].pages()}


def sealed_keys_and_values(cache: PackedCache, sequence: int = 0) -> torch.Tensor:
    """What the sealed pages of layer 0 stand for, fp32 [2, HK, tokens, D]."""
    layer = cache.layers[0]
    records = torch.stack([record for _, record in layer.states[sequence].pages()])
    return torch.stack([x.transpose(0, 1).flatten(1, 2) for x in layer.codec.decode(records)])


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
def test_shards_hold_the_pages_of_one_rank(kernels, codec):
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


# ---------------------------------------------------------------------------------------------------------- attention


def reference_path(cache: PackedCache, q: torch.Tensor, kv: torch.Tensor, end: int, correction: bool = True) -> torch.Tensor:
    """The answer for a sequence's last tokens in plain fp32: codes of the pages before `end` dequantised, eager softmax.

    q [H, n, D] of the last n of T tokens; kv [2, HK, T, D] -> [n, H, D]. Sealed tokens' logits gain 0.5 scale^2 |q|^2 r^2 / D.
    """
    layer, sink, total = cache.layers[0], cache.config.sink_rounded, kv.shape[2]
    keys, values = kv.clone()
    extra = torch.zeros(KV_HEADS, total)
    if end > sink:
        sealed = sealed_keys_and_values(cache)[:, :, : end - sink]
        keys[:, sink:end], values[:, sink:end] = sealed
        if correction and cache.config.codec == "planes":
            bits = cache.config.key_bits
            records = torch.stack([record for _, record in layer.states[0].pages()])[: (end - sink) // cache.config.page_tokens]
            a = layer.codec.load(records, "K").full.float().transpose(0, 1).flatten(1)  # [HK, sealed]
            extra[:, sink:end] = 0.5 * SCALING**2 * layer.codec.noise[bits, bits] * a * a
    out = []
    for head in range(KV_HEADS * GROUP):
        group = head // GROUP
        logits = q[head] @ keys[group].T * SCALING + q[head].square().sum(-1, keepdim=True) * extra[group]
        hidden = torch.arange(total) > torch.arange(total - q.shape[1], total)[:, None]
        out.append(logits.masked_fill(hidden, -math.inf).softmax(-1) @ values[group])
    return torch.stack(out, dim=1)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


PLAIN_CODECS = [codec for codec in CODECS if codec != "tiered4"]
INT8_ERROR = 0.03  # of the query's codes and the values' weights; the lossless codecs have neither


@pytest.mark.parametrize("codec", PLAIN_CODECS)
@pytest.mark.parametrize(("page_tokens", "sink_tokens", "recent_tokens"), [(64, 0, 32), (64, 64, 1), (128, 128, 128)])
@KERNELS
def test_a_decode_step_gives_the_answer_of_the_reference_path(kernels, codec, page_tokens, sink_tokens, recent_tokens):
    q, kv = tokens(1201)
    cache = make(codec, page_tokens=page_tokens, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
    prefill(cache, q[:, :1200], kv[:, :, :1200])
    found = feed(cache, q, kv, [1])
    wanted = reference_path(cache, q[:, 1200:], kv, cache.layers[0].states[0].sealed_end)
    assert relative_error(found, wanted) < (1e-5 if codec in ("exact", "minmax") else INT8_ERROR)


def test_without_the_correction_the_reference_path_differs():
    """The tests above can tell: at one bit, sealed tokens would weigh too little beside exact ones."""
    q, kv = tokens(1201)
    cache = make("1bit")
    prefill(cache, q[:, :1200], kv[:, :, :1200])
    found = feed(cache, q, kv, [1])
    wanted = reference_path(cache, q[:, 1200:], kv, cache.layers[0].states[0].sealed_end, correction=False)
    assert relative_error(found, wanted) > 2 * INT8_ERROR


@pytest.mark.parametrize("codec", ["4bit", "minmax", "exact"])
@pytest.mark.parametrize(("before", "count"), [(0, 2), (95, 40), (159, 2), (160, 130), (255, 64), (900, 300)])
def test_a_chunk_sees_what_a_step_at_its_first_position_would(codec, before, count):
    """The window is that of the chunk's first token, its own tokens are exact, and the causal mask ends at each query."""
    q, kv = tokens(before + count)
    cache = make(codec, sink_tokens=64)
    if before:
        feed(cache, q, kv, [before])
    found = feed(cache, q, kv, [count])
    end = max(64, (before + 1 - 32) // 64 * 64)
    wanted = reference_path(cache, q[:, before:], kv, end)
    assert relative_error(found, wanted) < (0.02 if codec == "4bit" else 1e-5)


@pytest.mark.parametrize("codec", ["4bit", "tiered4"])
def test_an_exact_prefill_sees_no_sealed_token(codec):
    q, kv = tokens(1100)
    cache = make(codec)
    found = prefill(cache, q, kv)
    wanted = reference_path(make("exact"), q, kv, 0)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert cache.sealed_tokens(0) == 1024


def test_refining_every_token_gives_the_answer_of_the_full_code():
    q, kv = tokens(1201)
    answers = []
    for codec, fields in (("tiered4", {"refine": RefineConfig(value=1.0)}), ("4bit", {}), ("tiered4", {}), ("1bit", {})):
        cache = make(codec, **fields)
        prefill(cache, q[:, :1200], kv[:, :, :1200])
        answers.append(feed(cache, q, kv, [1]))
    everything, full, tiered, one_bit = answers
    assert relative_error(everything, full) < 1e-5
    assert relative_error(tiered, full) < 0.8 * relative_error(one_bit, full)


def test_causal_flag_is_aligned_to_the_newest_token():
    """C11: two queries on top of two tokens, equal scores, V = 1, 2, 3, 4 -> 2.0 and 2.5."""
    q, kv = torch.zeros(KV_HEADS * GROUP, 4, DIM), torch.zeros(2, KV_HEADS, 4, DIM)
    kv[1] = torch.arange(1.0, 5.0)[:, None]
    means = torch.tensor([1.0, 1.5, 2.0, 2.5])[:, None, None].expand(4, KV_HEADS * GROUP, DIM)
    for counts in ([2, 2], [1, 1, 1, 1], [4], [1, 3]):
        torch.testing.assert_close(feed(make(), q, kv, counts), means)
    for chunk in (2, 4):
        torch.testing.assert_close(prefill(make(), q, kv, chunk), means)


def test_scores_of_any_size_stay_finite():
    """C06: q = k = 24 in all dims, exact and sealed."""
    q, kv = tokens(300)
    q[:], kv[0] = 24.0, 24.0
    for codec in ("4bit", "tiered4", "minmax"):
        assert torch.isfinite(feed(make(codec), q, kv, [200] + [1] * 100)).all()


def test_a_short_sequence_is_exact():
    """Fewer tokens than the window: the answer of plain attention, from an empty set of sealed pages."""
    for count in (1, 2, 3, 31, 32):
        q, kv = tokens(count)
        torch.testing.assert_close(feed(make(), q, kv, [1] * count), reference_path(make(), q, kv, 0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("codec", ["4bit", "tiered4", "minmax"])
def test_sequences_of_a_batch_do_not_see_each_other(codec):
    """C23, with as many sequences as KV heads: other lengths beside it change no bit of a sequence's answer."""
    lengths = [700, 40, 333]
    pairs = [tokens(length, seed) for seed, length in enumerate(lengths)]
    batch = make(codec, sequences=3)
    for sequence, (q, kv) in enumerate(pairs):
        feed(batch, q, kv, [lengths[sequence] - 1], sequence)
    batch.step = Step([0, 2])
    last = [torch.stack([pairs[s][1][i, :, -1:] for s in (0, 2)]) for i in range(2)]
    batch.update(*last, 0)
    found = batch.layers[0].attend(torch.stack([pairs[s][0][:, -1:] for s in (0, 2)]), SCALING)
    for row, sequence in enumerate((0, 2)):
        alone = make(codec)
        assert torch.equal(found[row], feed(alone, *pairs[sequence], [lengths[sequence] - 1, 1])[-1:])
    assert batch.length(1) == 39  # a sequence that has no row in the step stays as it is


def test_bfloat16_models():
    q, kv = (x.bfloat16() for x in tokens(400))
    cache = make("4bit", dtype=torch.bfloat16)
    out = feed(cache, q, kv, [300] + [1] * 100)
    assert out.dtype == cache.layers[0].states[0].exact.dtype == torch.bfloat16
    fp32 = make("4bit")
    assert relative_error(out.float(), feed(fp32, q.float(), kv.float(), [300] + [1] * 100)) < 0.01
    assert sealed_bytes(cache) == sealed_bytes(fp32)


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


def test_the_layer_whose_attention_went_wrong_is_remembered():
    q, kv = tokens(40)
    cache = make(layers=3)
    feed(cache, q, kv, [30])
    assert cache.first_nonfinite_layer() is None
    cache.step = Step([0])
    for index, layer in enumerate(cache.layers):
        k, v = kv[None, :, :, 30:31].clone().unbind(1)
        if index:
            v[0, 0, 0, 0] = math.nan
        layer.update(k, v)
        layer.attend(q[None, :, 30:31], SCALING)
    assert cache.first_nonfinite_layer() == 1
