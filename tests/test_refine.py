"""Which tokens are refined: every rule against brute force in double precision, and the same choice for any number of ranks."""

import math

import numpy as np
import pytest
import torch

from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.calibration import PROBES, probe_ends
from bitkv_dist.codec.planes import NOISE
from bitkv_dist.codec.ranking import Ranking
from bitkv_dist.codec.tuning import SLOPE, TAIL, Tuning
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import Selection, Whole
from bitkv_dist.partial import Partial

SCORES = (3, 2, 2, 3, 512)  # n, HK, Q, G, T


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def scores_with(sealed: torch.Tensor, rounded: bool = False) -> torch.Tensor:
    """Random scores of which only the first `sealed` tokens of each granule count; `rounded`: with many ties."""
    scores = torch.randn(SCORES) * 4
    scores = scores.round() if rounded else scores
    return torch.where(torch.arange(512) < sealed[:, None, None, None, None], scores, -math.inf)


def log_weights(scores: np.ndarray, group: bool) -> np.ndarray:
    """What tokens compete with, float64 [n, HK, Q, R, T]."""
    if not group:
        return scores
    with np.errstate(divide="ignore", invalid="ignore"):
        mass = np.log2(np.exp2(scores).sum(-1, keepdims=True))
        return (scores - mass).max(-2, keepdims=True)


def in_order(row: np.ndarray) -> np.ndarray:
    """Positions by falling value, ties to the lower position."""
    return np.lexsort((np.arange(len(row)), -row))


# ----------------------------------------------------------------------------------------------------- rule mass


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("tail", [0.5, 0.1, 0.01, 0.0])
def test_mass_takes_the_smallest_set_that_reaches_the_weight(group, tail):
    sealed = torch.tensor([512, 128, 384])
    scores = scores_with(sealed)
    mask = reference.select(scores, sealed, Selection(0.0, 1, group, torch.full((1, 1, 1), tail)))
    ranked = log_weights(scores.double().numpy(), group)
    for index in np.ndindex(ranked.shape[:-1]):
        chosen = mask[index[:3]].any(0).numpy() if group else mask[index].numpy()
        if group:
            assert all(torch.equal(head, mask[index[:3]][0]) for head in mask[index[:3]])
        order = in_order(ranked[index])
        count = chosen.sum()
        assert set(np.flatnonzero(chosen)) == set(order[:count])
        weights = np.exp2(ranked[index])
        wanted = (1 - tail) * weights.sum()
        slack = 1e-6 * weights.sum()  # a fp32 weight, and none below 2^-41 of the largest
        assert weights[order[:count]].sum() >= wanted - slack
        assert weights[order[: count - 1]].sum() < wanted + slack


def test_mass_takes_ties_from_the_left():
    scores = torch.zeros(1, 1, 1, 1, 512)
    mask = reference.select(scores, torch.tensor([512]), Selection(0.0, 1, False, torch.full((1, 1, 1), 0.75)))
    assert mask[0, 0, 0, 0].nonzero().flatten().tolist() == list(range(128))


def test_mass_needs_no_token_but_takes_the_least_number():
    sealed = torch.tensor([512, 0, 128])
    for least in (0, 1, 7):
        mask = reference.select(scores_with(sealed), sealed, Selection(0.0, least, True, torch.ones(1, 1, 1)))
        assert (mask.sum(-1) == torch.tensor([least, 0, least])[:, None, None, None]).all()


def test_each_head_has_its_own_tail():
    scores = scores_with(torch.tensor([512] * 3))
    tails = torch.tensor([0.5, 0.1, 0.01]).expand(2, 1, 3)
    mask = reference.select(scores, torch.tensor([512] * 3), Selection(0.0, 1, False, tails))
    for head, tail in enumerate((0.5, 0.1, 0.01)):
        alone = reference.select(scores, torch.tensor([512] * 3), Selection(0.0, 1, False, torch.full((1, 1, 1), tail)))
        assert torch.equal(mask[:, :, :, head], alone[:, :, :, head])


# ------------------------------------------------------------------------------------------------ granules that do not matter


@pytest.mark.parametrize("group", [True, False])
def test_a_granule_below_the_floor_refines_nothing(group):
    sealed = torch.tensor([512, 128, 384])
    scores = scores_with(sealed)
    floor = scores.amax(-1).median(0).values  # of three granules, one is below it
    plain, floored = (reference.select(scores, sealed, Selection(0.05, 1, group, floor=each)) for each in (None, floor))
    matters = scores.amax(-1) >= floor
    matters = matters.any(-1, keepdim=True).expand_as(matters) if group else matters
    assert 0 < matters.sum() < matters.numel()
    assert torch.equal(floored, plain & matters.unsqueeze(-1))


# -------------------------------------------------------------------------------------------------- scope global


def test_rank_keys_order_by_value_then_position():
    values = torch.cat((torch.randn(500).mul(3).round(), torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -1e-40] * 2)))
    keys = reference.rank_keys(values.view(2, 1, 1, 1, 256), torch.tensor([3, 9])).flatten()
    position = np.concatenate((3 * 256 + np.arange(256), 9 * 256 + np.arange(256)))
    expected = np.lexsort((position, -values.double().numpy()))
    assert keys.argsort(descending=True).tolist() == expected.tolist()
    assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rounded", [True, False])
def test_global_takes_the_best_of_the_whole_sequence(group, ranks, rounded):
    sealed = torch.tensor([384, 512, 512, 128])
    scores = torch.randn(4, 2, 2, 3, 512) * 4
    scores = scores.round() if rounded else scores
    scores = torch.where(torch.arange(512) < sealed[:, None, None, None, None], scores, -math.inf)
    rule, total = Selection(0.05, 1, group), int(sealed.sum())
    m, l = reference.peak_and_mass(scores.movedim(0, -2).flatten(-2))
    log_sum_exp, count = m + torch.log2(l) if group else None, math.ceil(0.05 * total)
    rankings = []
    for rank in range(ranks):
        ranking = Ranking((2, 2, 3), count, log_sum_exp, scores.device)
        for granule in range(rank, 4, ranks):
            ranking.add(scores[granule : granule + 1], [granule])
        rankings.append(ranking)
    whole = Whole(log_sum_exp, rankings[-1].cut(torch.stack([ranking.best for ranking in rankings])))
    mask = reference.select(scores, sealed, rule._replace(whole=whole), torch.arange(4))
    flat = mask.movedim(0, -2).flatten(-2)  # [HK, Q, G, all T]
    ranked = reference.competing(scores, group, whole.log_sum_exp).movedim(0, -2).flatten(-2)
    for index in np.ndindex(ranked.shape[:-1]):
        expected = np.zeros(4 * 512, dtype=bool)
        expected[in_order(ranked[index].double().numpy())[:count]] = True
        for head in flat[index[:2]] if group else [flat[index]]:
            assert head.tolist() == expected.tolist()


def test_global_may_choose_nothing():
    ranking = Ranking((1, 1, 1), 0, None, torch.device("cpu"))
    ranking.add(torch.randn(1, 1, 1, 1, 512), [0])
    rule = Selection(0.0, 0, False, whole=Whole(None, ranking.cut(ranking.best.unsqueeze(0))))
    assert not reference.select(torch.randn(1, 1, 1, 1, 512), torch.tensor([512]), rule, torch.tensor([0])).any()


# ----------------------------------------------------------------------------------------- learning from true scores


def sealed_keys(n: int = 2, pages: int = 4, bits=(4, 1)) -> tuple[torch.Tensor, torch.Tensor, reference.Plane]:
    """Keys [n, 2, T, D = 64] that share a mean and some directions, rotation signs, and the sealed pages."""
    k = torch.randn(n, 2, pages * 128, 64) + torch.randn(2, 1, 64) + torch.randn(n, 2, pages * 128, 1) * torch.randn(2, 1, 64)
    signs = torch.randint(0, 2, (2, 64)) * 2.0 - 1
    paged = k.unflatten(2, (pages, 128)).transpose(1, 2).flatten(0, 1)
    plane = reference.encode(paged, signs, *bits, "K")
    return k, signs, reference.Plane(*(part.unflatten(0, (n, pages)) for part in plane))


def test_true_scores():
    k, _, _ = sealed_keys()
    q = torch.randn(2, 1, 3, 64)
    valid = torch.tensor([[False, True, True, True], [True, True, False, False]])
    found = reference.true_scores(q, k, valid)
    expected = torch.einsum("hqgd,nhtd->nhqgt", q.double(), k.double())
    inside = valid.repeat_interleave(128, 1)[:, None, None, None, :].expand_as(found)
    torch.testing.assert_close(found[inside], expected[inside].float(), rtol=1e-5, atol=1e-4)
    assert (found[~inside] == -math.inf).all()


def test_slope_is_least_squares():
    k, signs, plane = sealed_keys()
    q = torch.randn(2, 1, 3, 64)
    query, valid = reference.quantize_query(q, signs), torch.ones(2, 4, dtype=torch.bool)
    valid[0, 0] = False
    sums = reference.slope_sums(query, plane, valid, reference.true_scores(q, k, valid))
    tuning = Tuning(CacheConfig(score="fitted", key_bits=4, value_bits=4, scan_bits=1))
    tuning.learn(SLOPE, [Partial(None, None, granule) for granule in sums])
    level = reference.levels(plane, "K", 0).double() * plane.scan.double().unsqueeze(-1)  # [n, pages, HK, P, D]
    kept = valid[:, :, None, None].expand(2, 4, 1, 128).reshape(2, 4, 128)
    for head in range(2):
        z = reference.rotate(k[:, head].unflatten(1, (4, 128)), signs[head]) - plane.centroid[:, :, head, None].float()
        for member in range(3):
            x = (level[:, :, head] @ query.rotated[head, 0, member].double())[kept]
            y = (z.double() @ query.rotated[head, 0, member].double())[kept]
            slope = (x @ y / (x @ x)).item()
            assert tuning.factor[head, 0, member].item() == pytest.approx(slope, rel=0.01)  # the query has 8 bits


def test_tail_weights_are_what_a_choice_leaves():
    k, signs, plane = sealed_keys()
    q = torch.randn(2, 1, 3, 64) / 4
    query, valid = reference.quantize_query(q, signs), torch.ones(2, 4, dtype=torch.bool)
    truth = reference.true_scores(q, k, valid)
    rule = Selection(0.05, 1, True)
    m, l, o = reference.tail_weights(query, plane, valid, truth, 3, NOISE, [rule, None])
    scanned = reference.key_scores(query, plane, valid, 0, NOISE[1, 4])
    left = ~reference.select(scanned, torch.tensor([512, 512]), rule)
    for column, (scores, mask) in enumerate([(truth, left), (truth, left | True), (scanned, left), (scanned, left | True)]):
        expected = (np.exp2(scores.double().numpy()) * mask.numpy()).sum(-1)
        np.testing.assert_allclose(o[..., column].double().numpy() * np.exp2(m.double().numpy()), expected, rtol=1e-5)
    np.testing.assert_allclose(l.numpy(), o[..., 1].numpy(), rtol=1e-6)


def tuned(shares: torch.Tensor, **fields) -> Tuning:
    """A tuning that has learned from probes which leave these shares of the true weight, fp32 [probes, HK, G, C]."""
    tuning = Tuning(CacheConfig(key_bits=4, value_bits=4, scan_bits=1, **fields))
    shape = shares.shape[1], 1, shares.shape[2]
    both = torch.cat((shares, shares / 2), dim=-1).unsqueeze(2)
    tuning.learn(TAIL, [Partial(torch.zeros(shape), torch.ones(shape), probe) for probe in both])
    return tuning


@pytest.mark.parametrize("granularity", ["group", "head"])
def test_the_tail_is_the_largest_whose_measured_mass_meets_the_target(granularity):
    refine = RefineConfig(rule="mass", value=0.9, granularity=granularity)
    tails = torch.tensor(Tuning(CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=refine)).tails)
    assert (tails.diff() < 0).all()
    optimism = torch.tensor([[0.9, 1.5, 2.0], [3.0, 1.0, 5.0]])  # a head's true tail over its estimated one
    shares = tails * optimism.unsqueeze(-1) * torch.tensor([0.5, 1.5])[:, None, None, None]  # two probes
    tuning = tuned(shares, refine=refine)
    optimism = optimism.mean(1, keepdim=True) if granularity == "group" else optimism
    assert tuning.tail.shape == (2, 1, optimism.shape[1])
    for head in np.ndindex(optimism.shape):
        fitting = tails[tails * optimism[head] <= 0.1 + 1e-6]
        assert tuning.tail[head[0], 0, head[1]] == fitting.max()
    assert tuning.covered.shape == (2, 1, 3)
    assert tuning.covered.mean() >= 0.9
    assert tuning.offset is None


def test_a_target_out_of_reach_takes_the_smallest_tail():
    refine = RefineConfig(rule="mass", value=0.9)
    tuning = tuned(torch.full((1, 2, 3, 17), 0.5), refine=refine)
    assert (tuning.tail == tuning.tails[-1]).all() and (tuning.covered == 0.5).all()


def test_the_offset_is_what_the_tail_truly_weighs():
    tuning = tuned(torch.rand(3, 2, 3, 1), score="fitted")
    torch.testing.assert_close(tuning.offset, torch.ones(2, 1, 3))  # estimated at half


def test_fitted_scores_change_the_scan_only():
    _, signs, plane = sealed_keys()
    query, valid = reference.quantize_query(torch.randn(2, 1, 3, 64), signs), torch.ones(2, 4, dtype=torch.bool)
    fitted = query._replace(factor=torch.full((2, 1, 3), 1.5), offset=torch.full((2, 1, 3), -2.0))
    base = reference.centroid_scores(query, plane.centroid.float()).repeat_interleave(128, -1)
    plain, found = (reference.key_scores(each, plane, valid, 0, 0.0) for each in (query, fitted))
    torch.testing.assert_close(found, base + 1.5 * (plain - base) - 2)
    assert torch.equal(*(reference.key_scores(each, plane, valid, 3, 0.0) for each in (query, fitted)))


def test_probes_are_few_and_end_with_the_prompt():
    assert probe_ends(1) == [1]
    assert probe_ends(1300) == [512, 1024, 1300]
    for tokens in (512 * 16, 512 * 16 + 1, 100_000, 1_000_000):
        ends = probe_ends(tokens)
        assert len(ends) == PROBES and ends[-1] == tokens and ends == sorted(set(ends))
        assert all(end % 512 == 0 for end in ends[:-1])


# ------------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rule": "mass", "value": 0.9, "scope": "global"}, ("cache.refine.scope 'global'", "rule mass", "scope granule")),
        ({"scope": "global", "skip_below": 20}, ("cache.refine.skip_below 20", "scope global", "leave it out")),
        ({"skip_below": 0}, ("cache.refine.skip_below 0", "above 0")),
    ],
)
def test_refusals(fields, parts):
    with pytest.raises(ValueError) as caught:
        RefineConfig(**fields)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)
