"""A model in parts gives the logits of the whole, on every grid; on a CPU no part is copied."""

from __future__ import annotations

import functools

import pytest
import simulated
import tiny
import torch
from lossless import LosslessCache, run

from bitkv_dist import model
from bitkv_dist.shards import Shards
from bitkv_dist.split import Split, check_tp, cut, tp_choices

CPU = torch.device("cpu")
ODD = {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 259, "num_attention_heads": 9, "num_key_value_heads": 3}
ARCHITECTURES = {  # untied and tied heads, biases, query norms, stacked projections; nothing divides evenly
    "llama": ODD | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "qwen2": ODD,
    "qwen3": ODD,
    "phi3": ODD | {"partial_rotary_factor": 1.0, "pad_token_id": 0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.save(root / name, name, **sizes) for name, sizes in ARCHITECTURES.items()}


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 6, 7, 100])
def test_a_cut_covers_everything_once(total, parts):
    ranges = [cut(total, parts, index) for index in range(parts)]
    assert [number for own in ranges for number in own] == list(range(total))
    assert list(map(len, ranges)) == sorted(map(len, ranges), reverse=True) and len(ranges[0]) - len(ranges[-1]) <= 1


def test_which_tp_a_model_can_have():
    assert tp_choices(9, 3) == [1, 3, 9]
    assert tp_choices(8, 2) == [1, 2, 4, 8]
    assert tp_choices(64, 8) == [1, 2, 4, 8, 16, 32, 64]
    for tp in (0, 3, 24, 128):
        with pytest.raises(ValueError, match=f"tp {tp}: must divide the 8 KV heads of it, or be a multiple .* 64 query heads"):
            check_tp("it", tp, 64, 8)


def test_who_has_which_heads():
    """C22: 8 query and 2 KV heads."""
    two, four = ([Split(tp, tp_rank=rank) for rank in range(tp)] for tp in (2, 4))
    assert [list(rank.kv_heads(2)) for rank in two] == [[0], [1]]
    assert [list(rank.kv_heads(2)) for rank in four] == [[0], [0], [1], [1]]
    assert [(rank.replicas(2), rank.replica(2)) for rank in four] == [(2, 0), (2, 1)] * 2
    assert [list(rank.heads(8, 2)) for rank in four] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [list(rank.share(8)) for rank in four] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("tp", "sp"), [(1, 4), (2, 2), (4, 1), (3, 2)])
def test_helix_shares_lie_inside_those_of_tp(tp, sp):
    ranks = [Split(tp, sp, tp_rank, sp_rank, "helix") for sp_rank in range(sp) for tp_rank in range(tp)]
    assert ranks[0].sharers() == ranks
    shares = [rank.share(576) for rank in ranks]
    assert sorted(number for own in shares for number in own) == list(range(576))
    for rank, own in zip(ranks, shares, strict=True):
        assert set(own) <= set(Split(tp, tp_rank=rank.tp_rank).share(576))


def logits_of_shards(mesh, folder, ids: list[int]) -> tuple:
    served = model.load(str(folder), dtype=torch.float32, device=CPU, ranks=mesh)
    cache = LosslessCache()
    found = torch.cat([run(served, cache, ids[:-1], 0), run(served, cache, ids[-1:], len(ids) - 1)])
    return found, (served.local_heads, served.local_kv_heads, served.first_kv_head), served.fingerprint


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("tp", "sp", "layout"), [(3, 1, "replicated"), (9, 1, "replicated"), (1, 4, "helix"), (3, 2, "helix")])
def test_shards_give_the_logits_of_the_whole(folders, name, tp, sp, layout):
    """Feeding tokens that all ranks share, as a decode step and a packed prefill do; a lossless cache on each."""
    ids = tiny.prompt(23)
    ((whole, _, fingerprint),) = simulated.run(1, logits_of_shards, folders[name], ids)
    everyone = simulated.run(tp * sp, logits_of_shards, folders[name], ids, tp=tp, layout=layout)
    for rank, (logits, place, theirs) in enumerate(everyone):
        torch.testing.assert_close(logits, whole, atol=2e-4, rtol=0)
        assert torch.equal(logits, everyone[0][0])
        assert place == ((3, 1, rank % tp * 3 // tp) if tp > 1 else (9, 3, 0))
        assert theirs == fingerprint


def rows_summed(mesh, parts: torch.Tensor) -> torch.Tensor:
    return Shards(mesh).sum_rows(parts[mesh.world.rank].clone(), torch.tensor([0.5, 0, 0]), 4)


@pytest.mark.parametrize(("tp", "sp"), [(1, 2), (1, 5), (2, 3)])
def test_each_rank_gets_the_sum_of_its_own_rows(tp, sp):
    """The ranks behind one sequence rank with the same bits; at tp 1 in the order of the ranks."""
    parts = torch.randn(tp * sp, sp, 7, 3, generator=torch.Generator().manual_seed(0))  # of each rank, for each SP rank
    everyone = simulated.run(tp * sp, rows_summed, parts, tp=tp, layout="helix")
    for rank, found in enumerate(everyone):
        mine = parts[:, rank // tp, :4]
        wanted = functools.reduce(torch.add, mine) + torch.tensor([0.5, 0, 0])
        torch.testing.assert_close(found, wanted[None], atol=1e-6 * (tp > 1), rtol=0)
        assert torch.equal(found, everyone[rank - rank % tp])
