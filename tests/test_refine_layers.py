"""Refinement in a layer that has learnt from its prompt, and the same choice for any number of real ranks."""

import math

import numpy as np
import pytest
import simulated
import tiny
import torch
from ranks import run_ranks

from bitkv_dist import model
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig, RefineConfig
from bitkv_dist.calibration import chunk_probes
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.tuning import SLOPE, TAIL
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.kernels import reference
from bitkv_dist.report import report
from bitkv_dist.sequence import SequenceState


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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


def test_other_codecs_learn_nothing():
    for config in (CacheConfig("exact", 16, 16), CacheConfig("minmax"), CacheConfig(), config_with()):
        assert make_codec(config, HeadShape(1, 0, 2, 64, torch.float32), 0).tuning() is None


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
