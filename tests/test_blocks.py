"""What plain torch rebuilds of sealed pages, a block of granules at a time: bounded whatever the length, the same bits."""

import runpy

import calibrations
import pytest
import ranks
import torch

from bitkv_dist import layer as layers
from bitkv_dist.cache import PackedCache
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels import dispatch

HK, G, D, P, GRANULES = 2, 2, 32, 128, 48
CODECS = {
    "exact": {"codec": "exact", "key_bits": 16, "value_bits": 16},
    "minmax": {"codec": "minmax", "key_bits": 2, "value_bits": 2},
    "tailored": {"codec": "tailored", "key_bits": 1, "value_bits": 1},
    "words and planes": {"codec": "tailored", "key_bits": 4, "value_bits": 4},
    "residual": {"codec": "residual", "key_bits": 2, "value_bits": 2},
    "2bit": {"key_bits": 2, "value_bits": 2},
    "tiered4": {"scan_bits": 1},
    "looped": {"codec": "looped", "key_bits": 2, "value_bits": 2},
}
Live = runpy.run_path(str(ranks.ROOT / "benchmarks" / "prefill_memory.py"))["Live"]


def filled(name: str, folder) -> PackedCache:
    """The same sealed pages in every one of GRANULES granules; room for them was announced."""
    settings, loops = CODECS[name], 3 if name == "looped" else 1
    if (codec := settings.get("codec")) in ("tailored", "residual"):
        settings = settings | {"calibration": calibrations.make(folder, codec, heads=HK, dim=D)}
    held = PackedCache(CacheConfig(**settings), HeadShape(loops, 0, HK, D, torch.float32, group=G, loops=loops), 1)
    held.reserve(0, (GRANULES + 1) * 512)
    generator, anchors = torch.Generator().manual_seed(0), []
    for layer in reversed(held.layers):
        state = layer.states[0]
        numbers = [list(range(4))] if layer.codec.positional else []
        pages = layer.codec.encode(*torch.randn(2, 4, HK, P, D, generator=generator), *numbers, *anchors[:1])
        anchors.append(pages)
        for page in range(GRANULES * 4):
            state.sealed.page(*divmod(page, 4))[:] = pages[page % 4]
        state.length, state.sealed_end = GRANULES * 512 + 200, GRANULES * 512
    return held


@pytest.mark.parametrize("name", CODECS)
def test_a_decode_rebuilds_no_more_than_a_block(name, tmp_path, monkeypatch):
    """One query over 24,000 tokens: its scores are few, what is decoded for it is not."""
    with dispatch.forced("reference"):
        held = filled(name, tmp_path)
        layer, query = held.layers[0], torch.randn(HK, 1, G, D)
        exact = layer.exact_partial(query, layer.states[0].rows())
        peaks, found = [], []
        for numbers in (1 << 40, 1 << 20):
            monkeypatch.setattr(layers, "SCORES_AT_ONCE", numbers)
            live = Live()
            with live, torch.inference_mode():
                found.append(layer.sealed_nodes(0, query, exact))
            peaks.append(live.peak - live.bytes)  # what was there before, and was looked into, stays
    assert all(torch.equal(*parts) for parts in zip(*found, strict=True))
    assert peaks[1] < 4 * (1 << 20) < peaks[0] / 3


def test_kernels_that_read_records_as_they_lie_take_all_at_once():
    held = PackedCache(CacheConfig(), HeadShape(1, 0, HK, D, torch.float32, group=G), 1)
    layer = held.layers[0]
    if dispatch.native(torch.device("cpu")) is None:
        pytest.skip("no compiled kernels here")
    assert layer.codec.rebuilt == 0 and layer.granules_at_once((HK, 1, G)) == layers.SCORES_AT_ONCE // (512 * HK * G)
