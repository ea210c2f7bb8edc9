"""Grids TP x SP in both layouts give the tokens of one rank, and at one TP the same bits for every SP (C31, C30, C22)."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import simulated
import torch
from ranks import run_ranks
from recorded import RecordingEngine
from tiny import prompt, save

from bitkv_dist import model as models
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine

PROMPTS = [prompt(600), prompt(3)]
TIERED = CacheConfig(key_bits=4, value_bits=4, scan_bits=1, page_tokens=64, sink_tokens=64, recent_tokens=64)
NEW = 6


def answers(mesh, folder: str, cache: CacheConfig = TIERED, **generate) -> dict:
    """Greedy tokens and their logits, tokens drawn with noise on this rank's logits, and the digest of the sealed bytes."""
    model = models.load(folder, dtype=torch.float32, device=mesh.world.device, ranks=mesh)
    engine = RecordingEngine(model, cache, mesh, GenerateConfig(max_new_tokens=NEW, **generate))
    greedy, digest = engine.generate(PROMPTS).token_ids, engine.cache_digest()
    logits = torch.stack(engine.logits)
    engine = Engine(model, cache, mesh, GenerateConfig(max_new_tokens=8, temperature=1.0))
    head = model.head
    model.head = lambda hidden: head(hidden) + 0.01 * mesh.world.rank * torch.randn(len(hidden), 256)
    drawn, received = engine.generate(PROMPTS).token_ids, engine.exchanged_bytes
    return {"greedy": greedy, "digest": digest, "logits": logits, "drawn": drawn, "received": received}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 100}
    return str(save(tmp_path_factory.mktemp("model"), **sizes))


@pytest.fixture(scope="module")
def one_rank(folder):
    return simulated.run(1, answers, folder)[0]


def check(everyone: list[dict], one: dict, tolerance: float = 1e-3) -> None:
    """All ranks have the same bits, and the tokens of one rank."""
    for rank in everyone:
        assert rank["greedy"] == one["greedy"] and rank["drawn"] == everyone[0]["drawn"]
        assert torch.equal(rank["logits"], everyone[0]["logits"]) and rank["digest"] == everyone[0]["digest"]
    torch.testing.assert_close(everyone[0]["logits"], one["logits"], atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "parallel"), [(2, {"layout": "helix"}), (2, {"exchange": "allreduce"}), (4, {})])
def test_grids_of_real_ranks(folder, one_rank, tp, parallel):
    """No sampling seed, and another noise on every rank's logits: what rank 0 draws is what all feed."""
    check(run_ranks(4, answers, folder, tp=tp, **parallel), one_rank)


@pytest.mark.parametrize(("tp", "sp"), [*itertools.product((1, 2, 4, 8), (1, 2, 3)), (2, 4), (2, 8)])
def test_replicated_grids(folder, one_rank, tp, sp):
    """More TP ranks than the 2 KV heads keep copies of them. At one TP no number of SP ranks changes a bit."""
    everyone = simulated.run(tp * sp, answers, folder, tp=tp)
    check(everyone, one_rank)
    if sp > 1:
        alone = simulated.run(tp, answers, folder, tp=tp)[0]
        assert torch.equal(everyone[0]["logits"], alone["logits"]) and everyone[0]["digest"] == alone["digest"]


def test_copies_of_a_kv_head_share_out_the_exchange(folder):
    """8 query heads: 2, 4 and 8 TP ranks go on with 4, 2 and 1 of them, and that is what they exchange."""
    received = [simulated.run(tp * 2, answers, folder, tp=tp)[0]["received"] for tp in (2, 4, 8)]
    assert received[0] == 2 * received[1] == 4 * received[2] > 0


@pytest.mark.parametrize(("tp", "sp"), [(1, 2), (1, 3), (1, 8), (2, 2), (4, 3)])
@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_helix_grids(folder, one_rank, tp, sp, prefill):
    """Also where heads do not divide: 8 heads of 16 dims on 3 ranks. Attention over the same partials in another exchange is
    the same to the bit."""
    one = one_rank if prefill == "exact" else simulated.run(1, packed_answers, folder)[0]
    function = answers if prefill == "exact" else packed_answers
    everyone = simulated.run(tp * sp, function, folder, tp=tp, layout="helix")
    # In a packed prefill hidden states pass through codes: a sum that rounds to the other side of a level moves it by one.
    check(everyone, one, 1e-3 if prefill == "exact" else 5e-3)
    if prefill == "exact":
        gathered = simulated.run(tp * sp, function, folder, tp=tp, layout="helix", exchange="allgather")[0]
        assert torch.equal(gathered["logits"], everyone[0]["logits"]) and gathered["digest"] == everyone[0]["digest"]
        # Of the 2 heads that each of 4 TP ranks goes on with, 3 sequence ranks touch one, both and one: nothing is saved.
        assert everyone[0]["received"] < gathered["received"] or (tp == 4 and everyone[0]["received"] == gathered["received"])


@pytest.mark.parametrize(("tp", "sp", "layout"), [(1, 3, "replicated"), (2, 2, "replicated"), (2, 2, "helix")])
def test_grids_with_all_reduce(folder, one_rank, tp, sp, layout):
    everyone = simulated.run(tp * sp, answers, folder, tp=tp, layout=layout, exchange="allreduce")
    check(everyone, one_rank)


def weights(mesh, folder: str, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """The fingerprint of the model, and the logits of a decode step without a cache that matters."""
    model = models.load(folder, dtype=dtype, device=mesh.world.device, ranks=mesh)
    return model.fingerprint, model.head(model.embed(torch.tensor([[1, 2, 3]]))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("said", ["float32", "bfloat16"])
def test_a_model_is_the_same_on_every_grid(folder, tmp_path, dtype, said):
    """Whatever its configuration says about the type of its weights, which are float32."""
    place = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"dtype": said}))
    ((fingerprint, logits),) = simulated.run(1, weights, str(place), dtype)
    for tp, layout in ((2, "replicated"), (1, "helix")):
        for found, theirs in simulated.run(2, weights, str(place), dtype, tp=tp, layout=layout):
            assert found == fingerprint
            torch.testing.assert_close(theirs, logits, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def packed_answers(mesh, folder: str) -> dict:
    return answers(mesh, folder, prefill="packed", chunk=64)


def test_a_grid_that_the_model_cannot_have_is_refused_before_weights_load(folder):
    with pytest.raises(ValueError, match=r"tp 3: must divide the 2 KV heads.*the nearest that does is [24]"):
        models.check(folder, 3)
