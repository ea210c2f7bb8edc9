"""Round to nearest between minimum and maximum: groups, codes and errors as the scheme promises them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.minmax import MinMaxCodec, pack_fields, unpack_fields
from bitkv_dist.config import build


def codec_of(dim=64, heads=1, key_bits=2, value_bits=2, **fields) -> MinMaxCodec:
    config = CacheConfig(codec="minmax", key_bits=key_bits, value_bits=value_bits, **fields)
    return make_codec(config, HeadShape(1, 0, heads, dim, torch.float32), 0)


def round_trip(codec: MinMaxCodec, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codec.decode(codec.encode(k, v))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fields_are_packed_from_the_lowest_bits_up(bits):
    torch.manual_seed(bits)
    code = torch.randint(0, 1 << bits, (3, 24), dtype=torch.uint8)
    packed = pack_fields(code, bits)
    assert packed.shape == (3, 24 * bits // 8)
    for i in range(24):
        byte, shift = divmod(i * bits, 8)
        assert torch.equal(packed[:, byte] >> shift & ((1 << bits) - 1), code[:, i])
    assert torch.equal(unpack_fields(packed, bits), code)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_all_byte_values_survive(bits):
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(pack_fields(unpack_fields(every, bits), bits), every)


def rounded(groups: np.ndarray, bits: int) -> np.ndarray:
    """Round to nearest over the last dim in float64, with fp16 scale and minimum."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(float)
    low = low.astype(np.float16).astype(float)
    codes = np.rint((groups - low) / np.where(scale == 0, 1, scale)).clip(0, 2**bits - 1)
    return codes * scale + low


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("page_tokens", "key_group", "dim", "value_group"), [(128, 64, 64, 32), (64, 64, 80, 16), (128, 32, 128, 64)]
)
def test_keys_share_a_scale_per_channel_and_values_per_token(bits, page_tokens, key_group, dim, value_group):
    torch.manual_seed(bits)
    k, v = torch.randn(2, 3, 2, page_tokens, dim) * torch.logspace(-2, 2, dim)
    codec = codec_of(dim, 2, bits, bits, page_tokens=page_tokens, key_group_tokens=key_group, value_group_channels=value_group)
    found_k, found_v = round_trip(codec, k, v)
    keys = k.double().numpy().reshape(3, 2, page_tokens // key_group, key_group, dim).swapaxes(3, 4)
    values = v.double().numpy().reshape(3, 2, page_tokens, dim // value_group, value_group)
    wanted_k = rounded(keys, bits).swapaxes(3, 4).reshape(k.shape)
    # A value on the edge between two codes may fall on either side in fp32: then both are equally near.
    step = (keys.max(-1) - keys.min(-1)) / (2**bits - 1)
    off = np.abs(found_k.double().numpy() - wanted_k).reshape(keys.swapaxes(3, 4).shape) / step[:, :, :, None]
    assert (off > 1e-3).mean() < 1e-3
    assert np.isclose(found_v.double().numpy(), rounded(values, bits).reshape(v.shape), rtol=1e-4, atol=1e-6).mean() > 0.999


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_is_at_most_half_a_step(bits):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 1, 128, 64)
    found_k, found_v = round_trip(codec_of(64, 1, bits, bits), k, v)
    spans = [x.amax(axis) - x.amin(axis) for x, axis in ((k.unflatten(2, (2, 64)), 3), (v.unflatten(3, (2, 32)), 4))]
    halves = [span.unsqueeze(axis) / (2 * ((1 << bits) - 1)) for span, axis in zip(spans, (3, 4), strict=True)]
    assert ((found_k - k).unflatten(2, (2, 64)).abs() <= halves[0] * 1.02 + 2e-3).all()
    assert ((found_v - v).unflatten(3, (2, 32)).abs() <= halves[1] * 1.02 + 2e-3).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0, -24.0, 1e-30, 40_000.0, 1e9])
@pytest.mark.parametrize("bits", [2, 8])
def test_constant_pages(value, bits):
    """C05, C06: finite, and exact where fp16 holds the value; beyond fp16 the largest there is."""
    x = torch.full((1, 1, 128, 64), value)
    wanted = min(float(np.float16(value)) if abs(value) < 65504 else 65504.0, 65504.0)
    for found in round_trip(codec_of(64, 1, bits, bits), x, x):
        assert (found == wanted).all()


def test_extremes_in_one_group():
    x = torch.zeros(1, 1, 128, 64)
    x[..., 0], x[..., 1] = 40_000.0, -40_000.0
    x[:, :, ::2] *= -1
    for found in round_trip(codec_of(), x, x):
        assert torch.isfinite(found).all()
        np.testing.assert_allclose(found[..., :2], x[..., :2], rtol=1e-3)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.tuples(*[st.sampled_from([2, 4, 8])] * 2), st.sampled_from([64, 128]), st.integers(1, 3), st.integers(0))
def test_bytes_of_a_page_do_not_depend_on_its_batch(bits, page_tokens, heads, seed):
    torch.manual_seed(seed % 2**32)
    k, v = torch.randn(2, 3, page_tokens, heads, 96).transpose(2, 3) * 5
    codec = codec_of(96, heads, *bits, page_tokens=page_tokens)
    together = codec.encode(k, v)
    assert torch.equal(together, torch.cat([codec.encode(k[i : i + 1].clone(), v[i : i + 1].clone()) for i in range(3)]))


@pytest.mark.parametrize(("preset", "bits_per_element"), [("minmax2", 2.75), ("minmax4", 4.75)])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_record_bytes(preset, dim, bits_per_element):
    """INT2 with 32 bits for 64 tokens of a key channel and for 32 channels of a value: 2 + 0.5 and 2 + 1."""
    config = build(preset, {}).cache
    codec = make_codec(config, HeadShape(1, 0, 1, dim, torch.float32), 0)
    assert codec.record_bytes * 8 / (2 * 128 * dim) == bits_per_element
    assert all(field.offset % 16 == 0 for field in codec.layout.fields.values())


def test_a_group_that_does_not_divide_the_head_dim_is_refused():
    with pytest.raises(ValueError, match=r"cache.value_group_channels 32: must divide the head dim 80; take 16"):
        build("minmax2", {}).cache.check_model(layers=2, head_dim=80)
    build("minmax2", {}).cache.check_model(layers=2, head_dim=16)  # a head smaller than the group is one group


def test_attention_is_that_over_the_decoded_pages():
    torch.manual_seed(0)
    codec = codec_of(64, 2, 4, 4)
    records = codec.encode(*torch.randn(2, 8, 2, 128, 64)).unflatten(0, (2, 4))
    valid = torch.tensor([[False, True, True, True], [True, True, False, False]])
    q = torch.randn(2, 3, 2, 64) * 64**-0.5 * math.log2(math.e)
    partial, reads = codec.attend(codec.prepare(q), records, valid)
    assert (reads.scanned, reads.bits) == (5 * 128 * 2 * 3, 5 * 2 * 3 * codec.record_bytes * 8)
    k, v = codec.decode(records)  # [n, pages, HK, P, D]
    for granule in range(2):
        keys, values = (x[granule, valid[granule]].transpose(0, 1).flatten(1, 2).double() for x in (k, v))
        weights = (torch.einsum("hqgd,htd->hqgt", q.double(), keys) * math.log(2)).softmax(-1)
        wanted = torch.einsum("hqgt,htd->hqgd", weights, values)
        torch.testing.assert_close(codec.finish(partial.rows(granule)).normalised().double(), wanted, atol=1e-5, rtol=0)
