"""Prompt keys that are kept by their owners and gathered some heads at a time: the same bits in less memory."""

import pytest
import simulated
import tiny
import torch

from bitkv_dist import model, prefill
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.placement import owned_granules, owner
from bitkv_dist.prompt import fitting_heads, prompt_bytes

SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 70}
CACHES = {
    "4bit": CacheConfig(**SMALL),
    "fitted": CacheConfig(**SMALL, scan_bits=1, score="fitted", refine=RefineConfig(rule="mass", value=0.9)),
}
PROMPTS = [tiny.prompt(1900), tiny.prompt(40), tiny.prompt(700, seed=2)]
HEADS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("prompt"), num_attention_heads=8, num_key_value_heads=HEADS, head_dim=16)


def answer(mesh, folder, cache: str, heads_at_once: int = HEADS, chunk: int = 512, dtype=torch.float32, **generate):
    """Tokens, digest of the sealed bytes, exact rows, what was learnt, and the most that prompt keys took."""
    served = model.load(str(folder), dtype=dtype, device=torch.device("cpu"), ranks=mesh)
    settings = {"max_new_tokens": 5, "ignore_eos": True, "chunk": chunk} | generate
    engine = Engine(served, CACHES[cache], mesh, GenerateConfig(model=str(folder), **settings))
    if not generate:  # these prompts are so short that the buffers of an exchange are more than they
        engine.fitting_heads = lambda prompts: heads_at_once
    taken = []

    def watch(done, total):
        states = engine.cache.layers[-1].states
        taken.append(sum(state.prompt.rows.nbytes for state in states if state.prompt is not None))

    result = engine.generate(PROMPTS, on_prefill=watch)
    learnt = [None if state.tuning is None else state.tuning.tail for state in engine.cache.layers[0].states]
    rows = [state.rows().clone() for layer in engine.cache.layers for state in layer.states]
    return result.token_ids, engine.cache_digest(), rows, learnt, max(taken)


@pytest.mark.parametrize("cache", CACHES)
def test_the_answer_does_not_depend_on_it(folder, cache):
    (whole,) = simulated.run(1, answer, folder, cache)
    for ranks, at_once, chunk in [(2, 1, 512), (3, 3, 512), (4, 2, 128)]:
        for found in simulated.run(ranks, answer, folder, cache, at_once, chunk):
            assert found[:2] == whole[:2]
            for mine, wanted in zip([*found[2], *found[3]], [*whole[2], *whole[3]], strict=True):
                assert mine is wanted is None or torch.equal(mine, wanted)
            assert found[4] < whole[4]


def test_nor_in_bfloat16(folder):
    """Nor on threads: the sums of a row's products are those of no other row."""
    threads, found = torch.get_num_threads(), []
    try:
        for count, ranks, at_once, chunk in [(1, 1, HEADS, 512), (2, 1, HEADS, 128), (1, 2, 1, 512), (2, 3, 3, 64)]:
            torch.set_num_threads(count)
            found += simulated.run(ranks, answer, folder, "4bit", at_once, chunk, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    for other in found:
        assert other[:2] == found[0][:2] and all(map(torch.equal, other[2], found[0][2]))


@pytest.mark.parametrize("layout", ["replicated", "helix"])
def test_nor_where_heads_are_shared_too(folder, layout):
    """Two tensor-parallel ranks times two: every rank has two KV heads, and gathers both or one."""
    whole, parts = (simulated.run(4, answer, folder, "4bit", at_once, tp=2, layout=layout) for at_once in (2, 1))
    for found, wanted in zip(parts, whole, strict=True):
        assert found[:2] == wanted[:2] and found[4] < wanted[4]
        assert all(map(torch.equal, found[2], wanted[2]))


def test_gathered_keys_leave_no_holes_in_the_heap(folder, monkeypatch):
    """Large blocks go back to the system where each round gathers anew, and only there."""
    asked = []
    monkeypatch.setattr(prefill, "return_large_blocks", lambda: asked.append(1))
    for ranks, at_once, times in ((1, 1, 0), (2, HEADS, 0), (2, 1, 2)):
        asked.clear()
        simulated.run(ranks, answer, folder, "4bit", at_once)
        assert len(asked) == times


def test_heads_at_once():
    """As many as fit; the keys of other ranks are what fewer heads save."""
    lengths, heads = [100_000, 3], (8, 128, 2)
    assert fitting_heads(None, lengths, heads, 4) == 8
    assert fitting_heads(prompt_bytes(lengths, heads, 4, 8), lengths, heads, 4) == 8
    sizes = [prompt_bytes(lengths, heads, 4, count) for count in range(1, 8)]
    assert sizes == sorted(sizes)
    for count, size in enumerate(sizes, start=1):
        wanted = max(other for other in range(1, 9) if prompt_bytes(lengths, heads, 4, other) <= size)
        assert fitting_heads(size, lengths, heads, 4) == wanted >= count
    with pytest.raises(ValueError, match=r"^generate.prefill_memory_gb 0.01: .* take at least 0.162 GB on a rank;"):
        fitting_heads(1e7, lengths, heads, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_owned_granules(ranks):
    for granules in (0, 1, 5, 64, 1001):
        for sequence in (0, 2):
            owners = [owner(granule, sequence, ranks) for granule in range(granules)]
            assert owned_granules(granules, sequence, ranks) == [owners.count(rank) for rank in range(ranks)]


def test_too_little_memory_is_refused(folder):
    with pytest.raises(ValueError, match=r"more sequence ranks, or --prefill packed$"):
        simulated.run(2, lambda mesh: answer(mesh, folder, "4bit", prefill_memory_gb=1e-6))
    with pytest.raises(ValueError, match=r"generate.prefill_memory_gb 0.0: must be above 0 GB"):
        GenerateConfig(prefill_memory_gb=0.0)
    with pytest.raises(ValueError, match=r"a packed prefill keeps no prompt keys"):
        GenerateConfig(prefill_memory_gb=1.0, prefill="packed")
