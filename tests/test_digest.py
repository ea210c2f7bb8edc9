"""Digests: what they depend on, what they do not, and who is named when they differ."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.parallel.digest import as_int64, combine, config_digest, digest64, layer_digests, odd_ones, whole

CONFIG = CacheConfig()
LAYERS = 5


def words(layer: int) -> np.ndarray:
    return np.arange(6, dtype=np.uint64) + np.uint64(1 << 63) + np.uint64(layer)


def test_the_hash_is_fixed_for_ever():
    assert digest64(b"bit", b"kv") == digest64(b"bitkv") == 0xF342EAC7307FFCC5
    assert whole(np.array([1, 2**64 - 1], dtype=np.uint64)) == digest64(bytes([1] + [0] * 7 + [255] * 8))


def test_a_layer_digest_depends_on_config_model_and_words():
    base = layer_digests(CONFIG, 7, words, LAYERS)
    assert base.dtype == np.uint64 and base.shape == (LAYERS,) and len(set(base.tolist())) == LAYERS
    assert (layer_digests(replace(CONFIG), 7, words, LAYERS) == base).all()
    for other in (
        layer_digests(replace(CONFIG, recent_tokens=256), 7, words, LAYERS),
        layer_digests(CONFIG, 8, words, LAYERS),
        layer_digests(CONFIG, 2**64 - 1, words, LAYERS),
        layer_digests(CONFIG, 7, words, LAYERS + 1)[:LAYERS],
    ):
        assert (other != base).all()

    def flipped(layer):
        found = words(layer)
        found[3] ^= np.uint64((layer == 2) << 17)
        return found

    assert (layer_digests(CONFIG, 7, flipped, LAYERS) != base).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("change", [{"key_bits": 2}, {"seed": 1}, {"page_tokens": 64}, {"correction": False}])
def test_every_field_of_the_config_counts(change):
    assert config_digest(replace(CONFIG, **change)) != config_digest(CONFIG)


def test_page_digests_combine_in_global_order():
    pages = {
        (layer, 0, page, head): 2**64 - 1 - 8 * layer - page - head for layer in (0, 1) for page in (0, 1) for head in (0, 2)
    }
    backwards = dict(reversed(pages.items()))
    assert combine(pages) == combine(backwards)
    assert len(combine(pages)) == 16 and combine({}) != combine(pages)
    assert combine(pages | {(0, 0, 0, 0): 5}) != combine(pages)
    swapped = pages | {(0, 0, 0, 0): pages[0, 0, 1, 0], (0, 0, 1, 0): pages[0, 0, 0, 0]}
    assert combine(swapped) != combine(pages)


def test_int64_keeps_all_64_bits():
    digests = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert torch.equal(as_int64(digests), torch.tensor([0, 1, -(2**63), -1]))


def test_who_is_odd():
    assert odd_ones([{0: 5, 1: 6}] * 3) == []
    assert odd_ones([{0: 5, 1: 6}, {0: 5, 1: 7}, {0: 5, 1: 6}]) == [(1, 1)]
    assert odd_ones([{0: 9, 1: 6}, {0: 5, 1: 6}, {0: 5, 1: 6}]) == [(0, 0)]
    assert odd_ones([{0: 5}, {0: 6}]) == [(1, 0)]  # no majority: the lowest rank is believed
    assert odd_ones([{0: 5}, {1: 6}, {0: 5, 1: 7}]) == [(2, 1)]  # ranks with other heads do not vote
