"""The parts of benchmarks/planted_key.py: a background like its model, a key planted at its margin, and who loses it."""

from __future__ import annotations

import math
import runpy
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from ranks import ROOT

PARTS = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "planted_key.py")))
DIM, KV_HEADS, GROUP, QUERIES = 64, 2, 2, 2


@pytest.fixture(scope="module")
def heads():
    """Keys with channels of different spread, and means away from zero, as captured ones have."""
    torch.manual_seed(0)
    spread = torch.linspace(0.2, 3, DIM)
    means = 2 * torch.randn(2, 6, KV_HEADS, DIM)
    residuals = torch.randn(2, 768, KV_HEADS, DIM) * spread
    roots = torch.diag(spread).expand(2, KV_HEADS, DIM, DIM)
    return PARTS.Heads(0.2 * torch.randn(KV_HEADS, QUERIES, GROUP, DIM), means, residuals, roots)


@pytest.fixture(scope="module")
def rows(heads):
    asked = Namespace(presets=["exact", "4bit", "tiered4", "1bit"], contexts=[1024, 4096], seed=3)
    with torch.inference_mode():
        found = PARTS.cases(heads, 0, asked)
    return {(name, tokens): PARTS.summary(found, name, tokens) for name in asked.presets for tokens in asked.contexts}


def test_the_background_is_drawn_once_and_has_the_heads_moments(heads):
    blocks = torch.stack([PARTS.background(heads, 3, granule) for granule in range(64)])
    assert torch.equal(blocks[5], PARTS.background(heads, 3, 5)) and not torch.equal(blocks[5], PARTS.background(heads, 4, 5))
    keys = blocks[:, 0].transpose(2, 3).flatten(0, 2)  # [tokens, HK, D] after flattening granules, pages and tokens
    residuals = blocks[:, 0] - blocks[:, 0].mean(3, keepdim=True)
    assert torch.allclose(residuals.std((0, 1, 3)), heads.residuals[0].std(0), rtol=0.1)
    assert torch.allclose(keys.mean(0), heads.means[0].mean(0), atol=0.6)


def test_a_planted_key_has_its_exact_weight_and_nothing_else_moves(heads):
    plain = PARTS.background(heads, 3, 1)
    mass = torch.full((KV_HEADS,), 20.0, dtype=torch.float64)
    query = heads.queries[:, 1, 0]
    granules = PARTS.planted(heads, 3, 1, 200, query, mass)
    scores = (granules[:, 0, 1, :, 200 - 128] * query).sum(-1)
    assert torch.allclose(scores.double(), mass + torch.tensor(PARTS.MARGINS).double()[:, None] / math.log(2), atol=1e-4)
    granules[:, 0, 1, :, 200 - 128] = plain[0, 1, :, 200 - 128]
    assert torch.equal(granules, plain.expand_as(granules))


def test_exact_loses_nothing_and_fewer_bits_lose_more(rows):
    for tokens in (1024, 4096):
        exact, four, tiered, one = (rows[name, tokens] for name in ("exact", "4bit", "tiered4", "1bit"))
        assert exact["fails_at"] is None and exact["error"] == [0, 0, 0] and exact["cases"] == KV_HEADS * QUERIES * GROUP
        assert four["fails_at"] is None and abs(four["error"][1]) < 0.5
        # One bit keeps 2 / pi of a score's distance to its page's mean; four bits, scanned or refined, all of it.
        assert one["fails_at"] >= 2 and one["error"][1] < -2 and abs(tiered["error"][1]) < 0.5
        assert abs(four["background"][0]) < 0.1 and exact["background"] == [0, 0, 0]


def test_changed_presets():
    shape = PARTS.HeadShape(1, 0, KV_HEADS, DIM, torch.float32)
    codec, config = PARTS.codec_of("tiered4:refine.value=0.1:tail_correction=0.5", shape, 0)
    assert config.refine.value == 0.1 and codec.correction_share == 0.5
    assert PARTS.codec_of("tiered4", shape, 0)[0].correction_share == 0.75
