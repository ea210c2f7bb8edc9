"""Perplexity: the numbers of the exact cache are those of the model, and those of a packed one what its own logits give."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

from bitkv_dist import model as models
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import build
from bitkv_dist.evaluate.perplexity import compare, exact_like, head_shape, perplexity
from bitkv_dist.prefill import packed_chunks
from bitkv_dist.text import encode_prompt

IDS = tiny.prompt(600)
FIRST, LAST = 301, 550  # neither at a page's edge
WINDOW = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 64}
EXACT = CacheConfig("exact", 16, 16, **WINDOW)
BITS = {f"{bits}": CacheConfig(key_bits=bits, value_bits=bits, **WINDOW) for bits in (1, 2, 4)}
HANDBOOK = Path(__file__).parent / "data" / "handbook.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("model"), head_dim=64))


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder, dtype=None, device=torch.device("cpu"))


def logits_of(model, config: CacheConfig) -> torch.Tensor:
    """fp64 log-probabilities [LAST - 1, vocab] of a walk of its own."""
    with torch.inference_mode():
        cache = PackedCache(config, head_shape(model), 1)
        chunks = list(packed_chunks(model, cache, Step([0]), IDS[: LAST - 1], config.page_tokens))
        return torch.log_softmax(model.head(torch.cat(chunks, 1)[0]).double(), -1)


def test_exact_is_what_the_model_says(folder, model):
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([IDS[:LAST]])).logits[0, FIRST - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[FIRST:LAST])).item()
    assert perplexity(model, EXACT, IDS, FIRST, LAST) == pytest.approx(math.exp(loss), rel=1e-4)


def test_numbers_of_a_packed_cache(model):
    score = compare(model, {"exact": EXACT} | BITS, IDS, FIRST, LAST)
    targets = torch.tensor(IDS[FIRST:LAST])
    exact = logits_of(model, EXACT)[FIRST - 1 :]
    for name, config in BITS.items():
        found = logits_of(model, config)[FIRST - 1 :]
        assert score[name].tokens == LAST - FIRST
        assert score[name].nll == pytest.approx(-found.gather(1, targets[:, None]).sum().item(), rel=1e-5)
        kl = torch.nn.functional.kl_div(found, exact, log_target=True, reduction="sum").item()
        assert score[name].kl == pytest.approx(kl, rel=1e-3)
        assert score[name].top1 == int((found.argmax(1) == exact.argmax(1)).sum())
    assert score["1"].kl > score["2"].kl > score["4"].kl > score["exact"].kl == 0
    assert score["exact"].top1 == score["exact"].tokens == LAST - FIRST


def test_columns_do_not_disturb_each_other(model):
    together = compare(model, BITS, IDS, FIRST, LAST)
    for name, config in BITS.items():
        assert compare(model, {name: config}, IDS, FIRST, LAST)[name] == together[name]


def test_two_spans_make_the_whole(model):
    parts = [compare(model, BITS, IDS, *span)["2"] for span in ((FIRST, 448), (448, LAST))]
    whole = compare(model, BITS, IDS, FIRST, LAST)["2"]
    assert sum(part.nll for part in parts) == pytest.approx(whole.nll, rel=1e-6)
    assert sum(part.kl for part in parts) == pytest.approx(whole.kl, rel=1e-5)


def test_before_a_page_is_sealed_nothing_differs(model):
    """The first page behind the sink (64) is sealed when 192 tokens are there: the token after them is the first to differ."""
    config = {"1": BITS["1"]}
    assert compare(model, config, IDS, 1, 192)["1"].kl == pytest.approx(0, abs=1e-5)
    assert compare(model, config, IDS, 1, 194)["1"].kl > 1e-5


def test_bits_of_a_column(model):
    tiered = replace(BITS["4"], scan_bits=1)
    score = compare(model, {"exact": EXACT, "2": BITS["2"], "tiered": tiered}, IDS, FIRST, LAST)
    dim, page = 64, 64
    assert score["exact"].stored_bits == score["exact"].read_bits == 32  # the model's dtype here
    assert score["2"].stored_bits == score["2"].read_bits == 2 + 16 / dim + 16 / page
    assert score["tiered"].stored_bits == 4 + 2 * 16 / dim + 16 / page
    share = score["tiered"].refined_share
    assert 0.05 <= share < 0.07  # 5 % of each granule, rounded up
    assert score["tiered"].read_bits == pytest.approx(1 + 16 / dim + 16 / page + share * (3 + 16 / dim))
    assert score["2"].refined_share == score["exact"].refined_share == 0


def test_row(model):
    score = compare(model, {"exact": EXACT, "2": BITS["2"]}, IDS, FIRST, LAST)
    row = score["2"].row("2bit", "book.txt", score["exact"])
    assert list(row) == [
        *("codec", "text", "tokens", "ppl", "ppl_ratio", "kl", "top1"),
        *("stored_bits", "read_bits", "ratio", "refined_share", "kept_share"),
    ]
    assert (row["codec"], row["text"], row["tokens"]) == ("2bit", "book.txt", LAST - FIRST)
    assert row["ppl_ratio"] == row["ppl"] / score["exact"].perplexity and row["ratio"] == 16 / row["stored_bits"]
    assert row["kl"] == score["2"].kl / row["tokens"] and row["top1"] == score["2"].top1 / row["tokens"]


def test_progress_goes_to_the_end(model):
    seen = []
    compare(model, BITS, IDS, FIRST, LAST, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (LAST - 1, LAST - 1) and [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("span", "part"),
    [
        ((0, 10), "positions 0:10: must be A:B with 1 <= A < B"),
        ((10, 10), "positions 10:10: must be A:B"),
        ((10, 601), "positions 10:601: the text has 600 tokens; give a longer text or an end up to 600"),
    ],
)
def test_refusals(model, span, part):
    with pytest.raises(ValueError) as caught:
        compare(model, BITS, IDS, *span)
    assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"positions 1:4097: .* has 4096 positions"):
        compare(model, BITS, IDS * 10, 1, 4097)


def test_smollm2():
    """The promise of the packed cache on a real model: a page of technical prose, every query attending to sealed keys."""
    model = models.load("smollm2-135m", dtype=None, device=torch.device("cpu"))
    ids = encode_prompt(model.tokenizer, HANDBOOK.read_text())
    caches = {name: build(name, {}).cache for name in ("2bit", "4bit")}
    score = compare(model, {"exact": exact_like(caches["2bit"])} | caches, ids, 256, 1280)
    exact = score["exact"].perplexity
    assert score["2bit"].perplexity / exact == pytest.approx(1, abs=0.06)
    assert score["4bit"].perplexity / exact == pytest.approx(1, abs=0.01)
    assert score["4bit"].kl < score["2bit"].kl / 5


@pytest.mark.slow
def test_smollm2_all_presets():
    model = models.load("smollm2-135m", dtype=None, device=torch.device("cpu"))
    ids = encode_prompt(model.tokenizer, HANDBOOK.read_text())
    names = ("exact", "minmax2", "4bit", "2bit", "1bit", "tiered2", "tiered4", "tiered4-2")
    caches = {name: build(name, {}).cache for name in names}
    score = compare(model, caches, ids, 1024, 3072)
    ratio = {name: found.perplexity / score["exact"].perplexity for name, found in score.items()}
    limits = {"4bit": 1.007, "2bit": 1.07, "1bit": 1.45, "tiered2": 1.2, "tiered4": 1.01, "tiered4-2": 1.005}
    assert {name: ratio[name] for name in limits if ratio[name] > limits[name]} == {}
    assert score["tiered4"].read_bits <= 1.7 and score["tiered4"].kl / score["tiered4"].tokens <= 0.03
    assert all(ratio[name] < ratio["minmax2"] for name in ("4bit", "2bit", "tiered2", "tiered4", "tiered4-2"))
