"""Attention over a packed cache that is fed with keys and values directly: the answer of plain attention over what it holds."""

import math

import pytest
import torch
from fed_cache import (
    CODECS,
    DIM,
    GROUP,
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

from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import RefineConfig


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
def test_a_decode_step_gives_the_answer_of_the_reference_path(kernels, codec, page_tokens, sink_tokens, recent_tokens):  # noqa: F811
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
