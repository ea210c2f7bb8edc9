"""The planner's bytes: those of the models, and those of a run, to the byte."""

from __future__ import annotations

import runpy
from dataclasses import replace

import calibrations
import pytest
import ranks
import simulated
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.placement import owner
from bitkv_dist.plan import memory
from bitkv_dist.plan.memory import Job, dense_page, every_rank, packed_page, prefill_peak, shares
from bitkv_dist.plan.models import MODELS, built_in, from_config
from bitkv_dist.plan.room import fitting_prefill, free_bytes
from bitkv_dist.report import cache_report

CPU = torch.device("cpu")
LLAMA = MODELS["llama-3.1-8b"]
SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}
CODECS = {
    "4bit": {"key_bits": 4, "value_bits": 4},
    "1bit, 2-bit values": {"key_bits": 1, "value_bits": 2},
    "tiered": {"scan_bits": 1, "sink_tokens": 600},
    "minmax": {"codec": "minmax", "key_bits": 4, "value_bits": 2},
    "exact": {"codec": "exact", "key_bits": 16, "value_bits": 16, "sink_tokens": 0},
    "window": {"eviction": "window", "eviction_keep": 700.0},
    "heavy": {"eviction": "heavy", "eviction_keep": 0.4},
}
LENGTHS, NEW = [1700, 1700, 1700], 5


def job(context: int = 1 << 17, preset: str = "1bit", **changed) -> Job:
    return Job(LLAMA, build(preset, {}).cache, context, **changed)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the hub counts the weights of their checkpoints
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-8b-1048k", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("mistral-7b", 7_248_023_552),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_built_in_shapes_have_their_models_parameters(name, parameters):
    assert MODELS[name].elements() == parameters


def test_names_in_any_case_and_on_the_hub():
    assert built_in("LLaMA-3.1-8B") is built_in("meta-llama/Llama-3.1-8B-Instruct") is LLAMA
    assert built_in("llama-3.1-9b") is None


ARCHITECTURES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"attention_bias": True}),
    ("phi3", {}),
]


@pytest.mark.parametrize(("architecture", "special"), ARCHITECTURES)
def test_a_configuration_has_the_parameters_of_its_model(architecture, special):
    cls, usual = tiny.CONFIGS[architecture]
    config = cls(**tiny.SIZES | usual | special)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    shape = from_config("tiny", config, model.head_dim_of(config), 4096)
    assert shape.elements() == sum(parameter.numel() for parameter in module.parameters())
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert shape.elements() - shape.read_elements() == looked_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), "llama")


def run(mesh, folder, cache: dict):
    """An engine run, and what is alive after it: (weights, sealed slabs, exact rows, slack, page tables, bits read per sealed
    element)."""
    served = model.load(str(folder), dtype=torch.float32, device=CPU, ranks=mesh)
    generate = GenerateConfig(max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(served, CacheConfig(**SMALL | cache), mesh, generate)
    engine.generate([tiny.prompt(length) for length in LENGTHS])
    states = [(layer, state) for layer in engine.cache.layers for state in layer.states]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in served.module.parameters())
    slabs = sum(state.sealed.bytes for _, state in states)
    exact = sum(state.exact.numel() * state.exact.element_size() for _, state in states)
    sealed = sum(len(list(state.pages())) * layer.codec.record_bytes * engine.heads.kv_heads for layer, state in states)
    read = cache_report(engine)["read_bits_per_element"]
    tables = sum(state.table.bytes for _, state in states if state.table is not None)
    return weights, slabs, exact, slabs - sealed, tables, read


def planned_job(folder, cache: dict, **changed) -> Job:
    config = AutoConfig.from_pretrained(folder)
    shape = from_config("tiny", config, model.head_dim_of(config), 4096)
    settings = {"batch": len(LENGTHS), "dtype": torch.float32} | changed
    return Job(shape, CacheConfig(**SMALL | cache), LENGTHS[0] + NEW, **settings)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_are_those_of_a_run(folder, codec, size):
    """Every class of live tensors, of every rank, to the byte."""
    everyone = simulated.run(size, run, folder, CODECS[codec])
    planned = every_rank(planned_job(folder, CODECS[codec]), 1, size)
    for (weights, slabs, exact, slack, tables, _), plan in zip(everyone, planned, strict=True):
        assert (weights, slabs, exact, slack, tables) == (plan.weights, plan.cache, plan.exact, plan.slack, plan.tables)


SPLIT = [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {}), ("phi3", {"pad_token_id": 0})]  # qwen3: tied


@pytest.mark.parametrize(("architecture", "special"), SPLIT)
@pytest.mark.parametrize(
    ("tp", "sp", "layout"), [(2, 1, "replicated"), (4, 1, "replicated"), (2, 2, "replicated"), (1, 4, "helix"), (4, 2, "helix")]
)
def test_bytes_are_those_of_ranks_that_share_weights(tmp_path, architecture, special, tp, sp, layout):
    """2 KV heads: 4 TP ranks keep two copies of them."""
    folder = tiny.save(tmp_path, architecture, **special)
    everyone = simulated.run(tp * sp, run, folder, CODECS["4bit"], tp=tp, layout=layout)
    planned = every_rank(planned_job(folder, CODECS["4bit"], layout=layout), tp, sp)
    for rank, (weights, slabs, exact, slack, *_) in enumerate(everyone):
        plan = planned[rank // tp]
        assert (weights, slabs, exact, slack) == (plan.weights, plan.cache, plan.exact, plan.slack)


@pytest.mark.parametrize("codec", ["4bit", "tiered", "minmax", "exact"])
def test_bits_read_are_those_of_a_run(folder, codec):
    ((*_, read),) = simulated.run(1, run, folder, CODECS[codec])
    found = planned_job(folder, CODECS[codec])
    elements = 2 * found.config.page_tokens * found.shape.head_dim * found.shape.layers
    assert found.page_bytes.read * 8 / elements == pytest.approx(read, rel=0.02)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
def test_shares_are_those_of_the_placement(size, batch):
    for tokens in (0, 1, 511, 512, 513, 5 * 512, 40 * 512 + 7):
        counted = [0] * size
        for sequence in range(batch):
            for token in range(0, tokens, 512):
                counted[owner(token // 512, sequence, size)] += min(512, tokens - token)
        assert shares(job(batch=batch), size, tokens) == counted


BENCHMARK = runpy.run_path(str(ranks.ROOT / "benchmarks" / "prefill_memory.py"))


def random_model(folder, tokens: int) -> model.ServedModel:
    return model.load(BENCHMARK["random_model"](folder / str(tokens), tokens), dtype=torch.float32, device=CPU)


def live_peak(served: model.ServedModel, tokens: int, cache: CacheConfig, **generate) -> tuple[int, memory.RankBytes]:
    """(peak of all live tensors, temporaries too; what the planner says) of reading so many tokens."""
    new, live = BENCHMARK["NEW_TOKENS"], BENCHMARK["Live"]()
    (mesh,) = simulated.run(1, lambda mesh: mesh)
    engine = Engine(served, cache, mesh, GenerateConfig(max_new_tokens=new, ignore_eos=True, **generate))
    with live:
        engine.generate([[7919 * i % 256 for i in range(tokens)]])
    shape = from_config("random", served.config, served.head_dim, served.max_positions)
    planned = memory.rank_bytes(Job(shape, cache, tokens + new, dtype=torch.float32, **generate), 1, 1)
    return live.peak + planned.weights, planned


def test_an_exact_prefill_peaks_where_planned(tmp_path):
    """No copy of the keys, nothing that grows beside the formula."""
    measured, planned = live_peak(random_model(tmp_path, 8192), 8192, CacheConfig())
    assert measured < planned.total - memory.SPARE_WORKSPACE_BYTES < 1.15 * measured


def test_an_exact_prefill_that_counts_attention_peaks_where_planned(tmp_path):
    """With the scores of every eighth query, and less memory for pages: what is planned without them is too little."""
    heavy = CacheConfig(eviction="heavy", eviction_keep=0.25)
    measured, planned = live_peak(random_model(tmp_path, 8192), 8192, heavy)
    assert measured < planned.total - memory.SPARE_WORKSPACE_BYTES < 1.15 * measured


def test_a_packed_prefill_peaks_at_the_same_height(tmp_path, monkeypatch):
    """Twice the prompt takes the packed pages of the second half more, and a few partials for one more level of the tree."""
    monkeypatch.setattr("bitkv_dist.subtree.LEAST_GRANULES_AT_ONCE", 2)
    monkeypatch.setattr("bitkv_dist.subtree.SMALL_PARTIALS", 0)
    peaks = {}
    for tokens in (4096, 8192):
        measured, planned = live_peak(random_model(tmp_path, tokens), tokens, CacheConfig(), prefill="packed")
        assert planned.total - memory.PACKED_SPARE_BYTES == pytest.approx(measured, rel=0.15), tokens
        peaks[tokens] = measured - planned.cache
    partial = 4 * 512 * 4 * (32 + 2)
    assert abs(peaks[8192] - peaks[4096]) < 3 * partial


@pytest.mark.parametrize("bits", [1, 4])
def test_a_packed_prefill_of_words_needs_what_plain_torch_takes(tmp_path, bits):
    """Words alone, and with planes behind them: the C++ kernels read decode steps only, a chunk's pages are decoded."""
    served = random_model(tmp_path, 4096)
    file = calibrations.fitted_to(served, tmp_path, "tailored", tiny.prompt(2048))
    measured, planned = live_peak(served, 4096, CacheConfig("tailored", bits, bits, calibration=file), prefill="packed")
    assert measured < planned.total - memory.PACKED_SPARE_BYTES < 1.4 * measured


def test_stored_bytes_are_those_of_the_readme():
    """Llama-3.1-8B, bytes per token: the presets' table."""
    for preset, expected in {"4bit": 34816, "tiered4": 35840, "2bit": 18432, "1bit": 10240, "exact": 131072}.items():
        page = packed_page(build(preset, {}).cache, LLAMA.layers, LLAMA.head_dim, torch.bfloat16)
        assert page.stored * LLAMA.kv_heads == expected * 128


def test_prefill_peak_is_hidden_states_one_layer_and_a_constant():
    short, long = job(1 << 17), job(1 << 18)
    for sp in (1, 2, 4):
        rank_tokens = (1 << 17) // sp
        more = prefill_peak(long, 1, sp, 2 * rank_tokens) - prefill_peak(short, 1, sp, rank_tokens)
        assert more == rank_tokens * 4096 * 2 + (1 << 17) * 2 * 8 * 128 * 2
    packed = [prefill_peak(replace(each, prefill="packed"), 1, 1, each.context) for each in (short, long)]
    assert packed[0] == packed[1] < prefill_peak(short, 1, 1, 1 << 17)


def chosen(mesh, folder) -> str:
    """How an engine with `prefill: auto` reads a prompt."""
    served = model.load(str(folder), dtype=torch.float32, device=CPU)
    engine = Engine(served, CacheConfig(**SMALL), mesh, GenerateConfig(max_new_tokens=NEW, ignore_eos=True, prefill="auto"))
    engine.generate([tiny.prompt(1700)])
    return engine.prefill


@pytest.mark.parametrize("size", [1, 2])
def test_the_engine_reads_exactly_where_it_fits(folder, size, monkeypatch):
    needed = max(rank.total - rank.weights for rank in every_rank(planned_job(folder, {}, batch=1), 1, size))
    for free, prefill in ((needed, "exact"), (needed - 1, "packed"), (None, "exact")):
        monkeypatch.setattr("bitkv_dist.engine.free_bytes", lambda device, ranks, free=free: free)
        assert simulated.run(size, chosen, folder) == [prefill] * size


def test_one_tight_rank_decides_for_all(folder):
    asked = planned_job(folder, {}, batch=1)
    needs = [rank.total - rank.weights for rank in every_rank(asked, 2, 2) for _ in range(2)]
    assert fitting_prefill(asked, 2, 2, needs) == "exact"
    for rank in range(4):
        free = [need - (other == rank) for other, need in enumerate(needs)]
        assert fitting_prefill(asked, 2, 2, free) == "packed"


def test_free_memory_is_shared_by_the_ranks_of_a_host():
    alone, one_of_four = (free_bytes(CPU, ranks) for ranks in (1, 4))
    assert 0 < one_of_four < alone / 2 and alone < 1 << 48


def test_fp8_is_half_of_bf16():
    whole, half = dense_page(job(), 2), dense_page(job(), 1)
    assert whole.stored == 2 * half.stored == LLAMA.layers * 128 * 128 * 2 * 2
    assert whole == packed_page(build("exact", {}).cache, 32, 128, torch.bfloat16)

