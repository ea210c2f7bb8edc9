"""A packed cache that is fed with keys and values directly, as decode steps, chunks and prefills, and what it then holds."""

import pytest
import torch

from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels import dispatch

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
