"""Grids TP x SP in both layouts give the tokens of one rank, and at one TP the same bits for every SP (C31, C30, C22)."""

from __future__ import annotations

import pytest
import simulated
import torch
from ranks import run_ranks
from tiny import prompt, save

from bitkv_dist import model as models
from bitkv_dist.config import CacheConfig, GenerateConfig
from bitkv_dist.engine import Engine

PROMPTS = [prompt(600), prompt(3)]
CACHE = CacheConfig(key_bits=4, value_bits=4, scan_bits=1, page_tokens=64, sink_tokens=64, recent_tokens=64)
NEW = 6


class RecordingEngine(Engine):
    """Keeps the logits that every choice was made from."""

    def __init__(self, *args) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(*args)

    def choose(self, logits, live, result, on_token):
        self.logits.append(logits.clone())
        return super().choose(logits, live, result, on_token)


def answers(mesh, folder: str, **generate) -> dict:
    """Greedy tokens and their logits, tokens drawn with noise on this rank's logits, and the digest of the sealed bytes."""
    model = models.load(folder, dtype=torch.float32, device=mesh.world.device, ranks=mesh)
    engine = RecordingEngine(model, CACHE, mesh, GenerateConfig(max_new_tokens=NEW, **generate))
    greedy, digest = engine.generate(PROMPTS).token_ids, engine.cache_digest()
    logits = torch.stack(engine.logits)
    engine = Engine(model, CACHE, mesh, GenerateConfig(max_new_tokens=8, temperature=1.0))
    head = model.head
    model.head = lambda hidden: head(hidden) + 0.01 * mesh.world.rank * torch.randn(len(hidden), 256)
    return {"greedy": greedy, "digest": digest, "logits": logits, "drawn": engine.generate(PROMPTS).token_ids}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 100}
    return str(save(tmp_path_factory.mktemp("model"), **sizes))


@pytest.fixture(scope="module")
def one_rank(folder):
    return simulated.run(1, answers, folder)[0]


def check(everyone: list[dict], one: dict) -> None:
    """All ranks have the same bits, and the tokens of one rank."""
    for rank in everyone:
        assert rank["greedy"] == one["greedy"] and rank["drawn"] == everyone[0]["drawn"]
        assert torch.equal(rank["logits"], everyone[0]["logits"]) and rank["digest"] == everyone[0]["digest"]
    torch.testing.assert_close(everyone[0]["logits"], one["logits"], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("size", "tp"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_grids_of_real_ranks(folder, one_rank, size, tp):
    """No sampling seed, and another noise on every rank's logits: what rank 0 draws is what all feed."""
    check(run_ranks(size, answers, folder, tp=tp), one_rank)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sp", [1, 2, 3])
def test_replicated_grids(folder, one_rank, tp, sp):
    """More TP ranks than the 2 KV heads keep copies of them. At one TP no number of SP ranks changes a bit."""
    everyone = simulated.run(tp * sp, answers, folder, tp=tp)
    check(everyone, one_rank)
    if sp > 1:
        alone = simulated.run(tp, answers, folder, tp=tp)[0]
        assert torch.equal(everyone[0]["logits"], alone["logits"]) and everyone[0]["digest"] == alone["digest"]


def test_a_grid_that_the_model_cannot_have_is_refused_before_weights_load(folder):
    with pytest.raises(ValueError, match=r"tp 3: must divide the 2 KV heads.*the nearest that does is [24]"):
        models.check(folder, 3)
