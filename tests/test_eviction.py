"""A bounded cache: which pages stay, that their bytes do not change, and that no number of ranks changes the choice."""

from __future__ import annotations

import functools
from pathlib import Path

import calibrations
import pytest
import simulated
import tiny
import torch
from ranks import run_ranks

from bitkv_dist import layer as layers
from bitkv_dist import model as models
from bitkv_dist import subtree
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.eviction import UNIT, PageTable, prompt_mass, prompt_seen
from bitkv_dist.kernels import dispatch
from bitkv_dist.report import report
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save

P, D, HK, G = 64, 32, 2, 2
SMALL = {"page_tokens": P, "sink_tokens": P, "recent_tokens": P}
DEPTHS = {
    "1bit": {"key_bits": 1, "value_bits": 1},
    "tiered4": {"scan_bits": 1},
    "exact": {"codec": "exact", "key_bits": 16, "value_bits": 16},
    "minmax": {"codec": "minmax", "key_bits": 2, "value_bits": 2},
}
PROMPTS = [tiny.prompt(1300), tiny.prompt(500)]
NEW = 70  # tokens: a page is sealed on the way


def config(depth: str = "1bit", rule: str = "heavy", keep: float | None = 512.0, **more) -> CacheConfig:
    return CacheConfig(**SMALL | DEPTHS.get(depth, {}) | more, eviction=rule, eviction_keep=keep)


def filled(cache: CacheConfig, tokens: int, chunk: int = 1, seed: int = 0) -> tuple[PackedCache, torch.Tensor, torch.Tensor]:
    """A cache of one layer that was fed random tokens, `chunk` at a time, all k, v [2, HK, T, D], and the last outputs."""
    generator = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(heads, tokens, D, generator=generator) for heads in (HK * G, 2 * HK))
    kv = kv.unflatten(0, (2, HK))
    held = PackedCache(cache, HeadShape(1, 0, HK, D, torch.float32, group=G), 1)
    held.reserve(0, tokens)
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        held.step = Step([0], count_reads=True)
        layer, _ = held.update(*kv[:, None, :, part], 0)
        out = layer.attend(q[None, :, part], D**-0.5)
    return held, kv, torch.cat((out[0, -1].flatten(), q[:, -1].flatten()))


# -- what is asked for


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eviction": "lru"}, "cache.eviction 'lru': must be one of none, window, heavy"),
        ({"eviction": "heavy"}, "cache.eviction 'heavy': how much stays is not said"),
        ({"eviction_keep": 0.5}, "cache.eviction_keep 0.5: nothing is evicted without a rule"),
        ({"eviction": "window", "eviction_keep": -1.0}, "cache.eviction_keep -1.0: must be a share"),
        ({"eviction": "window", "eviction_keep": 4.5}, "cache.eviction_keep 4.5: must be a share"),
        ({"eviction": "heavy", "eviction_keep": 0.0}, "cache.eviction_keep 0.0: leaves rule heavy nothing"),
        ({"eviction": "heavy", "eviction_keep": 0.5, "scan_bits": 1, "score": "fitted"}, "score fitted learns from all pages"),
        ({"eviction": "window", "eviction_keep": 0.5, "scan_bits": 1, "refine": RefineConfig(rule="mass", value=0.9)},
         "refine.rule mass learns from all pages"),
        ({"eviction": "window", "eviction_keep": 0.5, "codec": "looped", "key_bits": 2, "value_bits": 2},
         "cache.eviction 'window': codec looped seals a page of all loops at once"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(fields, said):
    with pytest.raises(ValueError, match=said) as error:
        CacheConfig(**fields)
    assert "\n" not in str(error.value) and ";" in str(error.value)


def test_shares_and_tokens_in_pages():
    assert [config(keep=0.25).kept_pages(n) for n in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 25]
    assert [config(keep=65.0).kept_pages(n) for n in (0, 1, 2, 3, 100)] == [0, 1, 2, 2, 2]
    assert config(rule="window", keep=0).kept_pages(9) == 0 and config(rule="none", keep=None).kept_pages(9) == 9


# -- the choice


def test_the_page_of_least_mass_goes_and_unseen_pages_stay():
    table = PageTable(config(), 2, together=False)
    for page in (1, 2, 3):
        table.place(page, 3)
    table.mass[:] = torch.tensor([[9, 1], [4, 8], [0, 0]]) * 1000
    table.seen[:2] = 10
    table.place(4, 3)  # page 3 was seen by nobody yet
    assert table.pages.tolist() == [[1, 4], [4, 2], [3, 3]]
    assert table.slots(4) == {0: [1], 1: [0]} and table.slots(9) == {}
    table.seen[:] = 10
    table.mass[:] = torch.tensor([[9, 0], [4, 0], [9, 0]])
    table.place(5, 3)  # of equal pages the older
    assert table.pages.tolist() == [[1, 4], [5, 5], [3, 3]]


def test_joined_heads_keep_the_same_pages():
    table = PageTable(config(), 2, together=True)
    table.choose(3, 4, 2, torch.tensor([[5, 0], [1, 1], [0, 9], [2, 2]]), torch.full((4, 2), 7))
    assert table.pages.tolist() == [[3, 3], [5, 5]]
    assert table.mass.tolist() == [[5, 0], [0, 9]]


def test_the_window_keeps_the_newest_pages():
    held, _, _ = filled(config(rule="window", keep=3 * P), 15 * P, 70)
    table = held.layers[0].states[0].table
    sealed = held.layers[0].states[0].sealed_end // P
    assert sorted(table.pages[:, 0].tolist()) == [sealed - 3, sealed - 2, sealed - 1]


@pytest.mark.parametrize("chunk", [1, 130])
def test_masses_are_those_of_the_exact_softmax(chunk):
    """Codec exact with room for all: what the table has counted is the sum of softmax weights over queries and heads."""
    tokens = 10 * P + 5
    held, kv, _ = filled(config("exact", keep=100.0 * P), tokens, chunk)
    q = torch.randn(HK * G, tokens, D, generator=torch.Generator().manual_seed(0)).unflatten(0, (HK, G))
    scores = torch.einsum("hgqd,hkd->hgqk", q, kv[0]) * D**-0.5
    weight = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    table, layer = held.layers[0].states[0].table, held.layers[0]
    wanted = torch.zeros(table.mass.shape)
    starts = range(0, tokens, chunk)
    for start in starts:  # a chunk sees what is sealed before it
        end = int(layer.evictor.sealed_ends(start, start + 1))
        for slot, page in enumerate(table.pages[:, 0].tolist()):
            if (page + 1) * P <= end:
                wanted[slot] += weight[:, :, start : start + chunk, page * P : (page + 1) * P].sum((1, 2, 3))
    torch.testing.assert_close((table.mass / UNIT).float(), wanted, atol=1e-3, rtol=1e-4)


def test_a_prompts_masses_are_those_of_every_eighth_query():
    cache, tokens = config(), 9 * P + 11
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(HK, G, tokens, D, generator=generator), torch.randn(HK, tokens, D, generator=generator)
    ends = (torch.arange(1, tokens + 1) - P).div(P, rounding_mode="floor").mul(P).clamp(min=P)
    found = sum(
        torch.nn.functional.pad(prompt_mass(q[:, :, a : a + 50], k[:, : a + 50], a, ends[a : a + 50], cache), (0, 0, 0, 9))[:8]
        for a in range(0, tokens, 50)
    )
    scores = torch.einsum("hgqd,hkd->hgqk", q, k).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    weight = torch.softmax(scores * torch.log(torch.tensor(2.0)), -1)[:, :, 7::8, : 8 * P].unflatten(-1, (8, P)).sum(-1)
    page = torch.arange(8) * P
    weight = weight * ((page >= P) & (page < ends[7::8, None]))
    torch.testing.assert_close((found / UNIT).float(), 8 * weight.sum((1, 2)).T, atol=1e-3, rtol=1e-4)
    assert torch.equal(prompt_seen(ends, cache, 8)[1:], 8 * (page[1:] < ends[7::8, None]).sum(0))


@pytest.mark.parametrize("queries", [1 << 25, 40])
def test_masses_are_the_same_when_granules_are_walked_node_by_node(monkeypatch, queries):
    """One partial at a time, in the tree's order, for all positions of a chunk or for some of them at a time."""
    whole, _, _ = filled(config("tiered4", keep=100.0 * P), 52 * P, chunk=300)
    monkeypatch.setattr(subtree, "LEAST_GRANULES_AT_ONCE", 1)
    monkeypatch.setattr(subtree, "SMALL_PARTIALS", 0)
    monkeypatch.setattr(layers, "queries_at_once", lambda elements: queries)
    walked, _, _ = filled(config("tiered4", keep=100.0 * P), 52 * P, chunk=300)
    tables = [held.layers[0].states[0].table for held in (whole, walked)]
    assert len(tables[0]) > 6 * 512 // P and (tables[0].mass[:40] > 0).all()
    assert all(torch.equal(getattr(tables[0], name), getattr(tables[1], name)) for name in ("pages", "mass", "seen"))


@pytest.mark.parametrize("depth", ["1bit", "tiered4"])
def test_kernels_agree_about_the_mass_of_pages(depth):
    masses = []
    for kernels in ("reference", None):
        with dispatch.forced(kernels) if kernels else torch.no_grad():
            held, _, _ = filled(config(depth, keep=100.0 * P), 12 * P, chunk=40)
        masses.append(held.layers[0].states[0].table.mass / UNIT)
    assert masses[0].sum() > 10
    torch.testing.assert_close(*masses, rtol=0.02, atol=0.05)


# -- attention to what is left


@pytest.mark.parametrize("depth", ["1bit", "exact", "minmax"])
@pytest.mark.parametrize("rule", ["window", "heavy"])
def test_attention_is_that_to_the_kept_tokens(depth, rule):
    tokens = 14 * P + 7
    held, kv, last = filled(config(depth, rule, 4 * P), tokens, chunk=P)
    out, q = last.split(HK * G * D)
    layer, state = held.layers[0], held.layers[0].states[0]
    for head in range(HK):
        keys, values = [state.rows()[side, head] for side in (0, 1)]
        for slot in range(len(state.table)):
            granule, place = divmod(slot + 1, 512 // P)
            k, v = layer.codec.decode(state.sealed.record(granule, place)[None])
            keys, values = torch.cat((keys, k[0, head])), torch.cat((values, v[0, head]))
            if depth == "exact":
                page = state.page_in(slot + 1, head)
                assert torch.equal(k[0, head], kv[0, head, page * P : (page + 1) * P])
        assert len(keys) == P + 4 * P + tokens - state.sealed_end
        if depth == "1bit":  # the correction of scores is left out here
            continue
        query = q.view(HK, G, D)[head]
        wanted = torch.softmax(query @ keys.T * D**-0.5, -1) @ values
        torch.testing.assert_close(out.view(HK, G, D)[head], wanted, atol=2e-5, rtol=1e-4)


def test_kept_bytes_are_those_without_eviction_and_memory_stays_flat():
    whole, _, _ = filled(config(rule="none", keep=None), 40 * P, P)
    digests = whole.page_digests()
    for rule in ("window", "heavy"):
        small, _, _ = filled(config(rule=rule, keep=6 * P), 40 * P, P)
        found = small.page_digests()
        assert len(found) == 6 * HK and all(digests[key] == value for key, value in found.items())
        assert small.sealed_tokens(0) == 6 * P and small.evicted_tokens(0) == 32 * P
        longer, _, _ = filled(config(rule=rule, keep=6 * P), 80 * P, P)
        assert longer.bytes == small.bytes < whole.bytes
        sealed = [held.layers[0].states[0].sealed for held in (small, longer, whole)]
        assert [5 * store.bytes for store in sealed[:2]] == [sealed[2].bytes] * 2  # one granule of five


def test_chunks_of_any_size_keep_the_same_window():
    found = [filled(config(rule="window", keep=0.3), 20 * P + 9, chunk)[0].page_digests() for chunk in (7, 64, 200)]
    assert found[0] == found[1] == found[2]


# -- whole runs


@functools.cache
def served(folder: Path, rank: int) -> models.ServedModel:
    return models.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), num_key_value_heads=2, num_attention_heads=4, head_dim=32)


def run(mesh, model, cache: CacheConfig, prefill="exact", prompts=PROMPTS, place=None, heads_at_once=None) -> dict:
    how = GenerateConfig(max_new_tokens=NEW, prefill=prefill)
    engine = Engine(served(model, mesh.world.rank), cache, mesh, how)
    if heads_at_once:
        engine.fitting_heads = lambda prompts: heads_at_once
    result = engine.generate(prompts, on_filled=place and (lambda logits: save(engine, place, logits)))
    return {"tokens": result.token_ids, "digest": engine.cache_digest(), "kv": report(engine, result, None, 0.0)["kv"]}


@pytest.fixture(scope="module")
def books(model, tmp_path_factory):
    made = {"layers": 2, "heads": 2, "dim": 32, "fingerprint": f"{served(model, 0).fingerprint:016x}"}
    return {codec: calibrations.make(tmp_path_factory.mktemp("books"), codec, **made) for codec in ("tailored", "residual")}


@pytest.mark.parametrize(
    ("depth", "rule", "prefill"),
    [
        ("tiered4", "heavy", "exact"),
        pytest.param("1bit", "heavy", "packed", marks=pytest.mark.slow),
        pytest.param("tailored", "heavy", "exact", marks=pytest.mark.slow),
        pytest.param("residual", "heavy", "packed", marks=pytest.mark.slow),
        pytest.param("tiered4", "window", "exact", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_answer_whatever_the_number_of_ranks(model, books, depth, rule, prefill):
    bits = {"tailored": 1, "residual": 2}.get(depth)
    coded = {"codec": depth, "key_bits": bits, "value_bits": bits, "calibration": books[depth]} if bits else {}
    cache = config(depth, rule, 0.4, **coded)
    wanted, *others = [simulated.run(size, run, model, cache, prefill)[0] for size in (1, 2, 4)]
    for found in others:
        assert found["tokens"] == wanted["tokens"] and found["digest"] == wanted["digest"]
    kept = wanted["kv"]["eviction"]
    assert kept["rule"] == rule and kept["keep"] == 0.4 and 0.4 <= kept["kept_share_of_sealed"] < 0.5
    assert kept["evicted_tokens"] > 500


def rules(mesh, folder) -> dict[str, dict]:
    """A run by each rule, of the tokens and of the sealed bytes that are its answer."""
    found = {rule: run(mesh, folder, config("tiered4", rule, 0.4)) for rule in ("window", "heavy")}
    return {rule: {name: answer[name] for name in ("tokens", "digest")} for rule, answer in found.items()}


def test_two_gloo_ranks_answer_as_one(model):
    """Masses and pages travel through real process groups."""
    (alone,) = simulated.run(1, rules, model)
    assert alone["window"]["digest"] != alone["heavy"]["digest"]
    for found in run_ranks(2, rules, model):
        assert found == alone


@pytest.mark.slow
def test_snapshots_of_a_bounded_cache_go_on_at_any_number_of_ranks(model, tmp_path):
    cache = config("tiered4", "heavy", 0.3)
    first = simulated.run(2, run, model, cache, "exact", PROMPTS, tmp_path / "s")[0]
    for size in (1, 4):
        assert simulated.run(size, again, model, cache, tmp_path / "s")[0] == first["tokens"]


def again(mesh, model, cache, place) -> list[list[int]]:
    engine = Engine(served(model, mesh.world.rank), cache, mesh, GenerateConfig(max_new_tokens=NEW))
    start = load(engine, place, Manifest.read(place), PROMPTS)
    return engine.generate(PROMPTS, fill=start.fill).token_ids


def test_a_prompt_whose_keys_are_shared_out_keeps_the_same_pages(model):
    cache = config("1bit", "heavy", 0.4)
    wanted = simulated.run(2, run, model, cache, "exact", [tiny.prompt(2000)])[0]
    found = simulated.run(2, run, model, cache, "exact", [tiny.prompt(2000)], None, 1)[0]
    assert (found["tokens"], found["digest"]) == (wanted["tokens"], wanted["digest"])


@pytest.mark.parametrize(("tp", "layout"), [(1, "helix"), (4, "replicated")])
def test_heads_of_other_ranks_count_too(model, tp, layout):
    """Helix, and more TP ranks than KV heads, leave a rank the roots of its own heads alone."""
    wanted = simulated.run(tp, run_of_copies, model, tp=tp)[0]
    found = simulated.run(2 * tp, run_of_copies, model, tp=tp, layout=layout)[0]
    assert found["pages"] == wanted["pages"]


def run_of_copies(mesh, folder) -> dict:
    own = models.load(str(folder), dtype=torch.float32, device=torch.device("cpu"), ranks=mesh)
    engine = Engine(own, config("1bit", "heavy", 0.4), mesh, GenerateConfig(max_new_tokens=140))
    engine.generate([tiny.prompt(900)])
    return {"pages": [layer.states[0].table.pages.tolist() for layer in engine.cache.layers]}
