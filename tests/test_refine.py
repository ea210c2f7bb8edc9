"""Which tokens are refined: every rule against brute force in double precision, and the same choice for any number of ranks."""

import math

import numpy as np
import pytest
import simulated
import tiny
import torch
from ranks import run_ranks

from bitkv_dist import model
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.calibration import PROBES, chunk_probes, probe_ends
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import NOISE
from bitkv_dist.codec.ranking import Ranking
from bitkv_dist.codec.tuning import SLOPE, TAIL, Tuning
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig, GenerateConfig, RefineConfig
from bitkv_dist.engine import Engine
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import Selection, Whole
from bitkv_dist.partial import Partial
from bitkv_dist.report import report
from bitkv_dist.sequence import SequenceState

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


@pytest.mark.parametrize(("granularity", "further_scans"), [("group", 2), ("head", 1)])
def test_global_counts_every_scan(granularity, further_scans):
    """Groups are weighed and ranked before they are attended to, heads only ranked: the key plane is read each time."""
    read = {}
    for scope in ("granule", "global"):
        q, k, v = peaked(1200)
        cache = prefilled(config_with(scope=scope, granularity=granularity), q, k, v)
        decode(cache, q[:, :, :4], k[:, :, :4], v[:, :, :4])
        read[scope] = cache.reads
    low_bits = 3 * 64 + 16  # of one side of a refined token
    bits = {scope: reads.bits - reads.refined * 2 * low_bits for scope, reads in read.items()}
    assert read["global"].scanned == read["granule"].scanned
    key_bits = 64 + 16 + 64 * 16 / 128  # plane, scale, centroid
    assert bits["global"] - bits["granule"] == further_scans * read["global"].scanned * key_bits


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


# ------------------------------------------------------------------------------------------------------ in a layer


def peaked(tokens: int, heads: int = 2, group: int = 3, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [1, HK G, T, D], k, v [1, HK, T, D]: keys in clusters, queries near one of their centres, so that attention has
    peaks."""
    centres = torch.randn(heads, 12, dim)
    of_key, of_query = torch.randint(0, 12, (tokens,)), torch.randint(0, 12, (tokens,))
    k = centres[:, of_key] + torch.randn(heads, tokens, dim) * 0.7
    q = centres[:, of_query].repeat_interleave(group, 0) + torch.randn(heads * group, tokens, dim) * 0.7
    return q.unsqueeze(0), k.unsqueeze(0), torch.randn(1, heads, tokens, dim)


def prefilled(config: CacheConfig, q, k, v, exact: bool = True) -> PackedCache:
    """A one-layer cache after these tokens, read exactly or packed in chunks of 512."""
    cache = PackedCache(config, HeadShape(1, 0, k.shape[1], k.shape[3], torch.float32, group=q.shape[1] // k.shape[1]), 1)
    tokens = k.shape[2]
    if exact:
        cache.layers[0].begin_prompt(0, tokens)
    for start in range(0, tokens, 512):
        end = min(tokens, start + 512)
        cache.step = Step([0], round=[(0, start, end - start)] if exact else [])
        cache.update(k[:, :, start:end], v[:, :, start:end], 0)[0].attend(q[:, :, start:end], 64**-0.5)
    if exact:
        cache.layers[0].finish_prompt(0)
    return cache


def decode(cache: PackedCache, q, k, v) -> torch.Tensor:
    """Outputs of further tokens, fed one at a time."""
    cache.step = Step([0], count_reads=True)
    steps = (slice(t, t + 1) for t in range(k.shape[2]))
    return torch.cat([cache.update(k[:, :, t], v[:, :, t], 0)[0].attend(q[:, :, t], 64**-0.5) for t in steps], dim=1)


def config_with(score: str = "mse", **refine) -> CacheConfig:
    return CacheConfig(key_bits=4, value_bits=4, scan_bits=1, score=score, refine=RefineConfig(**refine))


@pytest.mark.parametrize("granularity", ["group", "head"])
def test_measured_mass_is_true_and_just_meets_the_target(granularity):
    """In double precision from the prompt's own queries and keys; the next larger tail would miss the target."""
    q, k, v = peaked(1800)
    cache = prefilled(config_with(rule="mass", value=0.8, granularity=granularity), q, k, v)
    state, codec = cache.layers[0].states[0], cache.layers[0].codec
    records, valid, _ = next(state.granules(99))

    def covered(tail: torch.Tensor) -> np.ndarray:
        """The mean over the probes, [HK, 1, G]."""
        shares = []
        for end in (512, 1024, 1536, 1800):
            sealed = (end - 128) // 128 * 128
            query = q[0, :, end - 1].view(2, 1, 3, 64) * (64**-0.5 * math.log2(math.e))
            pages = valid & (torch.arange(16).view(4, 4) * 128 < sealed)
            scanned = codec.scan(codec.prepare(query), records, pages)
            chosen = reference.select(scanned, pages.sum(1) * 128, codec.selection._replace(tail=tail))
            chosen = chosen.movedim(0, -2).flatten(-2)[..., :sealed].numpy()
            weights = np.exp2(np.einsum("hqgd,htd->hqgt", query.double(), k[0, :, :sealed].double()))
            weights[..., :128] = 0  # the sink
            shares.append((weights * chosen).sum(-1) / weights.sum(-1))
        return np.mean(shares, axis=0)

    tail, larger = state.tuning.tail, state.tuning.tail * 2**0.5
    np.testing.assert_allclose(state.tuning.covered.numpy(), covered(tail), atol=1e-4)
    found, beyond = (each.mean(-1) if granularity == "group" else each for each in map(covered, (tail, larger)))
    assert (found >= 0.8 - 1e-4).all()
    assert ((beyond < 0.8 + 1e-4) | (tail.reshape(beyond.shape).numpy() == np.float32(state.tuning.tails[0]))).all()


@pytest.mark.parametrize("lesson", [SLOPE, TAIL])
def test_full_codes_stand_in_for_exact_keys(lesson):
    q, k, _ = peaked(512)
    codec = make_codec(config_with("fitted", rule="mass", value=0.8), HeadShape(1, 0, 2, 64, torch.float32), 0)
    pages = k[0].unflatten(1, (4, 128)).transpose(0, 1)
    records, valid = codec.encode(pages, pages).unsqueeze(0), torch.ones(1, 4, dtype=torch.bool)
    query = q[0, :, -1].view(2, 1, 3, 64) * (64**-0.5 * math.log2(math.e))
    true, proxy = (codec.measure(lesson, query, codec.tuning(), records, valid, keys).normalised() for keys in (k, None))
    torch.testing.assert_close(proxy, true, rtol=0.1, atol=0.02)


def test_a_packed_prefill_learns_at_every_end_of_a_granule():
    for tokens, probes in ((512, 0), (1023, 0), (1024, 1), (1600, 2)):  # the first chunk sees nothing sealed
        tuning = prefilled(config_with("fitted"), *peaked(tokens), exact=False).layers[0].states[0].tuning
        assert len(tuning.probes[SLOPE]) == len(tuning.probes[TAIL]) == probes
        assert (tuning.factor is None) == (probes == 0)


def test_single_tokens_of_a_prompt_teach_and_a_models_own_do_not():
    q, k, v = peaked(1100)
    config = config_with("fitted")
    cache = PackedCache(config, HeadShape(1, 0, k.shape[1], k.shape[3], torch.float32, group=3), 1)
    for decode, tokens in ((False, range(1100)), (True, range(600))):  # both pass the ends of granules
        for t in tokens:
            cache.step = Step([0], decode=decode)
            cache.update(k[:, :, t : t + 1], v[:, :, t : t + 1], 0)[0].attend(q[:, :, t : t + 1], 64**-0.5)
        assert len(cache.layers[0].states[0].tuning.probes[SLOPE]) == 2


def test_probes_of_long_packed_prompts_are_spread():
    state = SequenceState(CacheConfig(), HeadShape(1, 0, 1, 64, torch.float32), 64, None)
    query = torch.zeros(1, 512, 1, 64)
    probed = []
    for granule in range(1, 2049):  # a million tokens
        state.length = granule * GRANULE_TOKENS
        probed += [granule] * len(chunk_probes(state, query))
    assert probed[:18] == [*range(1, 17), 18, 20] and probed[-1] == 2048 and len(probed) == 16 + 8 * 7
    state.length = 2048 * GRANULE_TOKENS + 5
    assert not chunk_probes(state, query[:, :5])


def test_fitted_scores_are_closer_to_the_truth():
    q, k, v = peaked(2100)  # queries that follow the keys: what the sign plane loses is not independent of them
    prompt, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(0, 2048), slice(2048, None)))
    lossless = decode(prefilled(CacheConfig("exact", 16, 16), *prompt), *rest)
    errors = {}
    for score in ("mse", "fitted"):
        config = CacheConfig(key_bits=1, value_bits=8, score=score)
        errors[score] = (decode(prefilled(config, *prompt), *rest) - lossless).square().mean()
    assert errors["fitted"] < 0.7 * errors["mse"]


def test_skipping_what_does_not_matter_changes_almost_nothing():
    q, k, v = peaked(2100)
    k[:, :, 512:1024] -= 40 * q.mean(2, keepdim=True)[:, ::3] / q.mean(2, keepdim=True)[:, ::3].norm()
    prompt, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(0, 2048), slice(2048, None)))
    caches = [prefilled(config_with(skip_below=bits), *prompt) for bits in (None, 20.0)]
    plain, skipping = (decode(cache, *rest) for cache in caches)
    assert caches[1].reads.refined < caches[0].reads.refined
    assert (plain - skipping).abs().max() < 1e-3


# -------------------------------------------------------------------------------------------------- with real ranks

RULES = {
    "mass": config_with(rule="mass", value=0.9),
    "mass of heads, fitted": config_with("fitted", rule="mass", value=0.8, granularity="head"),
    "global": config_with(scope="global"),
    "global of heads, fitted": config_with("fitted", scope="global", granularity="head"),
    "skip": config_with(granularity="head", skip_below=1.0),
}
PACKED = ("mass of heads, fitted",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("tiny")))


def runs(mesh, folder: str) -> dict[str, tuple]:
    """Everything that must not depend on the number of ranks, for each rule: token ids, all logits, factors, refined tokens,
    mass."""
    served = model.load(folder, dtype=None, device=torch.device("cpu"))
    logits, head, step = [], served.head, served.step
    served.head = lambda hidden: logits.append(head(hidden)) or logits[-1]
    served.step = lambda *args: logits.append(step(*args)) or logits[-1]
    found = {}
    for name, prefill in [*((name, "exact") for name in RULES), *((name, "packed") for name in PACKED)]:
        logits.clear()
        engine = Engine(served, RULES[name], mesh, GenerateConfig(max_new_tokens=3, prefill=prefill, ignore_eos=True))
        result = engine.generate([tiny.prompt(1300), tiny.prompt(600)])
        tunings = [state.tuning for layer in engine.cache.layers for state in layer.states if state.tuning]
        learned = [str((tuning.factor, tuning.offset, tuning.tail)) for tuning in tunings]
        kv = report(engine, result, None, 0.0)["kv"]
        steps = [step.tolist() for step in logits]
        found[name, prefill] = result.token_ids, steps, learned, kv["refined_share"], kv.get("mass")
    return found


@pytest.fixture(scope="module")
def one_rank(folder) -> dict[str, tuple]:
    return simulated.run(1, runs, folder)[0]


@pytest.mark.parametrize(("start", "size"), [(run_ranks, 2), (simulated.run, 3), (simulated.run, 4)], ids=["2", "3", "4"])
def test_the_choice_is_the_same_for_every_number_of_ranks(folder, one_rank, start, size):
    """Two real ranks, and more of them in this process."""
    for found in start(size, runs, folder):
        for case, expected in one_rank.items():
            for part, whole in zip(found[case], expected, strict=True):
                assert part == whole, case


def test_the_rules_differ_and_are_reported(one_rank):
    assert len({str(found[1]) for found in one_rank.values()}) == len(one_rank)
    mass = one_rank["mass", "exact"][4]
    assert mass["target"] == 0.9 and len(mass["measured"]) == len(mass["worst_head"]) == 2
    assert all(0.9 - 1e-6 <= measured <= 1 for measured in mass["measured"])
    assert one_rank["global", "exact"][4] is None


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


def test_other_codecs_learn_nothing():
    for config in (CacheConfig("exact", 16, 16), CacheConfig("minmax"), CacheConfig(), config_with()):
        assert make_codec(config, HeadShape(1, 0, 2, 64, torch.float32), 0).tuning() is None
