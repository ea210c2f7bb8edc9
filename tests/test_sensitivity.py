"""Schedules: which raises there are, how a budget is spent, and that the YAML comes back as the cache that was written."""

import itertools

import pytest
import torch

from bitkv_dist.cache import PackedCache
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import build
from bitkv_dist.evaluate.sensitivity import Raise, as_yaml, check_budget, raised, raises, spend, stored_bits

LAYERS = 4
SHAPE = HeadShape(LAYERS, 0, 2, 64, torch.float32)
ONE_BIT = CacheConfig(key_bits=1, value_bits=1)
BASE = 1.375  # bits stored by ONE_BIT at D = 64: 1, a scale per vector, a centroid per page


def test_raises():
    assert raises(ONE_BIT, 2, ("KV",), None) == [Raise(0, "KV", 2), Raise(1, "KV", 2)]
    assert raises(CacheConfig(key_bits=2, value_bits=1), 1, ("K", "V"), None) == [Raise(0, "K", 3), Raise(0, "V", 2)]
    assert raises(ONE_BIT, 1, ("K",), [4, 2]) == [Raise(0, "K", 2), Raise(0, "K", 4)]
    assert raises(build("minmax2", {}).cache, 1, ("KV",), None) == [Raise(0, "KV", 4)]


@pytest.mark.parametrize(
    ("config", "bits", "part"),
    [
        (ONE_BIT, [1], "raise-bits 1: must be above 1 and one of 2, 3, 4, 8"),
        (ONE_BIT, [5], "raise-bits 5"),
        (CacheConfig(key_bits=8, value_bits=8), None, "codec planes at 8 bits: there is nothing to raise"),
        (build("exact", {}).cache, None, "codec exact at 16 bits: there is nothing to raise"),
        (raised(ONE_BIT, [Raise(1, "K", 2)]), None, "cache.layers 1: a schedule is what this task makes"),
    ],
)
def test_what_cannot_be_raised_is_refused(config, bits, part):
    with pytest.raises(ValueError) as caught:
        raises(config, LAYERS, ("KV",), bits)
    assert part in str(caught.value)


def test_raised_layers():
    config = raised(ONE_BIT, [Raise(0, "KV", 2), Raise(2, "K", 4), Raise(1, "KV", 2), Raise(2, "K", 2)])
    depths = [(layer.key_bits, layer.value_bits) for layer in map(config.for_layer, range(LAYERS))]
    assert depths == [(2, 2), (2, 2), (4, 1), (1, 1)]
    assert [entry.layers for entry in config.layers] == [(0, 1), (2,)]
    assert raised(ONE_BIT, []) == ONE_BIT


def test_stored_bits_are_those_of_a_cache():
    for chosen in ([], [Raise(0, "K", 4)], [Raise(1, "KV", 2), Raise(3, "V", 8)]):
        config = raised(ONE_BIT, chosen)
        assert stored_bits(config, SHAPE) == PackedCache(config, SHAPE, 1).stored_bits_per_element
    assert stored_bits(ONE_BIT, SHAPE) == BASE
    assert stored_bits(raised(ONE_BIT, [Raise(0, "K", 4)]), SHAPE) == BASE + 3 / 2 / LAYERS


def test_a_budget_below_the_cache_is_refused():
    check_budget(ONE_BIT, SHAPE, BASE)
    with pytest.raises(ValueError, match=r"budget-bits 1\.3: the cache takes 1\.375"):
        check_budget(ONE_BIT, SHAPE, 1.3)


def test_the_best_layers_come_first():
    gains = {Raise(layer, "KV", 2): gain for layer, gain in enumerate((0.1, 0.4, -0.1, 0.3))}
    one_layer = 1 / LAYERS
    assert spend(ONE_BIT, SHAPE, gains, BASE) == []
    assert spend(ONE_BIT, SHAPE, gains, BASE + one_layer) == [Raise(1, "KV", 2)]
    assert spend(ONE_BIT, SHAPE, gains, BASE + 2.9 * one_layer) == [Raise(1, "KV", 2), Raise(3, "KV", 2)]
    assert [step.layer for step in spend(ONE_BIT, SHAPE, gains, 16)] == [1, 3, 0]  # one that makes it worse is never taken


def test_gain_counts_per_bit():
    gains = {Raise(0, "KV", 4): 0.5, Raise(1, "KV", 2): 0.2, Raise(0, "KV", 2): 0.4}
    assert spend(ONE_BIT, SHAPE, gains, 16) == [Raise(0, "KV", 2), Raise(1, "KV", 2), Raise(0, "KV", 4)]
    assert spend(ONE_BIT, SHAPE, gains, BASE + 2 / LAYERS) == [Raise(0, "KV", 2), Raise(1, "KV", 2)]
    sides = {Raise(0, "K", 2): 0.3, Raise(0, "V", 2): 0.1, Raise(1, "V", 2): 0.2}
    assert spend(ONE_BIT, SHAPE, sides, BASE + 1 / LAYERS) == [Raise(0, "K", 2), Raise(1, "V", 2)]


def test_greedy_spends_as_well_as_any_choice_of_equal_costs():
    gains = dict(zip((Raise(layer, "KV", 2) for layer in range(LAYERS)), (0.3, 0.1, 0.25, 0.2), strict=True))
    for count in range(LAYERS + 1):
        budget = BASE + count / LAYERS
        chosen = spend(ONE_BIT, SHAPE, gains, budget)
        best = max(itertools.combinations(gains, count), key=lambda steps: sum(map(gains.get, steps)))
        assert set(chosen) == set(best)
        assert stored_bits(raised(ONE_BIT, chosen), SHAPE) <= budget


@pytest.mark.parametrize(
    "config",
    [
        raised(ONE_BIT, [Raise(0, "KV", 2), Raise(2, "K", 4), Raise(3, "KV", 2)]),
        raised(CacheConfig(key_bits=2, value_bits=2, scan_bits=1, refine=RefineConfig(value=0.1)), [Raise(1, "KV", 4)]),
        raised(CacheConfig(sink_tokens=0, recent_tokens=64, page_tokens=64, correction=False, seed=7), [Raise(1, "V", 8)]),
        raised(build("minmax2", {}).cache, [Raise(1, "KV", 4)]),
        ONE_BIT,
    ],
    ids=["1bit", "tiered", "window", "minmax", "plain"],
)
def test_yaml_comes_back(tmp_path, config):
    path = tmp_path / "schedule.yaml"
    path.write_text(as_yaml(config, ["made: for # a test", "twice"]))
    assert path.read_text().startswith("# made: for # a test\n# twice\ncache:")
    assert build(str(path), {}).cache == config
