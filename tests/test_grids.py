"""TP x SP grids of real ranks give the tokens of one rank, and at one TP the same bytes for every SP (C31, C30, C22)."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny import prompt, save

from bitkv_dist.config import CacheConfig, GenerateConfig

PROMPTS = [prompt(600), prompt(3)]
CACHE = CacheConfig(key_bits=4, value_bits=4, page_tokens=64, sink_tokens=64, recent_tokens=64)


def answers(mesh, folder: str) -> dict:
    """Greedy tokens, tokens drawn with noise on this rank's logits, and the digest of the sealed bytes."""
    from bitkv_dist import model as models
    from bitkv_dist.engine import Engine

    shard = {"tp_mesh": mesh.tp_mesh, "tp": mesh.tp, "tp_rank": mesh.tp_rank}
    model = models.load(folder, dtype=torch.float32, device=mesh.world.device, **shard)
    engine = Engine(model, CACHE, mesh, GenerateConfig(max_new_tokens=6))
    greedy, digest = engine.generate(PROMPTS).token_ids, engine.cache_digest()
    engine = Engine(model, CACHE, mesh, GenerateConfig(max_new_tokens=8, temperature=1.0))
    head = model.head
    model.head = lambda hidden: head(hidden) + 0.01 * mesh.world.rank * torch.randn(len(hidden), 256)
    return {"greedy": greedy, "digest": digest, "drawn": engine.generate(PROMPTS).token_ids}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        save(tmp_path_factory.mktemp("model"), num_key_value_heads=4, num_attention_heads=8, head_dim=16, intermediate_size=96)
    )


@pytest.fixture(scope="module")
def one_rank(folder):
    return run_ranks(1, answers, folder)[0]


@pytest.mark.parametrize("size,tp", [(4, 2), (4, 1), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_every_grid_gives_the_tokens_of_one_rank(folder, one_rank, size, tp):
    ranks = run_ranks(size, answers, folder, tp=tp)
    assert all(rank["greedy"] == one_rank["greedy"] for rank in ranks)
    assert len({rank["digest"] for rank in ranks}) == 1
    if tp == 1:
        assert ranks[0]["digest"] == one_rank["digest"]
    # No sampling seed, and another noise on every rank's logits: what rank 0 draws is what all feed.
    assert all(rank["drawn"] == ranks[0]["drawn"] for rank in ranks)


def test_a_grid_that_the_model_cannot_have_is_refused_before_weights_load(folder):
    from bitkv_dist import model as models

    with pytest.raises(ValueError, match=r"tp 3: must divide the 4 KV heads.*the nearest that does is [24]"):
        models.check(folder, 3)
