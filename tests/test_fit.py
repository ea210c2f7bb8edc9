"""What a calibration is made of: received attention, matched channels, k-means, and the order in which stages are trained."""

import itertools
from types import SimpleNamespace

import calibrations
import numpy as np
import pytest
import torch

from bitkv_dist.fit import attended as attention
from bitkv_dist.fit import books as fits
from bitkv_dist.fit.books import Fit, Tokens, fit_layer
from bitkv_dist.fit.importance import importance, weights
from bitkv_dist.fit.kmeans import assign, kmeans
from bitkv_dist.fit.matching import best_pairs, group_channels, volumes
from bitkv_dist.fit.sample import rope_of, turned, unturned

DIM = 16


def received_by_pairs(q: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """The definition: every query turned to every distance it looks back, squared."""
    half, n = len(inv_freq), q.shape[2]
    total, pairs = torch.zeros(len(q), q.shape[-1], dtype=torch.float64), 0
    for i in range(n):
        for p in range(i + 1):
            angle = p * inv_freq.double()
            x, y, rest = q[:, :, i].double().split((half, half, q.shape[-1] - 2 * half), -1)
            there = torch.cat((x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin(), rest), -1)
            total += there.square().sum(1)
            pairs += q.shape[1]
    return total / pairs


@pytest.mark.parametrize(("half", "n"), [(8, 1), (8, 33), (4, 20)])
def test_received_attention_is_that_over_all_pairs(half, n):
    torch.manual_seed(half + n)
    q = torch.randn(2, 3, n, DIM) + torch.randn(DIM)
    inv_freq = 10.0 ** -(torch.arange(half) / half)
    torch.testing.assert_close(importance(q, inv_freq).double(), received_by_pairs(q, inv_freq), rtol=1e-5, atol=1e-7)


def test_it_is_what_an_error_of_one_channel_costs():
    """(R_p q . e)^2 for an error in one channel of a key, through the turning of keys and queries themselves."""
    window, rope = calibrations.window(1, 48, DIM, seed=4), calibrations.rope_of(DIM)
    channel = 3
    error = torch.zeros(1, 48, DIM)
    error[..., channel] = 1.0
    q = turned(rope, window.q.flatten(0, 1))
    scores = (q @ turned(rope, error).transpose(1, 2)).square().tril()
    wanted = scores.sum() / (2 * 48 * 49 / 2)
    torch.testing.assert_close(importance(window.q, rope.inv_freq)[0, channel], wanted, rtol=1e-3, atol=0)
    torch.testing.assert_close(unturned(rope, turned(rope, window.k)), window.k, atol=1e-4, rtol=1e-4)


def test_attended_channels_are_those_whose_errors_change_outputs(monkeypatch):
    """Against outputs themselves: a small error in one channel of one coded key at a time, before RoPE, in double precision."""
    monkeypatch.setattr(attention, "SINK", 4)
    monkeypatch.setattr(attention, "RECENT", 6)
    monkeypatch.setattr(attention, "STRIDE", 1)
    window, rope = calibrations.window(1, 24, DIM, seed=4), calibrations.rope_of(DIM)
    n = window.taught
    q = turned(rope, window.q[0])[:, :n].double() * window.scaling
    seen = torch.ones(n, n).tril().bool()

    def outputs(k: torch.Tensor) -> torch.Tensor:
        k = turned(rope, k[None])[0, :n].double()
        return torch.where(seen, q @ k.T, -torch.inf).softmax(-1) @ window.v[0, :n].double()

    wanted, step = torch.zeros(DIM, dtype=torch.float64), 2e-3
    for token in range(4, n):
        for channel in range(DIM):
            k = window.k[0].clone()
            k[token, channel] += step
            lower = window.k[0].clone()
            lower[token, channel] -= step
            moved = ((outputs(k) - outputs(lower)) / (2 * step))[:, token + 6 :]  # queries that read it by code
            wanted[channel] += moved[:, :].square().sum()
    found = attention.attended(window, rope)[0].double() * window.scaling**2
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=1e-4 * wanted.max().item())


def test_what_key_errors_cost_is_the_sum_over_pairs(monkeypatch):
    """Against attention written out: p^2 |v - o|^2 times the square error of the score, of pairs that are read by code."""
    for name, value in (("SINK", 4), ("RECENT", 6)):
        monkeypatch.setattr(attention, name, value)
    window, rope = calibrations.window(2, 40, DIM, seed=5), calibrations.rope_of(DIM)
    n = window.taught
    q = turned(rope, window.q.flatten(0, 1)).unflatten(0, (2, 2))[:, :, :n].double() * window.scaling
    k, v = turned(rope, window.k)[:, :n].double(), window.v[:, :n].double()
    p = torch.where(torch.ones(n, n).tril().bool(), torch.einsum("hgqd,hkd->hgqk", q, k), -torch.inf).softmax(-1)
    away = (v[:, None, None] - (p @ v[:, None])[:, :, :, None]).square().sum(-1)  # [HK, G, queries, keys]
    error = 1e-3 * torch.randn(2, n, DIM, generator=torch.Generator().manual_seed(1))
    moved = torch.einsum("hgqd,hkd->hgqk", q, turned(rope, error).double()).square()
    coded = torch.ones(n, n).tril(-6).bool() & (torch.arange(n) >= 4) & (torch.arange(n)[:, None] >= 10)
    wanted = (moved * p.square() * away * coded).sum((1, 2, 3))
    torch.testing.assert_close(attention.score_cost(window, rope, error, 1).double(), wanted, rtol=5e-3, atol=0)


def test_memory_of_long_windows_is_bounded(monkeypatch):
    """Queries are looked at some at a time, whatever the window; together they give the same."""
    for name, value in (("SINK", 4), ("RECENT", 6), ("STRIDE", 1)):
        monkeypatch.setattr(attention, name, value)
    window, rope = calibrations.window(1, 80, DIM), calibrations.rope_of(DIM)
    whole = attention.attended(window, rope)
    monkeypatch.setattr(attention, "PAIRS", 300)
    assert max(seen.counts.numel() for seen in attention.glances(window, rope, 1)) <= 300
    torch.testing.assert_close(attention.attended(window, rope), whole, rtol=1e-5, atol=1e-9)


def test_weights_are_one_in_the_mean_square():
    found = weights(torch.rand(3, DIM) + 0.01)
    torch.testing.assert_close(found.square().mean(-1), torch.ones(3))
    assert torch.equal(weights(torch.zeros(1, DIM)), torch.ones(1, DIM))


# ------------------------------------------------------------------------------------------------------------ matching


def every_matching(points: list[int]):
    if not points:
        yield []
        return
    first, *rest = points
    for other in rest:
        for more in every_matching([point for point in rest if point != other]):
            yield [(first, other), *more]


@pytest.mark.parametrize("seed", range(6))
def test_matching_is_the_best_of_all(seed):
    cost = np.random.default_rng(seed).random((8, 8)) ** 3
    cost = cost + cost.T
    least = min(sum(cost[a, b] for a, b in matching) for matching in every_matching(list(range(8))))
    found = best_pairs(cost)
    assert sorted(found.flatten().tolist()) == list(range(8))
    assert sum(cost[a, b] for a, b in found) == pytest.approx(least, rel=1e-9)


def test_groups_hold_whole_pairs_that_vary_together():
    """32 channels of four hidden factors: the groups are the factors' channels, whatever the order of the pairs."""
    torch.manual_seed(0)
    pairs = torch.stack((torch.arange(16), torch.arange(16) + 16), 1)
    factor = torch.randperm(16) % 4
    hidden = torch.randn(4, 4000)
    x = torch.empty(32, 4000)
    for pair, (a, b) in enumerate(pairs.tolist()):
        x[a] = hidden[factor[pair]] + 0.1 * torch.randn(4000)
        x[b] = -hidden[factor[pair]] + 0.1 * torch.randn(4000)
    groups = group_channels(torch.cov(x), pairs)
    assert sorted(groups.flatten().tolist()) == list(range(32))
    for group in groups.tolist():
        assert {channel % 16 for channel in group} == {channel % 16 for channel in group[:8] if channel < 16}
        assert len({int(factor[channel % 16]) for channel in group}) == 1


def test_volumes_are_determinants():
    covariance = np.diag([1.0, 2.0, 3.0, 4.0])
    assert volumes(covariance, np.array([[0, 1], [2, 3]]))[0, 1] == pytest.approx(24 ** (1 / 4))


# ------------------------------------------------------------------------------------------------------------- k-means


def test_words_find_the_clusters():
    torch.manual_seed(0)
    centres = torch.randn(2, 8, 4) * 10
    x = centres[:, torch.arange(800) % 8] + 0.01 * torch.randn(2, 800, 4)
    words = kmeans(x, torch.ones(800), 8, 8, 0)
    for centre, found in zip(centres, words, strict=True):
        assert torch.cdist(centre, found).amin(1).max() < 0.1


def test_heavy_vectors_draw_the_words():
    x = torch.cat((torch.zeros(1, 500, 1), torch.linspace(1, 2, 500).view(1, 500, 1)), 1)
    weight = torch.cat((torch.full((500,), 1e-6), torch.ones(500)))
    words = kmeans(x, weight, 2, 20, 0)[0].flatten().sort().values
    torch.testing.assert_close(words, torch.tensor([1.25, 1.75]), atol=0.03, rtol=0)


def test_no_word_is_wasted():
    """More words than clusters: all of them are somebody's nearest."""
    torch.manual_seed(1)
    x = torch.randn(1, 512, 2)
    index, lost = assign(x[0], kmeans(x, torch.ones(512), 64, 10, 0)[0])
    assert len(index.unique()) == 64 and lost.mean() < 0.1


# --------------------------------------------------------------------------------------------------- stages and layers


def two_stages(seed: int = 0) -> tuple[Tokens, dict[str, torch.Tensor]]:
    x = calibrations.vectors(2, 4096, DIM, seed)
    tokens = Tokens(x, None, torch.arange(4096) < 3584, torch.arange(2048))
    return tokens, fits.residual_books(tokens, Fit("residual", "two-stage", 2048, 8))


def loss(tokens: Tokens, books: dict[str, torch.Tensor]) -> float:
    held_out = ~tokens.teaches
    error = (tokens.x - fits.coded(books, tokens.x))[:, held_out]
    return fits.share_lost(error, tokens, held_out, books["weight"])


def test_a_second_stage_must_be_trained_on_what_the_first_leaves():
    """Trained on the data itself, as a plain second codebook would be, it is next to useless."""
    tokens, books = two_stages()
    wrong = books | {"words": books["words"].clone()}
    x = ((tokens.x - books["center"][:, None]) * books["weight"][:, None])[:, tokens.drawn]
    raw = x.unflatten(2, (DIM // 4, 4)).transpose(1, 2).flatten(0, 1)
    again = kmeans(raw, torch.ones(2048), 16, 8, 1) / books["unit"].view(-1, 1, 1)
    wrong["words"][:, :, 1] = torch.round(again).view_as(wrong["words"][:, :, 1]).to(torch.int16)
    first = books | {"words": books["words"][:, :, :1]}
    right, single = loss(tokens, books), loss(tokens, first)
    assert right < 0.5 * single
    assert loss(tokens, wrong) > 1.5 * right


def test_the_first_stage_is_frozen():
    """It is what one-stage books of the same data would be, and the second has been fitted to its rounded words."""
    tokens, books = two_stages()
    x = (tokens.x - books["center"][:, None]) * books["weight"][:, None]
    channels = torch.arange(DIM).view(1, -1, 4).expand(2, -1, -1)
    alone = fits.fitted(tokens, x, channels, 16, Fit("residual", "two-stage", 2048, 8))
    assert torch.equal(alone["words"][:, :, 0], books["words"][:, :, 0])
    second = books["words"][:, :, 1].float()
    assert second.abs().mean() < 0.6 * books["words"][:, :, 0].float().abs().mean()


def test_weighted_books_serve_scores_better():
    """Scores of held-out queries: the books know which channels are looked at, on data where a quarter is loud."""
    windows, rope = [calibrations.window(2, 2048, 32)], calibrations.rope_of(32)
    errors = {}
    for form in ("weighted", "attended", "unweighted", "threshold"):
        found, lost = fit_layer(windows, rope, Fit("tailored", form, 1536, 3))
        weight, k = found["K.weight"], windows[0].k
        scale = (k * weight[:, None]).square().mean((0, 2)).sqrt()
        books = {name: found[f"K.{name}"] for name in ("words", "unit", "channels", "center", "weight")}
        error = k - fits.coded(books, k / scale[:, None]) * scale[:, None]
        errors[form] = fits.score_error(windows, rope, error).mean().item()
        assert 0 < lost["K.taught"] <= 1.05 * lost["K.held_out"] and 0 < lost["V.taught"] <= 1.05 * lost["V.held_out"]
        assert found["K.weighted"].tolist() == ([0, 0] if form == "unweighted" else [1, 1])
    assert errors["weighted"] < 0.8 * errors["unweighted"] and errors["weighted"] < errors["threshold"]
    assert errors["weighted"] < errors["attended"] < 0.9 * errors["unweighted"]


def test_attended_books_serve_outputs_better():
    """What key errors of another window cost in outputs, by way of scores."""
    windows, rope = [calibrations.window(2, 2048, 32)], calibrations.rope_of(32)
    other = calibrations.window(2, 1024, 32, seed=900)
    costs = {}
    for form in ("attended", "unweighted"):
        found, _ = fit_layer(windows, rope, Fit("tailored", form, 1536, 3))
        books = {name: found[f"K.{name}"] for name in ("words", "unit", "channels", "center", "weight")}
        scale = (other.k * found["K.weight"][:, None]).square().mean((0, 2)).sqrt()[:, None]
        error = (other.k - fits.coded(books, other.k / scale) * scale)[:, : other.taught]
        costs[form] = attention.score_cost(other, rope, error, 16).sum().item()
    assert costs["attended"] < 0.9 * costs["unweighted"], costs


def test_lost_energy_is_alike_in_a_pair():
    found = fits.channel_losses(torch.randn(2, 50, 12), 4)
    assert torch.equal(found[:, :4], found[:, 4:8]) and not torch.equal(found[:, 8:10], found[:, 10:])
    assert all(itertools.chain((found > 0).flatten().tolist()))


def test_a_fit_has_its_rope_on_the_cpu():
    """Wherever the model is: a stand-in on the meta device keeps its own tables there."""
    rotary = SimpleNamespace(inv_freq=torch.rand(8), attention_scaling=1.0)
    model = SimpleNamespace(module=SimpleNamespace(model=SimpleNamespace(rotary_emb=rotary)), device=torch.device("meta"))
    for device, wanted in ((None, "meta"), (torch.device("cpu"), "cpu")):
        rope = rope_of(model, 64, device)
        assert {table.device.type for table in (*rope.pages, *rope.places)} == {wanted}
