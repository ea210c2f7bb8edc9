"""The codec that keeps the earlier loops of a looped model as residuals of the last one."""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path

import commands
import pytest
import ranks
import simulated
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bitkv_dist import model as models
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.looped import LoopedCodec, shares
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.evaluate.trace import trace
from bitkv_dist.fit.straight_through import straight_through
from bitkv_dist.launch import evaluate, generate
from bitkv_dist.plan.memory import Job, every_rank
from bitkv_dist.plan.models import from_config
from bitkv_dist.schedule import LayerConfig
from bitkv_dist.snapshot.folder import find
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save
from bitkv_dist.subtree import SCORES_AT_ONCE

CPU = torch.device("cpu")
WINDOW = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}
LOOPED = CacheConfig("looped", 2, 2, **WINDOW)
EXACT = CacheConfig("exact", 16, 16, **WINDOW)
PROMPTS = [tiny.prompt(length) for length in (1310, 90)]
NEW = 4  # tokens: a page of the first sequence is sealed while it is answered
HEADS = HeadShape(6, 0, 2, 32, torch.float32, group=2, loops=3)  # 2 layers of weights
BENCHMARK = ranks.ROOT / "benchmarks" / "looped.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2 layers of weights in 4 loops."""
    return tiny.save_tokenizer(tiny.contracting(tmp_path_factory.mktemp("ouro"), vocab_size=257))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """2 layers of weights in 2 loops, 2 query heads per KV head: what takes many steps."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "total_ut_steps": 2}
    return tiny.contracting(tmp_path_factory.mktemp("small"), **sizes)


@functools.cache
def served(folder: Path) -> models.ServedModel:
    return models.load(str(folder), dtype=torch.float32, device=CPU)


def run(mesh, folder: Path, cache: CacheConfig = LOOPED, audit: bool = False, **settings) -> tuple[Engine, list[list[int]]]:
    own = served(folder) if mesh.split.parts == 1 else models.load(str(folder), dtype=torch.float32, device=CPU, ranks=mesh)
    engine = Engine(own, cache, mesh, GenerateConfig(**{"max_new_tokens": NEW, "ignore_eos": True} | settings), audit)
    return engine, engine.generate(PROMPTS).token_ids


# ---------------------------------------------------------------------------------------------------------- the codec


def random_pages(seed: int, pages: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """An anchor's keys or values and an earlier loop's, which are about 0.9 of it, fp32 [pages, 2, 64, 32]."""
    generator = torch.Generator().manual_seed(seed)
    anchor, other = torch.randn(2, pages, 2, 64, 32, generator=generator)
    return anchor, 0.9 * anchor + 0.2 * other


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_shares_are_the_least_squares_fit(dim):
    torch.manual_seed(dim)
    x, anchor = torch.randn(2, 5, dim, dtype=torch.float64)
    wanted = torch.stack([torch.linalg.lstsq(a[:, None], b).solution[0] for a, b in zip(anchor, x[..., None], strict=True)])
    torch.testing.assert_close(shares(x.float(), anchor.float()), wanted[:, 0].half(), atol=0, rtol=1e-3)
    assert shares(x.float(), torch.zeros(5, dim)).tolist() == [0.0] * 5
    assert shares(x.float(), torch.full((5, dim), 1e-30)).isfinite().all()


def test_only_the_residual_loses_something():
    """Whatever the anchor's own code has lost: the error of an earlier loop is that of its residual's 2 bits."""
    anchor_codec, codec = (make_codec(LOOPED, HEADS, layer) for layer in (5, 1))
    assert isinstance(anchor_codec, PlanesCodec) and isinstance(codec, LoopedCodec)
    (anchor_k, k), (anchor_v, v) = random_pages(0), random_pages(1)
    anchors = anchor_codec.encode(anchor_k, anchor_v)
    records = codec.encode(k, v, anchors)
    assert records.shape == (3, 2, codec.record_bytes)
    found = codec.decode(torch.cat((records, anchors), -1))
    for x, coded, stored, exact in zip((k, v), found, anchor_codec.decode(anchors), (anchor_k, anchor_v), strict=True):
        left = x - shares(x, stored).float().unsqueeze(-1) * stored
        assert (x - coded).norm() < 0.5 * left.norm()  # 2 bits leave a third of what they code
        assert (x - coded).norm() < (exact - stored).norm() * 1.5  # what 4 bits have lost is in there, and not on top
        plain = make_codec(CacheConfig(key_bits=2, value_bits=2, **WINDOW), HEADS, 1)
        assert (x - coded).norm() < 0.5 * (x - plain.decode(plain.encode(x, x))[0]).norm()


def test_stored_bytes():
    """Of heads of 128 channels, pages of 128: 16 bits a token for its scale, 16 bits a channel for the mean, and of an earlier
    loop 16 bits a token for its share."""
    heads = HeadShape(8, 0, 2, 128, torch.bfloat16, loops=4)
    config = CacheConfig("looped", 2, 2)
    bits = [make_codec(config, heads, layer).record_bytes * 8 / (128 * 128 * 2) for layer in range(8)]
    assert bits == [2.375] * 6 + [4.25] * 2
    assert PackedCache(config, heads, 1).stored_bits_per_element == 2.84375  # 82 % less than bf16


def fed(counts: list[int], prompt: int = 0) -> PackedCache:
    """A cache of 170 tokens, of which `prompt` come by an exact prefill, the others in pieces of `counts`."""
    torch.manual_seed(0)
    kv = torch.randn(2, 1, 2, 170, 32) + 0.3 * torch.randn(6, 2, 1, 2, 170, 32)  # a common part, and that of each layer
    q, cache, start = torch.randn(1, 4, 170, 32), PackedCache(LOOPED, HEADS, 1), prompt
    for index, layer in enumerate(cache.layers if prompt else ()):
        layer.begin_prompt(0, prompt)
        cache.step = Step([0], round=[(0, 0, prompt)])
        cache.update(*kv[index, :, :, :, :prompt], index)
        layer.attend(q[:, :, :prompt], 0.1)
        layer.finish_prompt(0)
    for count in counts:
        cache.step, part = Step([0], decode=count == 1), slice(start, start + count)
        for index, layer in enumerate(cache.layers):
            cache.update(*kv[index, :, :, :, part], index)
            assert layer.attend(q[:, :, part], 0.1).isfinite().all()
        start += count
    return cache


def test_any_feeding_gives_the_same_bytes():
    """Decode steps, chunks, an exact prefill, and mixtures of them; nothing stays behind in a loop."""
    wanted = fed([60, *[1] * 110])
    assert len(wanted.page_digests()) == 6 * 2 and wanted.sealed_tokens(0) == 64
    for counts, prompt in (([170], 0), ([57, *[1] * 13, 100], 0), ([], 170), ([1] * 20, 150), ([64, 64, 42], 0)):
        cache = fed(counts, prompt)
        assert cache.page_digests() == wanted.page_digests()
        for layer, other in zip(cache.layers, wanted.layers, strict=True):
            assert torch.equal(layer.states[0].rows(), other.states[0].rows())
            assert not layer.chunks and not layer.pages


def test_what_is_not_finite_is_named():
    """By the loop and the token, when the page is sealed."""
    cache, kv = PackedCache(LOOPED, HEADS, 1), torch.ones(2, 1, 2, 170, 32)
    spoilt = kv.clone()
    spoilt[1, 0, 0, 77] = float("nan")
    cache.step = Step([0])
    with pytest.raises(FloatingPointError, match="layer 2, token 77: value is not finite"):
        for index, layer in enumerate(cache.layers):
            cache.update(*(spoilt if index == 2 else kv), index)
            layer.attend(torch.ones(1, 4, 170, 32), 0.1)


def test_a_long_decode_rebuilds_no_more_than_a_block():
    layer = PackedCache(LOOPED, HEADS, 1).layers[0]
    assert layer.granules_at_once((2, 1, 2)) * 512 * 2 * 2 * 32 <= SCORES_AT_ONCE


# ---------------------------------------------------------------------------------------------------- what it is worth


def test_near_exact_at_a_fifth_of_the_bytes_and_better_than_int2_at_equal_bytes(folder):
    """KL, largest change of a logit, and attention outputs of every earlier loop, every query on sealed keys."""
    benchmark = runpy.run_path(str(BENCHMARK))
    ids = tiny.prompt(384)
    rows = {row["cache"]: row for row in benchmark["predictions"](served(folder), WINDOW, ids, 192, 384)}
    errors = benchmark["outputs"](served(folder), WINDOW, ids)
    print(*(f"{name}: {row['stored_bits']} bits, KL {row['kl']:.6f}" for name, row in rows.items()), sep="\n")  # pytest -s
    ours, plain, fine = rows["looped"], rows["int2"], rows["int2, 16 channels a scale"]
    assert ours["saved"] >= 0.75
    assert ours["kl"] < 1e-3 and ours["largest_logit_change"] < 0.02 * ours["logit_range"]
    assert plain["stored_bits"] < ours["stored_bits"] < fine["stored_bits"]
    for other in ("int2", "int2, last loop int4", "int2, 16 channels a scale"):
        assert ours["kl"] < 0.5 * rows[other]["kl"]
        assert all(ours < theirs for ours, theirs in zip(errors["looped"], errors[other], strict=True) if ours != theirs)


# -------------------------------------------------------------------------------------------------- through the engine


def answer(mesh, place: Path, prefill: str = "exact"):
    """Tokens and digests of a run whose ranks also encode each other's pages."""
    engine, tokens = run(mesh, place, audit=True, prefill=prefill)
    return tokens, engine.cache_digest(), engine.page_digests()


@pytest.mark.parametrize(("prefill", "sizes"), [("exact", (2, 3)), ("packed", (2,))])
def test_one_answer_whatever_the_ranks(small, prefill, sizes):
    (wanted,) = simulated.run(1, answer, small, prefill)
    for size in sizes:
        assert simulated.run(size, answer, small, prefill) == [wanted] * size


@pytest.mark.slow
def test_one_answer_of_real_ranks(small):
    (wanted,) = simulated.run(1, answer, small)
    assert ranks.run_ranks(2, answer, small) == [wanted] * 2


def test_sealed_bytes_stay_as_they_are(small):
    def ours(mesh):
        engine, _ = run(mesh, small)
        before = engine.page_digests()
        engine.generate([tiny.prompt(100, seed=seed) for seed in range(2)], keep=True)
        return before, engine.page_digests()

    ((before, after),) = simulated.run(1, ours)
    assert len(after) > len(before) and before.items() <= after.items()


def test_tensor_parallel_ranks_give_the_same_tokens(small):
    ((_, wanted),) = simulated.run(1, run, small, EXACT)
    for _, tokens in simulated.run(2, run, small, EXACT, tp=2):
        assert tokens == wanted


def test_a_snapshot_goes_on_at_another_number_of_ranks(small, tmp_path):
    def saved(mesh):
        engine = Engine(served(small), LOOPED, mesh, GenerateConfig(max_new_tokens=NEW, ignore_eos=True))
        result = engine.generate(PROMPTS, on_filled=lambda logits: save(engine, tmp_path / "kv", logits))
        return result.token_ids, engine.cache_digest()

    def loaded(mesh):
        engine = Engine(served(small), LOOPED, mesh, GenerateConfig(max_new_tokens=NEW, ignore_eos=True))
        place = find(tmp_path / "kv")
        start = load(engine, place, Manifest.read(place))
        return engine.generate(list(map(list, engine.histories)), fill=start.fill).token_ids, engine.cache_digest()

    wanted = simulated.run(2, saved)[0]
    assert simulated.run(1, loaded) + simulated.run(3, loaded) == [wanted] * 4


@pytest.mark.parametrize("size", [1, 2])
def test_planned_bytes_are_those_of_a_run(small, size):
    def ours(mesh):
        cache = run(mesh, small)[0].cache
        states = [state for layer in cache.layers for state in layer.states]
        bits = cache.reads.bits / cache.reads.elements
        return sum(state.sealed.bytes for state in states), sum(state.exact.nbytes for state in states), bits

    shape = from_config("tiny", AutoConfig.from_pretrained(small), 32, 4096)
    job = Job(shape, LOOPED, 1310 + NEW, len(PROMPTS), torch.float32)
    planned = every_rank(job, 1, size)
    for (sealed, exact, bits), plan in zip(simulated.run(size, ours), planned, strict=True):
        assert sealed <= plan.cache and exact == plan.exact  # the plan takes all sequences for as long as the longest
        assert job.page_bytes.read * 8 / (2 * 64 * 32 * 4) == pytest.approx(bits, rel=0.02)
    held = 2 * 1310 * 2 * 2 * 32 * 4  # keys and values, 2 heads, of the two layers of the earlier loop
    alone = [every_rank(Job(shape, cache, 1310, 1, torch.float32), 1, 1)[0].prefill_peak for cache in (EXACT, LOOPED)]
    assert alone[1] - alone[0] == held


# ------------------------------------------------------------------------------------------------- the command lines


def test_generate_with_the_preset(folder, tmp_path):
    (tmp_path / "prompt").write_text("a looped model reads this. " * 40)
    prompt = ["--prompt-file", str(tmp_path / "prompt"), "--max-new-tokens", "4", "--ignore-eos", "--device", "cpu"]
    commands.call(generate, "--model", folder, "--config", "looped", "--json", tmp_path / "report", *prompt)
    report = json.loads((tmp_path / "report").read_text())
    assert report["kv"]["codec"] == "looped" and report["kv"]["ratio"] > 5
    assert report["kv"]["sealed_tokens"] > 0 and report["kv"]["read_bits_per_element"] > report["kv"]["stored_bits_per_element"]
    assert "codec looped is attended to in plain torch" in report["kernel"]["reason"]


def test_evaluate_beside_other_codecs(folder, tmp_path):
    text = str(ranks.ROOT / "tests" / "data" / "tale.txt")
    asked = ["--text", text, "--positions", "256:384", "--compare", "exact,looped,2bit", "--json", str(tmp_path / "found")]
    window = ["--page-tokens", "64", "--sink-tokens", "64", "--recent-tokens", "64", "--device", "cpu"]
    commands.call(evaluate, "--model", folder, "--task", "ppl", *asked, *window)
    kl = {row["codec"]: row["kl"] for row in json.loads((tmp_path / "found").read_text())["rows"]}
    assert 0 == kl["exact"] < kl["looped"] < kl["2bit"]


def test_a_model_without_loops_is_refused(tmp_path):
    asked = ["--model", str(tiny.save(tmp_path)), "--config", "looped", "--prompt", "a", "--device", "cpu"]
    rule = "the model runs its layers once, so that no loop can be the anchor of others"
    with pytest.raises(ValueError, match=f"cache.codec 'looped': {rule}; take a model that loops"):
        generate.main(asked)


def test_what_looks_at_layers_one_by_one_is_refused(folder):
    with pytest.raises(ValueError, match=r"cache\.codec 'looped': seals a page of all loops at once"):
        trace(served(folder), LOOPED, tiny.prompt(300), lambda _: None)
    module = AutoModelForCausalLM.from_pretrained(folder)
    numbers = pytest.raises(ValueError, match="total_ut_steps 4: a training forward does not number its loops")
    with numbers, straight_through(module, LOOPED):
        pass
    with pytest.raises(ValueError, match=r"cache\.layers .*: codec looped keeps the layers of all loops alike"):
        CacheConfig("looped", 2, 2, layers=(LayerConfig((0,), key_bits=2),))
