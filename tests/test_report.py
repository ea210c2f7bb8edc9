"""The report of a run: what it counts is there, once, and adds up over the ranks."""

import math

import pytest
import simulated
import tiny
import torch

from bitkv_dist import model, promise
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.report import cache_report, report

LENGTHS, NEW = [1200, 150], 9
LAYERS, KV_HEADS, DIM = 2, 2, 64
CACHE = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}
STORED = [length + NEW - 1 for length in LENGTHS]  # the last token of a run is never fed
SEALED = [(stored - 32) // 64 * 64 - 64 for stored in STORED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), num_attention_heads=6, hidden_size=96, head_dim=DIM)


def run(mesh, folder, cache: dict, new_tokens: int = NEW):
    served = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(served, CacheConfig(**CACHE | cache), mesh, GenerateConfig(max_new_tokens=new_tokens, digest=True))
    result = engine.generate([tiny.prompt(length) for length in LENGTHS])
    return report(engine, result, None, 1.5), engine.cache.bytes, engine.cache_digest()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_and_bits(folder, size, bits):
    everyone = simulated.run(size, run, folder, {"key_bits": bits, "value_bits": bits})
    held = [own for _, own, _ in everyone]
    for found, _, digest in everyone:
        kv = found["kv"]
        assert (kv["codec"], kv["key_bits"], kv["value_bits"]) == ("planes", bits, bits)
        assert (kv["sealed_tokens"], kv["exact_tokens"]) == (sum(SEALED), sum(STORED) - sum(SEALED))
        assert kv["bytes_per_rank"] == held and kv["bytes_total"] == sum(held)
        assert kv["bf16_bytes"] == sum(STORED) * LAYERS * KV_HEADS * DIM * 2 * 2
        assert kv["ratio_total"] == kv["bf16_bytes"] / kv["bytes_total"]
        per_element = bits + 16 / DIM + 16 / 64  # the code, a scale a token, a centroid a page
        assert kv["stored_bits_per_element"] == kv["read_bits_per_element"] == per_element  # everything is scanned
        assert kv["ratio"] == 16 / per_element
        assert not kv["refined_share"]
        assert found["digest"]["cache"] == digest == everyone[0][2]
        assert found["world"] == {"size": size, "tp": 1, "sp": size, "backend": "threads", "device": "cpu"}
        assert len(found["memory"]["peak_rss_bytes_per_rank"]) == size
    granules = sum(math.ceil((length + NEW - 32) // 64 * 64 / 512) for length in LENGTHS)
    records = granules * 8 * KV_HEADS * LAYERS * (2 * 64 * DIM * per_element / 8)
    assert sum(held) == records + size * len(LENGTHS) * LAYERS * 2 * KV_HEADS * (64 + 32 + 64) * DIM * 4


@pytest.mark.parametrize("size", [1, 3])
def test_reads_of_a_tiered_cache(folder, size):
    """The share of refined tokens and the bits read are those of the run, however many ranks counted them."""
    (kv, *_) = [found["kv"] for found, _, _ in simulated.run(size, run, folder, {"scan_bits": 1})]
    sealed = refined = exact = 0
    for length in LENGTHS:
        for step in range(NEW - 1):
            total = length + step + 1  # tokens the step's query sees
            end = (total - 32) // 64 * 64
            exact += total - (end - 64)
            for start in range(0, end, 512):
                tokens = min(end, start + 512) - max(64, start)
                sealed += tokens
                refined += math.ceil(0.05 * tokens)
    low_bits = 3 + 16 / DIM
    assert kv["refined_share"] == refined / sealed
    read = 1 + 16 / DIM + 16 / 64 + low_bits * refined / sealed
    assert kv["read_bits_per_element"] == pytest.approx(read, rel=1e-12)
    assert kv["read_bits_total"] == pytest.approx((sealed * read + exact * 32) / (sealed + exact), rel=1e-12)


def test_before_a_step_nothing_was_read(folder):
    (found,) = simulated.run(1, run, folder, {}, 0)
    kv, timing = found[0]["kv"], found[0]["timing"]
    assert kv["read_bits_per_element"] is kv["read_bits_total"] is kv["refined_share"] is None
    assert timing["decode_tokens_per_s"] is None and timing["load_s"] == 1.5
    assert timing["prefill_tokens_per_s"] == pytest.approx(sum(LENGTHS) / timing["prefill_s"])
    assert found[0]["token_ids"] == [[], []]


def test_times_and_tokens(folder):
    ((found, _, _),) = simulated.run(1, run, folder, {})
    timing = found["timing"]
    assert timing["decode_tokens_per_s"] == pytest.approx(2 * (NEW - 1) / timing["decode_s"])
    assert 0 < timing["prefill_s"] <= timing["first_token_s"]
    assert found["prompt_tokens"] == LENGTHS and found["schema"] == 1
    assert found["kernel"]["backend"] and found["kernel"]["reason"]


@pytest.mark.parametrize(("codec", "bits", "ratio"), [("exact", 16, 0.5), ("minmax", 2, 64 / 11)])
def test_other_codecs(folder, codec, bits, ratio):
    """The exact codec stores the model's float32, twice the bits of bf16."""
    ((found, _, _),) = simulated.run(1, run, folder, {"codec": codec, "key_bits": bits, "value_bits": bits})
    assert found["kv"]["ratio"] == pytest.approx(ratio)
    assert found["kv"]["read_bits_per_element"] == pytest.approx(16 / ratio)


def test_cache_report_needs_no_result(folder):
    def only_cache(mesh):
        served = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
        engine = Engine(served, CacheConfig(**CACHE), mesh, GenerateConfig(max_new_tokens=0))
        engine.generate([tiny.prompt(100)])
        return cache_report(engine)

    assert simulated.run(1, only_cache)[0]["sealed_tokens"] == 0


def test_what_holds_on_other_grids():
    """Bits for other sequence ranks where weights are replicated; else as close as measured for the type and the codec."""
    identical, close, turned, rounded = promise.IDENTICAL, promise.CLOSE, promise.TURNED, promise.ROUNDED
    for settings, found in (
        (("float32", "planes", "replicated", "allgather"), (identical, turned)),
        (("float32", "exact", "replicated", "allgather"), (identical, close)),
        (("float32", "planes", "replicated", "allreduce"), (turned, turned)),
        (("float32", "exact", "helix", "alltoall"), (close, close)),
        (("bfloat16", "planes", "helix", "alltoall"), (rounded, rounded)),
    ):
        assert tuple(promise.over_grids(*settings).values()) == found
