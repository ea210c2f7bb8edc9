"""Per-layer schedules: what YAML may say, what each layer then is, and that a real cache follows it."""

import pytest
import torch

from bitkv_dist.cache import PackedCache
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import build
from bitkv_dist.schedule import LayerConfig, layer_numbers, layer_ranges


def cache_of(tmp_path, text: str, **overrides) -> CacheConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return build(str(path), {f"cache.{name}": value for name, value in overrides.items()}).cache


@pytest.mark.parametrize(
    ("given", "numbers"),
    [(5, (5,)), ("5", (5,)), ("0-2", (0, 1, 2)), ("0-2, 7,9 - 10", (0, 1, 2, 7, 9, 10)), ([3, 0], (3, 0)), ("3-1", ())],
)
def test_layer_numbers(given, numbers):
    assert layer_numbers(given) == numbers


@pytest.mark.parametrize("given", ["", "-", "1-", "-1", "a", "1,,2", "0-2-4", 1.0, True, None, [1, "2"], [True], {"from": 1}])
def test_layer_numbers_refused(given):
    with pytest.raises(ValueError, match=r"^cache\.layers\.layers .*; write"):
        layer_numbers(given)


@pytest.mark.parametrize("layers", [(0,), (0, 1), (0, 2), (0, 1, 2, 5, 7, 8), tuple(range(30))])
def test_ranges_are_read_back(layers):
    assert layer_numbers(layer_ranges(reversed(layers))) == layers


def test_each_layer_is_its_entry_over_the_common_fields(tmp_path):
    entries = '[{layers: "0-1", key_bits: 4}, {layers: 3, value_bits: 1}]'
    cache = cache_of(tmp_path, f"cache: {{key_bits: 2, value_bits: 2, layers: {entries}}}")
    depths = [(cache.for_layer(i).key_bits, cache.for_layer(i).value_bits) for i in range(5)]
    assert depths == [(4, 2), (4, 2), (2, 2), (2, 1), (2, 2)]
    assert all(cache.for_layer(i).layers == () for i in range(5))
    assert cache.for_layer(2) == CacheConfig(key_bits=2, value_bits=2)


def test_scan_depth_and_refinement_follow_what_a_layer_stores(tmp_path):
    cache = cache_of(
        tmp_path,
        """
        cache:
          {key_bits: 4, value_bits: 4, scan_bits: 2, refine: {value: 0.05, granularity: head}, layers: [
            {layers: 0, refine_value: 0.2}, {layers: 1, key_bits: 1, value_bits: 1},
            {layers: 2, key_bits: 2}, {layers: 3, scan_bits: 4}]}
        """,
    )
    depths = [(layer.key_scan_bits, layer.value_scan_bits) for layer in map(cache.for_layer, range(5))]
    assert depths == [(2, 2), (1, 1), (2, 2), (4, 4), (2, 2)]
    assert [layer.refines for layer in map(cache.for_layer, range(5))] == [True, False, True, False, True]
    assert [cache.for_layer(i).refine and cache.for_layer(i).refine.value for i in range(5)] == [0.2, None, 0.05, None, 0.05]
    assert cache.for_layer(0).refine.granularity == "head"


def test_a_layer_may_refine_where_the_others_do_not():
    cache = CacheConfig(key_bits=2, value_bits=2, layers=(LayerConfig((1,), key_bits=4, scan_bits=1, refine_value=0.1),))
    assert not cache.for_layer(0).refines and cache.for_layer(1).refine.value == 0.1


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ("[{layers: 0, key_bits: 5}]", "cache.layers 0: cache.key_bits 5: codec planes stores"),
        ("[{layers: 0, kye_bits: 2}]", "cache.layers.kye_bits 2: unknown key; did you mean key_bits?"),
        ("[{key_bits: 4}]", "must be different layer numbers"),
        ("[{layers: [1, 1], key_bits: 4}]", "must be different layer numbers"),
        ("[{layers: 3-1, key_bits: 4}]", "must be different layer numbers"),
        ("[{layers: [-1], key_bits: 4}]", "from 0 up"),
        ("[{layers: 1}]", "these layers differ in nothing"),
        ("[{layers: 1, key_bits: 4}, {layers: 0-2, key_bits: 1}]", "layer 1 is in two entries"),
        ("[{layers: 1, refine_value: 0.1}]", "cache.layers 1: cache.refine"),
        ("[{layers: 1, key_bits: 4, scan_bits: 1, refine_value: 1.5}]", "cache.layers.refine_value 1.5"),
        ("[{layers: 1, scan_bits: 3}]", "cache.layers 1: cache.scan_bits 3"),
        ("[{layers: 1, key_bits: 2.5}]", "cache.layers.key_bits 2.5"),
        ("[3]", "cache.layers (3,): must be a list of mappings"),
        ("0-2", "cache.layers '0-2': must be a list of mappings"),
        ("null", "cache.layers None"),
    ],
)
def test_refusals(tmp_path, entries, part):
    with pytest.raises(ValueError) as caught:
        cache_of(tmp_path, f"cache: {{key_bits: 2, value_bits: 2, layers: {entries}}}")
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_bits_or_codec_for_all_drop_the_schedule(tmp_path):
    text = "cache: {key_bits: 2, value_bits: 2, layers: [{layers: 0, key_bits: 4}]}"
    for overrides in ({"kv_bits": 3}, {"kv_bits": 16}, {"codec": "minmax"}):
        assert cache_of(tmp_path, text, **overrides).layers == ()
    assert cache_of(tmp_path, text, seed=3).layers


def test_layers_beyond_the_model_are_refused():
    cache = CacheConfig(layers=(LayerConfig((1, 2), key_bits=2),))
    cache.check_model(3, 64)
    with pytest.raises(ValueError, match=r"cache\.layers 2: the model has layers 0 to 1"):
        PackedCache(cache, HeadShape(2, 0, 1, 64, torch.float32), 1)


def test_a_real_cache_stores_what_the_schedule_says():
    shape = HeadShape(3, 0, 2, 64, torch.float32)
    mixed = CacheConfig(key_bits=1, value_bits=1, layers=(LayerConfig((1,), key_bits=4, value_bits=2),))
    cache = PackedCache(mixed, shape, 1)
    alone = [PackedCache(mixed.for_layer(i), shape, 1).layers[i].codec for i in range(3)]
    assert [layer.codec.record_bytes for layer in cache.layers] == [codec.record_bytes for codec in alone]
    per_bit = 128 * 64 // 8
    assert cache.layers[1].codec.record_bytes - cache.layers[0].codec.record_bytes == (3 + 1) * per_bit
    assert cache.stored_bits_per_element == pytest.approx(1.375 + (3 + 1) / 2 / 3)
