"""Words as the scan: which tokens take the planes below them, what attention makes of both, and what is read."""

import math
from dataclasses import replace

import calibrations
import pytest
import simulated
import tiny
import torch

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import TAIL_CORRECTION
from bitkv_dist.config import GenerateConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.evaluate.drift import drift
from bitkv_dist.plan.memory import packed_page
from bitkv_dist.report import cache_report
from bitkv_dist.schedule import LayerConfig

HEADS, GROUP, DIM, P = 2, 2, 32, 64
SMALL = {"page_tokens": P, "sink_tokens": P, "recent_tokens": 32}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return calibrations.make(tmp_path_factory.mktemp("calibrations"), heads=HEADS, dim=DIM)


def codec_of(file: str, bits: int = 4, heads: int = HEADS, **fields):
    config = CacheConfig("tailored", bits, bits, calibration=file, **SMALL | fields)
    return make_codec(config, HeadShape(1, 0, heads, DIM, torch.float32), 0)


def granules(codec, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and records [count, 8, HEADS, ..] of so many granules of 8 pages."""
    k, v = calibrations.keys(HEADS, 8 * count, DIM, seed=3)
    return *(x.unflatten(0, (count, 8)) for x in (k, v)), codec.encode(k, v, range(8 * count)).unflatten(0, (count, 8))


def by_head(pages: torch.Tensor) -> torch.Tensor:
    """[pages, HK, P, D] -> [HK, tokens, D]."""
    return pages.transpose(0, 1).flatten(1, 2)


def queries(count: int) -> torch.Tensor:
    return torch.randn(HEADS, count, GROUP, DIM, generator=torch.Generator().manual_seed(0)) * DIM**-0.5 * math.log2(math.e)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_planes_code_what_words_leave_over(file, bits):
    """Behind the bytes of the words alone, which do not change; a page's bytes do not depend on its batch."""
    words, codec = codec_of(file, 1), codec_of(file, bits)
    k, v = calibrations.keys(HEADS, 6, DIM, seed=500)
    records = codec.encode(k, v, range(6))
    assert torch.equal(records[..., : words.record_bytes], words.encode(k, v, range(6)))
    assert torch.equal(records, torch.cat([codec.encode(k[i : i + 1].clone(), v[i : i + 1].clone(), [i]) for i in range(6)]))
    planes = 2 * ((bits - 1) * DIM * P // 8 + 2 * P + 2 * DIM)  # planes, a scale a token, a mean
    assert codec.record_bytes == words.record_bytes + planes
    lost = {2: 0.5, 3: 0.2, 4: 0.07}[bits]
    for fine, coarse, x in zip(codec.decode(records), words.decode(records), (k, v), strict=True):
        assert (fine - x).square().sum() < lost * (coarse - x).square().sum()


def test_attention_takes_the_planes_of_the_chosen_tokens(file):
    """By the definition, in double precision: the best 5 % of a group's tokens in each granule, by their words' scores."""
    codec = codec_of(file)
    _, _, records = granules(codec, 2)
    valid = torch.tensor([[False] + [True] * 7, [True] * 3 + [False] * 5])
    q = queries(3)
    mass = torch.empty(2, HEADS, 3, GROUP, 8)
    partial, reads = codec.attend(codec.prepare(q), records, valid, page_mass=mass)
    words, fine = codec_of(file, 1).decode(records), codec.decode(records)
    refined = 0
    for granule in range(2):
        seen = valid[granule]
        (k, v), (fine_k, fine_v) = ([by_head(x[granule, seen]).double() for x in both] for both in (words, fine))
        square = codec.scales(records[granule, seen]).expand(-1, HEADS, P).transpose(0, 1).flatten(1).square()
        lost = codec_of(file, 1).correction[:, 0, 0] * TAIL_CORRECTION
        gain = torch.einsum("hqgd,hd->hqg", q.square(), lost)[..., None] * square[:, None, None]
        scores = torch.einsum("hqgd,htd->hqgt", q.double(), k) + gain
        share = (scores * math.log(2)).softmax(-1).amax(2)  # what tokens of a group compete with
        count = math.ceil(0.05 * scores.shape[-1])
        chosen = torch.zeros_like(share).scatter_(-1, share.topk(count).indices, 1.0).bool().unsqueeze(2)
        refined += count * HEADS * 3
        scores = torch.where(chosen, torch.einsum("hqgd,htd->hqgt", q.double(), fine_k), scores)
        weight = (scores * math.log(2)).softmax(-1)
        wanted = torch.einsum("hqgt,htd->hqgd", weight * ~chosen, v) + torch.einsum("hqgt,htd->hqgd", weight * chosen, fine_v)
        torch.testing.assert_close(partial.rows(granule).normalised().double(), wanted, atol=2e-4, rtol=0)
        paged = weight.unflatten(-1, (-1, P)).sum(-1)
        torch.testing.assert_close((mass / partial.l[..., None])[granule][..., seen].double(), paged, atol=1e-5, rtol=1e-4)
    assert (reads.scanned, reads.refined) == (10 * P * HEADS * 3, refined)
    assert reads.bits == 8 * 10 * HEADS * 3 * (codec.words_bytes + 4 * DIM) + refined * (6 * DIM + 32)


def test_refining_all_is_attention_to_the_decoded_pages(file):
    codec = codec_of(file, refine=RefineConfig(value=1.0))
    k, v, records = granules(codec, 1)
    q = queries(1)
    partial, _ = codec.attend(q, records, torch.ones(1, 8, dtype=torch.bool))
    k, v = (by_head(x[0]) for x in codec.decode(records))
    weight = (torch.einsum("hqgd,htd->hqgt", q, k) * math.log(2)).softmax(-1)
    torch.testing.assert_close(partial.normalised()[0], torch.einsum("hqgt,htd->hqgd", weight, v), atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_granule_has_the_same_bits_alone(tmp_path, heads):
    codec = codec_of(calibrations.make(tmp_path, heads=heads, dim=DIM), heads=heads)
    k, v = calibrations.keys(heads, 24, DIM, seed=3)
    records = codec.encode(k, v, range(24)).unflatten(0, (3, 8))
    valid, q = torch.ones(3, 8, dtype=torch.bool), queries(2)[:heads]
    together, _ = codec.attend(q, records, valid)
    for granule in range(3):
        alone, _ = codec.attend(q, records[granule : granule + 1], valid[:1])
        assert all(torch.equal(a, b[0]) for a, b in zip(together.rows(granule), alone, strict=True))


def test_what_the_configuration_says_and_refuses(file):
    tailored = {"cache.codec": "tailored", "cache.calibration": file}
    plain = build("tiered4", tailored).cache
    assert (plain.key_bits, plain.value_bits, plain.refines) == (1, 1, False)
    refined = build("4bit", tailored | {"cache.kv_bits": 3}).cache
    assert (refined.key_bits, refined.key_scan_bits, refined.refine) == (3, 1, RefineConfig())
    mixed = replace(refined, layers=(LayerConfig((0,), 1, 1), LayerConfig((1,), 4, 4, refine_value=0.1)))
    assert [mixed.for_layer(layer).refines for layer in range(3)] == [False, True, True]
    assert (mixed.for_layer(1).key_bits, mixed.for_layer(1).refine.value) == (4, 0.1)
    three = {"cache.key_bits": 3, "cache.value_bits": 3}
    for fields, said in [
        ({"cache.kv_bits": 8}, "cache.kv_bits 8: codec tailored stores 1, 2, 3, 4; take one of these"),
        ({"cache.key_bits": 4}, "cache.key_bits 4: value_bits are 1, and what words leave over is kept of keys and values"),
        (three | {"cache.scan_bits": 2}, "cache.scan_bits 2: codec tailored scans its words"),
        (three | {"cache.refine": RefineConfig(rule="mass", value=0.9)}, "take rule fraction and scope granule"),
        ({"cache.refine": RefineConfig(value=0.1)}, "all planes are scanned, nothing is left to refine"),
    ]:
        with pytest.raises(ValueError, match=said) as caught:
            build("4bit", tailored | fields)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny Llama of 2 layers, 2 KV heads, D = 16, and a file for it."""
    folder = tiny.save(tmp_path_factory.mktemp("llama"), "llama", seed=3)
    fingerprint = f"{model.load(str(folder), dtype=torch.float32, device=torch.device('cpu')).fingerprint:016x}"
    return folder, calibrations.make(tmp_path_factory.mktemp("files"), fingerprint=fingerprint, layers=2, heads=2, dim=16)


def answer(mesh, folder, cache: CacheConfig) -> tuple:
    loaded = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(loaded, cache, mesh, GenerateConfig(max_new_tokens=8, ignore_eos=True))
    tokens = engine.generate([tiny.prompt(1300), tiny.prompt(530)]).token_ids
    return tokens, engine.cache_digest(), cache_report(engine)["read_bits_per_element"]


@pytest.mark.parametrize("eviction", [{}, {"eviction": "heavy", "eviction_keep": 0.5}])
def test_answers_do_not_depend_on_the_ranks_and_reads_are_those_planned(served, eviction):
    folder, file = served
    cache = CacheConfig("tailored", 3, 3, calibration=file, **SMALL | eviction)
    (wanted,) = simulated.run(1, answer, folder, cache)
    for found in simulated.run(3, answer, folder, cache):
        assert found[:2] == wanted[:2]
    page = packed_page(cache, 2, 16, torch.float32, kv_heads=2)
    assert page.read * 8 / (2 * 2 * P * 16) == pytest.approx(wanted[2], rel=0.03)
    assert page.read < 0.75 * page.stored


def test_drift_sees_what_enters_the_softmax(served):
    """A sound cache is not blamed; what is refined brings attention and outputs nearer to the truth."""
    folder, file = served
    loaded = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    mean = {}
    for bits in (1, 4):
        heads = drift(loaded, CacheConfig("tailored", bits, bits, calibration=file, **SMALL), tiny.prompt(700))
        assert all(head.verdict != "off" for head in heads)
        mean[bits] = [sum(getattr(head, name) for head in heads) / len(heads) for name in ("kl", "output_error")]
    assert all(fine < 0.9 * coarse for fine, coarse in zip(mean[4], mean[1], strict=True)), mean
