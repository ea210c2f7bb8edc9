"""The bit-plane codec: what a page's bytes are, what they give back, and how much attention over them loses."""

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import NOISE, PlanesCodec
from bitkv_dist.config import build
from bitkv_dist.kernels import reference
from bitkv_dist.partial import Partial

DIMS = (16, 64, 80, 96, 112, 128, 192, 256)  # C20


def codec_of(dim=64, heads=1, layer=0, first_head=0, dtype=torch.float32, **fields) -> PlanesCodec:
    return make_codec(CacheConfig(**fields), HeadShape(1, first_head, heads, dim, dtype), layer)


def bits(stored: int, scanned: int | None = None) -> dict:
    return {"key_bits": stored, "value_bits": stored, "scan_bits": scanned}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


# ---------------------------------------------------------------------------------------------------- bytes of a page

KINDS = {
    "normal": lambda x: x,
    "offset": lambda x: x + 200 * (torch.arange(x.shape[-1]) % 32 == 3),
    "constant": lambda x: torch.full_like(x, 2.0),
    "rows": lambda x: x[..., :1].expand_as(x),
    "zero": lambda x: x * 0,
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x.sign() * 40_000,
    "spread": lambda x: x * torch.logspace(-6, 6, x.shape[-2])[:, None],
}


@st.composite
def pages(draw):
    """(config fields, k, v): pages of every kind and shape; k, v [pages, HK, P, D] are views into a larger tensor."""
    stored = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 4]))
    fields = {"key_bits": stored[0], "value_bits": stored[1], "page_tokens": draw(st.sampled_from([64, 128]))}
    fields["scan_bits"] = draw(st.none() | st.integers(1, max(stored)))
    fields["score"] = draw(st.sampled_from(["mse", "unbiased"]))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4))
    heads, dim = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([16, 64, 80, 96]))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    kv = torch.randn(2, len(kinds), fields["page_tokens"], heads, dim).transpose(2, 3)
    for page, kind in enumerate(kinds):
        kv[:, page] = KINDS[kind](kv[:, page])
    return fields, kv[0], kv[1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pages())
def test_bytes_of_a_page_do_not_depend_on_its_batch(drawn):
    fields, k, v = drawn
    codec = codec_of(k.shape[-1], k.shape[1], **fields)
    together = codec.encode(k, v)
    alone = torch.cat([codec.encode(k[i : i + 1].clone(), v[i : i + 1].clone()) for i in range(len(k))])
    assert torch.equal(together, alone)
    assert torch.equal(codec.encode(k.flip(0), v.flip(0)), together.flip(0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pages())
def test_decoded_pages_are_finite_and_no_worse_than_the_mean(drawn):
    fields, k, v = drawn
    codec = codec_of(k.shape[-1], k.shape[1], **fields)
    for x, found in zip((k, v), codec.decode(codec.encode(k, v)), strict=True):
        assert torch.isfinite(found).all()
        if fields["score"] == "mse":
            spread = (x - x.mean(2, keepdim=True)).double().norm()
            rounding = 2**-9 * x.abs().max() * x.shape[-2] ** 0.5 * x.shape[-1] ** 0.5  # of fp16 scales and centroids
            assert (found - x).double().norm() <= spread + rounding


@settings(max_examples=30, deadline=None, derandomize=True)
@given(pages())
def test_heads_of_two_ranks_are_the_heads_of_one(drawn):
    """Signs belong to the global head, so tensor-parallel ranks store the bytes that one rank would."""
    fields, k, v = drawn
    heads = k.shape[1]
    whole = codec_of(k.shape[-1], heads, **fields).encode(k, v)
    for head in range(heads):
        own = slice(head, head + 1)
        assert torch.equal(codec_of(k.shape[-1], first_head=head, **fields).encode(k[:, own], v[:, own]), whole[:, own])


def test_layers_seeds_and_sides_are_rotated_differently():
    torch.manual_seed(0)
    k = torch.randn(1, 1, 128, 64)
    records = [codec_of(layer=layer, seed=seed, **bits(2)).encode(k, k) for layer, seed in ((0, 0), (1, 0), (0, 1))]
    assert len({record.numpy().tobytes() for record in records}) == 3
    codec = codec_of(**bits(2))
    assert not torch.equal(codec.layout.view(records[0], "Kcentroid"), codec.layout.view(records[0], "Vcentroid"))


def test_bfloat16_pages_are_those_of_their_float32_values():
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 2, 128, 80).bfloat16()
    found = codec_of(80, 2, dtype=torch.bfloat16, **bits(4, 1)).encode(k, v)
    assert torch.equal(found, codec_of(80, 2, **bits(4, 1)).encode(k.float(), v.float()))


def test_bytes_are_pinned():
    """The format: records of a page made of integers, for 4 bits all scanned and for one of them scanned."""
    x = ((torch.arange(2 * 128 * 64) * 2654435761 % 4096) - 2048).float().view(1, 2, 128, 64) / 512
    records = [codec_of(heads=2, seed=5, **bits(4, scanned)).encode(x, x.flip(2)) for scanned in (None, 1)]
    digests = [hashlib.sha256(record.numpy().tobytes()).hexdigest()[:16] for record in records]
    assert digests == ["c958b528f5864b0f", "010985e1b1ba1447"]


def test_the_unbiased_score_scale_is_for_keys_alone():
    """Values are summed, not ranked: they keep the least-squares scale."""
    torch.manual_seed(0)
    x = torch.randn(2, 1, 128, 64)
    plain, unbiased = (codec_of(score=score, **bits(4, 1)) for score in ("mse", "unbiased"))
    records = plain.encode(x, x), unbiased.encode(x, x)
    keys, values = ([plain.layout.view(record, side + "scan") for record in records] for side in "KV")
    assert (keys[1] > 1.2 * keys[0]).all() and torch.equal(*values)


# -------------------------------------------------------------------------------------------------- sizes and layout


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize(("stored", "scanned"), [(1, None), (2, None), (2, 1), (3, 2), (4, 1), (4, None), (8, 2)])
def test_record_bytes(dim, page_tokens, stored, scanned):
    """C20: D * bits / 8 bytes of codes a token, two bytes a scale, two a centroid element, all fields on 16-byte boundaries."""
    codec = codec_of(dim, page_tokens=page_tokens, **bits(stored, scanned))
    fields = codec.layout.fields
    codes = sum(fields[side + name].bytes for side in "KV" for name in ("planes", "low") if side + name in fields)
    scales = sum(fields[side + name].bytes for side in "KV" for name in ("scan", "full") if side + name in fields)
    assert codes == 2 * page_tokens * dim * stored // 8
    assert scales == 2 * page_tokens * (2 if scanned is None else 4)
    assert fields["Kcentroid"].bytes == fields["Vcentroid"].bytes == 2 * dim
    assert all(field.offset % 16 == 0 for field in fields.values())
    assert codec.record_bytes == codes + scales + 4 * dim  # no padding: all fields are multiples of 16 bytes
    ends = [field.offset + field.bytes for field in fields.values()]
    assert ends == [*(field.offset for field in list(fields.values())[1:]), codec.record_bytes]


@pytest.mark.parametrize(
    ("dim", "stored", "least"), [(64, 2, 6.6), (128, 2, 7.0), (64, 1, 11.4), (128, 1, 12.6), (64, 4, 3.6), (128, 4, 3.7)]
)
def test_ratio_of_sealed_storage_to_bf16(dim, stored, least):
    record_bytes = codec_of(dim, **bits(stored)).record_bytes
    assert 128 * dim * 2 * 2 / record_bytes >= least


@pytest.mark.parametrize("dim", [20, 72, 88])
def test_a_dim_without_a_rotation_is_refused(dim):
    with pytest.raises(ValueError, match=f"head_dim {dim}"):
        codec_of(dim)


# ------------------------------------------------------------------------------------------------------- fidelity


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("stored", "least", "most"), [(1, 0.33, 0.37), (2, 0.09, 0.12), (3, 0.023, 0.037), (4, 0.0055, 0.011), (8, 1.8e-5, 5e-5)]
)
def test_lost_energy_of_normal_pages(dim, stored, least, most):
    """The share of the energy around the centroid that a code loses, keys and values alike, whatever is scanned."""
    torch.manual_seed(dim)
    k, v = torch.randn(2, 4, 2, 128, dim)
    for scanned in {None, 1}:
        codec = codec_of(dim, 2, **bits(stored, scanned))
        for x, found in zip((k, v), codec.decode(codec.encode(k, v)), strict=True):
            lost = (found - x).square().sum() / (x - x.mean(2, keepdim=True)).square().sum()
            assert least < lost < most


@pytest.mark.parametrize(("scanned", "stored"), sorted(NOISE))
def test_noise_is_what_codes_lose_on_normal_data(scanned, stored):
    """r^2 / (D a^2) over pages of D = 64 and D = 128, within 4 %."""
    measured = []
    for dim in (64, 128):
        torch.manual_seed(dim)
        z = torch.randn(3000, dim)
        found = reference.quantize(z, stored, scanned)
        level = (found.code >> (stored - scanned)).float() - ((1 << scanned) - 1) / 2
        a = found.scan.float()
        r2 = (z - level * (2 if scanned == 1 else 1) * a[:, None]).square().sum(1)
        measured.append((r2.mean() / (dim * a.square().mean())).item())
    assert NOISE[scanned, stored] == pytest.approx(sum(measured) / 2, rel=0.04)


@pytest.mark.parametrize("value", [2.0, 0.0, 1e-30, -24.0])
@pytest.mark.parametrize("stored", [1, 2, 4])
def test_constant_pages_come_back(value, stored):
    """C05: what fp16 keeps of the value, to the bit."""
    k = torch.full((1, 1, 128, 64), value)
    codec = codec_of(**bits(stored))
    records = codec.encode(k, -k)
    for x, found in zip((k, -k), codec.decode(records), strict=True):
        assert torch.equal(found, x.half().float())
    assert all(torch.isfinite(codec.layout.view(records, side + "scan")).all() for side in "KV")


@pytest.mark.parametrize("stored", [1, 2, 4])
def test_zero_has_one_code_whatever_its_sign(stored):
    """C05. A page that equals its centroid has the code of zero too."""
    codec = codec_of(**bits(stored))
    zero = torch.zeros(1, 1, 128, 64)
    planes = [codec.layout.view(codec.encode(x, x), side + "planes") for x in (zero, -zero, zero + 2) for side in "KV"]
    for found in planes:
        assert (found[:, :, 0] == -1).all() and not found[:, :, 1:].any()  # sign bit 1, low bits 0: half a step above zero


def test_one_element_one_step_off_a_constant_page():
    k = torch.full((1, 1, 128, 64), 2.0)
    k[0, 0, 17, 5] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    codec = codec_of(**bits(4))
    found, _ = codec.decode(codec.encode(k, k))
    assert torch.isfinite(found).all() and (found - k).abs().max() <= 2**-9


@pytest.mark.parametrize("stored", [1, 2, 4])
def test_large_values_stay_finite(stored):
    """C06: rows of +-40,000 beside ordinary ones, and q = k = 24 everywhere, whose unscaled product overflows fp16."""
    torch.manual_seed(0)
    k = torch.randn(4, 1, 128, 128)
    k[0, 0, ::2] = 40_000.0
    k[1, 0, 1::2] = -40_000.0
    codec = codec_of(128, **bits(stored))
    records = codec.encode(k, k)
    assert all(torch.isfinite(x).all() for x in codec.decode(records))
    assert torch.isfinite(attend(codec, torch.randn(1, 1, 3, 128), k, k)).all()

    k = torch.full((1, 1, 128, 128), 24.0)
    q = torch.full((1, 1, 1, 128), 24.0) * 128**-0.5 * math.log2(math.e)
    partial = partial_of(codec, q, k, k)
    assert (partial.m * math.log(2)).item() == pytest.approx(6516.70, rel=2e-3)
    np.testing.assert_allclose(codec.finish(partial).normalised(), 24.0, atol=24 * 2**-10)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention in float64; q [HK, Q, G, D] in base 2, k, v [pages, HK, P, D] -> [HK, Q, G, D]."""
    k, v = (x.transpose(0, 1).flatten(1, 2).double() for x in (k, v))
    scores = torch.einsum("hqgd,htd->hqgt", q.double(), k) * math.log(2)
    return torch.einsum("hqgt,htd->hqgd", scores.softmax(-1), v).float()


def partial_of(codec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    """The codec's partial over one granule that holds these pages, in the codec's own space."""
    slots = GRANULE_TOKENS // codec.config.page_tokens
    records = torch.zeros(1, slots, codec.heads.kv_heads, codec.record_bytes, dtype=torch.uint8)
    records[0, : len(k)] = codec.encode(k, v)
    partial, _ = codec.attend(codec.prepare(q), records, (torch.arange(slots) < len(k))[None])
    return partial.rows(0)


def attend(codec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The codec's answer for one granule."""
    return codec.finish(partial_of(codec, q, k, v)).normalised()


@pytest.mark.parametrize("stored", [1, 2, 4])
def test_channels_with_a_huge_offset_cost_nothing(stored):
    """C08: N(0, 1) + 200 on 2 of 64 channels, removed by the centroid."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 4, 2, 128, 64)
    q = torch.randn(2, 1, 3, 64) * 64**-0.5 * math.log2(math.e)
    offset = torch.zeros(64)
    offset[[3, 40]] = 200.0
    codec = codec_of(heads=2, **bits(stored))
    plain = relative_error(attend(codec, q, k, v), attention(q, k, v))
    shifted = relative_error(attend(codec, q, k + offset, v), attention(q, k + offset, v))
    assert shifted <= 1.05 * plain


@pytest.mark.parametrize("dim", DIMS)
def test_attention_error_falls_with_the_bits(dim):
    torch.manual_seed(dim)
    k, v = torch.randn(2, 4, 2, 128, dim)
    q = torch.randn(2, 1, 2, dim) * dim**-0.5 * math.log2(math.e)
    answer = attention(q, k, v)
    errors = [relative_error(attend(codec_of(dim, 2, **bits(stored)), q, k, v), answer) for stored in (1, 2, 4, 8)]
    assert all(fewer > factor * more for (fewer, more), factor in zip(pairwise(errors), (1.3, 2.5, 5), strict=True))
    assert errors[-1] < 0.025


def test_refining_everything_is_the_full_code_and_refining_some_lies_between():
    """One token carries each head: the sign scan finds it, and its 4-bit score and value repair most of the error."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 4, 2, 128, 64)
    q = 3.0 * k[1, :, 17] * 64**-0.5  # looks for token 17 of page 1
    q = q[:, None, None, :].expand(2, 1, 3, 64) + 0.1 * torch.randn(2, 1, 3, 64)
    answer = attention(q, k, v)

    def error(**fields) -> float:
        return relative_error(attend(codec_of(heads=2, **fields), q, k, v), answer)

    everything = attend(codec_of(heads=2, **bits(4, 1), refine=RefineConfig(value=1.0)), q, k, v)
    full = attend(codec_of(heads=2, **bits(4)), q, k, v)
    assert relative_error(everything, full) < 1e-5
    tiered, one_bit = error(**bits(4, 1), refine=RefineConfig(value=0.02)), error(**bits(1))
    assert tiered < 0.3 * one_bit
    assert error(**bits(4)) < 0.15


def test_correction_can_be_switched_off():
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 1, 128, 64)
    q = torch.randn(1, 1, 1, 64) * 64**-0.5 * math.log2(math.e) * 2
    with_it, without = (partial_of(codec_of(correction=on, **bits(1)), q, k, v).m.item() for on in (True, False))
    assert with_it > without + 0.1


# ---------------------------------------------------------------------------------------------------- read counting


@pytest.mark.parametrize("preset", ["1bit", "2bit", "4bit", "tiered4", "tiered4-2", "tiered2"])
def test_reads_are_counted(preset):
    torch.manual_seed(0)
    config = build(preset, {}).cache
    codec = make_codec(config, HeadShape(1, 0, 2, 64, torch.float32), 0)
    records = codec.encode(*torch.randn(2, 8, 2, 128, 64)).unflatten(0, (2, 4))
    valid = torch.tensor([[False, True, True, True], [True, False, False, False]])
    _, reads = codec.attend(codec.prepare(torch.randn(2, 1, 3, 64)), records, valid)
    sealed = 4 * 128 * 2  # tokens x KV heads
    refined = 2 * (math.ceil(0.05 * 384) + math.ceil(0.05 * 128)) if config.refines else 0  # one set a group and granule
    assert (reads.scanned, reads.refined, reads.elements) == (sealed, refined, sealed * 64 * 2)
    scan_bits = config.key_scan_bits * 64 + 16 + 16 * 64 / 128  # code, scale, share of the centroid
    low_bits = (config.key_bits - config.key_scan_bits) * 64 + 16
    assert reads.bits == sealed * 2 * scan_bits + refined * 2 * low_bits
