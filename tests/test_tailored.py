"""Codecs of calibrated codebooks: bytes of a page, what they stand for, attention over them, and who may read which file."""

import math
from dataclasses import replace
from pathlib import Path

import calibrations
import pytest
import simulated
import tiny
import torch
from transformers import AutoModelForCausalLM

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.config import GenerateConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.fit.straight_through import straight_through
from bitkv_dist.kernels import dispatch
from bitkv_dist.plan.memory import Job, packed_page, rank_bytes
from bitkv_dist.plan.models import MODELS

HEADS, DIM = 2, 32
BITS = {"tailored": 1, "residual": 2}
SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrations")
    made = {codec: calibrations.make(folder, codec, heads=HEADS, dim=DIM) for codec in BITS}
    forms = ("unweighted", "threshold")
    return made | {form: calibrations.make(folder, "tailored", form, heads=HEADS, dim=DIM) for form in forms}


def config_of(path: str, codec: str = "tailored", **fields) -> CacheConfig:
    return CacheConfig(codec, BITS[codec], BITS[codec], calibration=path, **SMALL | fields)


def codec_of(path: str, codec: str = "tailored", heads: int = HEADS, dim: int = DIM, **fields):
    return make_codec(config_of(path, codec, **fields), HeadShape(1, 0, heads, dim, torch.float32), 0)


CASES = pytest.mark.parametrize("name", ["tailored", "threshold", "residual"])


def named(files: dict, name: str, **fields):
    return codec_of(files[name], "residual" if name == "residual" else "tailored", **fields)


@CASES
def test_pages_come_back_close_and_alone(files, name):
    """Other vectors of the kind that the books were fitted to; a page's bytes do not depend on its batch, but on its place."""
    codec = named(files, name)
    k, v = calibrations.keys(HEADS, 6, DIM, seed=500)
    records = codec.encode(k, v, range(6))
    most = {"tailored": 0.25, "threshold": 0.5, "residual": 0.15}[name]
    for found, x in zip(codec.decode(records), (k, v), strict=True):
        centred = x - x.mean((0, 2), keepdim=True)
        assert 1e-4 < (found - x).square().sum() / centred.square().sum() < most
    alone = torch.cat([codec.encode(k[i : i + 1].clone(), v[i : i + 1].clone(), [i]) for i in range(6)])
    assert torch.equal(records, alone)
    assert not torch.equal(codec.encode(k[:1], v[:1], [4]), records[:1])


def test_fewer_levels_lose_more(files):
    k, v = calibrations.keys(HEADS, 6, DIM, seed=500)
    lost = {}
    for name in ("tailored", "threshold"):
        codec = named(files, name)
        found = codec.decode(codec.encode(k, v, range(6)))
        lost[name] = sum((a - b).square().sum() for a, b in zip(found, (k, v), strict=True))
    assert lost["tailored"] < 0.7 * lost["threshold"]


def test_bytes_of_a_record(files):
    """Words of 10 bits for 8 channels, each token's scale once for both heads, and the page's number."""
    codec = named(files, "tailored")
    assert codec.record_bytes == 16 + 2 * DIM // 8 * 10 * 64 // 8 + 64 * 2 // HEADS
    assert named(files, "threshold").record_bytes == 16 + 2 * DIM * 64 // 8 + 64 * 2 // HEADS
    assert named(files, "residual").record_bytes == 16 + 2 * DIM * 2 * 64 // 8
    words, channels = 2 * HEADS * DIM // 8 * (1024 * 8 * 2 + 4 + 8), 2 * HEADS * DIM * (2 + 2 * 4)
    learnt = words + channels + HEADS * DIM * (2 * 8 + 2 * 4)  # keys: both ways, what is lost, correction
    compiled = dispatch.native(torch.device("cpu")) is not None
    assert codec.book_bytes == learnt + compiled * 2 * HEADS * DIM * (4 + 4)  # what the kernels know of a channel


def test_the_scale_is_that_of_all_heads(files):
    codec = named(files, "tailored")
    k, v = calibrations.keys(HEADS, 2, DIM, seed=9)
    weight = codec.books["K"].weight
    weighted = codec.rope.undo(k, torch.arange(2)) * weight
    wanted = weighted.square().mean((1, 3)).sqrt()
    torch.testing.assert_close(codec.scales(codec.encode(k, v, [0, 1]))[:, 0], wanted, rtol=1e-3, atol=0)


def test_a_rank_with_some_of_the_heads_stores_the_same(files):
    """Tensor parallelism, which only the codec without a common scale is served with."""
    k, v = calibrations.keys(HEADS, 2, DIM, seed=9)
    whole = named(files, "residual")
    part = make_codec(config_of(files["residual"], "residual"), HeadShape(1, 1, 1, DIM, torch.float32, fingerprint="0" * 16), 0)
    records = part.encode(k[:, 1:], v[:, 1:], [0, 1])
    assert torch.equal(records, whole.encode(k, v, [0, 1])[:, 1:])
    assert torch.equal(part.decode(records)[0], whole.decode(whole.encode(k, v, [0, 1]))[0][:, 1:])
    assert part.book_bytes == whole.book_bytes / HEADS


@CASES
@pytest.mark.parametrize("value", [0.0, 2.0, 1e-30, 40_000.0])
def test_odd_pages_stay_finite(files, name, value):
    codec = named(files, name)
    x = torch.full((1, HEADS, 64, DIM), value)
    records = codec.encode(x, x, [3])
    assert torch.equal(records, codec.encode(x.clone(), x.clone(), [3]))
    assert all(torch.isfinite(found).all() for found in codec.decode(records))


@CASES
@pytest.mark.parametrize("correction", [True, False])
def test_attention_is_that_over_the_decoded_pages(files, name, correction):
    codec = named(files, name, correction=correction)
    k, v = calibrations.keys(HEADS, 8, DIM, seed=3)
    records = codec.encode(k, v, range(8)).unflatten(0, (2, 4))
    valid = torch.tensor([[False, True, True, True], [True, True, False, False]])
    q = torch.randn(HEADS, 3, 2, DIM, generator=torch.Generator().manual_seed(0)) * DIM**-0.5 * math.log2(math.e)
    partial, reads = codec.attend(codec.prepare(q), records, valid)
    assert (reads.scanned, reads.bits) == (5 * 64 * HEADS * 3, 5 * HEADS * 3 * codec.record_bytes * 8)
    keys, values = codec.decode(records)
    lost = codec.correction[:, 0, 0] if correction else torch.zeros(HEADS, DIM)
    gain = (q.square() * lost[:, None, None]).sum(-1, keepdim=True)  # base 2, times the squared scale of a token
    scales = codec.scales(records).expand(2, 4, HEADS, 64)
    for granule in range(2):
        seen = valid[granule]
        k_seen, v_seen = (x[granule, seen].transpose(0, 1).flatten(1, 2).double() for x in (keys, values))
        square = scales[granule, seen].transpose(0, 1).flatten(1).square()[:, None, None]
        scores = torch.einsum("hqgd,htd->hqgt", q.double(), k_seen) + (gain * square).double()
        wanted = torch.einsum("hqgt,htd->hqgd", (scores * math.log(2)).softmax(-1), v_seen)
        torch.testing.assert_close(codec.finish(partial.rows(granule)).normalised().double(), wanted, atol=2e-4, rtol=0)
        torch.testing.assert_close(
            partial.rows(granule).log_sum_exp().double(), (scores * math.log(2)).logsumexp(-1), atol=1e-4, rtol=0
        )


def test_the_correction_is_half_the_variance_of_a_score(files):
    """Over tokens like those of the calibration: the mean of exp2(true score) is met, where bare scores fall short of it."""
    codec = named(files, "tailored")
    k, v = calibrations.keys(HEADS, 32, DIM, seed=800)
    records = codec.encode(k, v, range(32))
    found, _ = codec.decode(records)
    q = torch.randn(HEADS, 1, 64, DIM, generator=torch.Generator().manual_seed(1)) * 0.4
    error = torch.einsum("hqgd,phtd->hgpt", q, k - found)  # what the score misses, base 2
    variance = error.square().mean((2, 3))
    due = 0.5 * math.log(2) * variance
    square = codec.scales(records).square().mean()
    applied = (q.square() * codec.correction).sum(-1)[:, 0] * square
    assert (applied / due).log().abs().mean() < 0.35


# -------------------------------------------------------------------------------------- one answer, whatever the ranks


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny Llama of 2 layers, 2 KV heads, D = 16, and files for it: the fingerprint is its own, the books are made up."""
    folder = tiny.save(tmp_path_factory.mktemp("llama"), "llama", seed=3)
    fingerprint = f"{model.load(str(folder), dtype=torch.float32, device=torch.device('cpu')).fingerprint:016x}"
    place = tmp_path_factory.mktemp("files")
    sizes = {"layers": 2, "heads": 2, "dim": 16}
    return folder, {codec: calibrations.make(place, codec, fingerprint=fingerprint, **sizes) for codec in BITS}


def answer(mesh, folder, caches: list[CacheConfig], generate: dict) -> list[tuple]:
    loaded = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    found = []
    for cache in caches:
        engine = Engine(loaded, cache, mesh, GenerateConfig(**{"max_new_tokens": 8, "ignore_eos": True} | generate))
        tokens = engine.generate([tiny.prompt(1300), tiny.prompt(530)]).token_ids
        found.append((tokens, engine.cache_digest(), engine.cache.bytes - engine.cache.book_bytes))
    return found


def test_answers_and_bytes_do_not_depend_on_the_ranks(served):
    folder, files = served
    caches = [config_of(path, codec) for codec, path in files.items()]
    wanted = simulated.run(1, answer, folder, caches, {})[0]
    for everyone in simulated.run(3, answer, folder, caches, {}):
        assert [found[:2] for found in everyone] == [found[:2] for found in wanted]
    packed = simulated.run(2, answer, folder, caches, {"prefill": "packed", "chunk": 128})
    assert packed[0][0][:2] == packed[1][0][:2]


def test_another_models_file_is_refused(served, files):
    folder, _ = served
    loaded = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    heads = HeadShape(1, 0, 2, 16, torch.float32, fingerprint=f"{loaded.fingerprint:016x}")
    with pytest.raises(ValueError, match=r"was made for made-up with fingerprint 0{16}, this model's is .*; calibrate"):
        make_codec(config_of(files["tailored"]), heads, 0)
    for other in (HeadShape(1, 0, 1, DIM, torch.float32), HeadShape(1, 1, 2, DIM, torch.float32, fingerprint="0" * 16)):
        with pytest.raises(ValueError, match=r"cache\.calibration '.*': was made for 2 KV heads; calibrate with this model"):
            make_codec(config_of(files["residual"], "residual"), other, 0)
    with pytest.raises(ValueError, match=r"made-up, whose layers are 1; this model's are 2; calibrate with this model"):
        config_of(files["tailored"]).check_model(2, DIM)
    with pytest.raises(ValueError, match=r"whose head_dim are 32; this model's are 64"):
        config_of(files["tailored"]).check_model(1, 64)
    with pytest.raises(ValueError, match=r"whose kv_heads are 2; this model's are 4; calibrate with this model"):
        config_of(files["tailored"]).check_model(1, DIM, kv_heads=4)
    config_of(files["tailored"]).check_model(1, DIM, kv_heads=2)


def test_training_takes_the_file_of_its_model_alone(served):
    folder, files = served
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tiny.prompt(256)])
    with torch.no_grad(), straight_through(module, config_of(files["residual"], "residual")):
        assert torch.isfinite(module(ids, use_cache=False).logits).all()
    module.lm_head.weight.data += 1
    refused = pytest.raises(ValueError, match=r"with fingerprint .*, this model's is .*; calibrate with this model")
    with refused, straight_through(module, config_of(files["residual"], "residual")):
        pass


# ---------------------------------------------------------------------------------------------------- configuration


def refusal(overrides: dict) -> str:
    with pytest.raises(ValueError) as caught:
        build("4bit", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_configuration_refuses(files, tmp_path):
    tailored = {"cache.codec": "tailored", "cache.calibration": files["tailored"]}
    assert "cache.calibration None: codec residual needs a file of codebooks; make one with bitkv calibrate" in refusal(
        {"cache.codec": "residual"}
    )
    assert "only codec tailored, residual reads it" in refusal({"cache.calibration": files["tailored"]})
    assert "holds codebooks of codec residual, not tailored; set codec: residual" in refusal(
        tailored | {"cache.calibration": files["residual"]}
    )
    assert "cannot be read (No such file or directory)" in refusal(tailored | {"cache.calibration": str(tmp_path / "no")})
    assert "parallel.tp 2" in (message := refusal(tailored | {"parallel.tp": 2})) and "take tp 1 and sp 2" in message
    assert "cache.key_bits 8: codec tailored stores 1, 2, 3, 4" in refusal(tailored | {"cache.key_bits": 8})
    digest = build("tiered4", tailored).cache.calibration_digest
    assert len(digest) == 16
    assert "calibration_digest 'x': the file has" in refusal(tailored | {"cache.calibration_digest": "x"})


def test_a_configuration_is_known_by_the_content_of_its_file(files, tmp_path):
    other = tmp_path / "elsewhere.safetensors"
    other.write_bytes(Path(files["tailored"]).read_bytes())
    assert config_of(files["tailored"]).identity() == config_of(str(other)).identity()
    assert config_of(files["tailored"]).identity() != config_of(files["unweighted"]).identity()


def test_a_plan_counts_the_books(served):
    _, files = served
    config = config_of(files["tailored"])
    page = packed_page(config, 2, 16, torch.float32, kv_heads=2)
    codec = make_codec(config, HeadShape(2, 0, 2, 16, torch.float32), 1)
    assert (page.stored, page.read, page.books) == (2 * codec.record_bytes, 2 * codec.record_bytes, 2 * codec.book_bytes)
    job = Job(MODELS["smollm2-135m"], config, 4096, page=page)
    assert rank_bytes(job, 1, 1).total - rank_bytes(job, 1, 1).books == sum(
        getattr(rank_bytes(job, 1, 1), part) for part in ("weights", "cache", "exact", "prefill_peak")
    )
    shape = replace(job.shape, heads=12, kv_heads=4)
    whole = rank_bytes(Job(shape, config, 4096, page=page), 1, 1).books
    shares = [rank_bytes(Job(shape, config, 4096, page=page), tp, 1).books / whole for tp in (2, 4, 12)]
    assert shares == [1 / 2, 1 / 4, 1 / 4]  # beyond a rank for each KV head the ranks hold copies
