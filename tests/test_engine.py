"""The engine end to end on tiny random models: it answers as the model does, whatever the number of ranks and threads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import pytest
import ranks
import simulated
import tiny
import torch
from recorded import CODECS, EXACT, SAMPLED, SMALL, alone, start
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("llama"), intermediate_size=64, head_dim=16)


# ------------------------------------------------------------------------------------------- it answers as the model does


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_exact_gives_the_tokens_of_generate(architecture, tmp_path):
    """C12: 64 greedy tokens of a batch of prompts of different lengths, and the logits of every step within 1e-4."""
    folder = tiny.save(tmp_path, architecture, seed=3)
    prompts = [tiny.prompt(length) for length in (1, 33, 7, 130)]

    def ours(mesh):
        engine = start(mesh, folder, EXACT | SMALL, {"max_new_tokens": 64})
        return engine.generate(prompts), torch.stack(engine.logits, dim=1)

    result, logits = alone(ours)
    assert result.finish_reason == ["length"] * 4 and result.prompt_tokens == [1, 33, 7, 130]
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    for prompt, found, steps in zip(prompts, result.token_ids, logits, strict=True):
        wanted = stock.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :].tolist()
        assert found == wanted
        with torch.no_grad():
            forced = stock(torch.tensor([prompt + found[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(steps, forced, atol=1e-4, rtol=0)
    assert len({tuple(found) for found in result.token_ids}) == 4  # different prompts, different answers


def test_exact_codec_of_a_long_prompt_over_many_pages(llama):
    """1,400 tokens, nearly all of them in pages of 3 granules on 3 ranks: still the tokens of `generate`."""
    prompt = tiny.prompt(1400)

    def ours(mesh):
        return start(mesh, llama, EXACT | SMALL, {"max_new_tokens": 16}).generate([prompt]).token_ids[0]

    stock = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager", dtype=torch.float32).eval()
    wanted = stock.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, 1400:].tolist()
    assert simulated.run(3, ours) == [wanted] * 3


def test_many_bits_are_close_to_exact_and_few_are_not(llama):
    """Logits after 8 forced steps: 8 bits leave the rounding of the INT8 query, and the error grows as bits go."""
    prompts, forced = [tiny.prompt(700)], tiny.prompt(8, seed=1)

    def logits(mesh, cache):
        engine = start(mesh, llama, cache | SMALL, {"max_new_tokens": 0})
        engine.generate(prompts)
        seen = []
        for token in forced:
            engine.pending = [[token]]
            with torch.inference_mode():
                seen.append(engine.step([0]))
        return torch.cat(seen)

    exact = alone(logits, EXACT)
    errors = [((alone(logits, {"key_bits": b, "value_bits": b}) - exact).norm() / exact.norm()).item() for b in (8, 4, 2, 1)]
    assert errors == sorted(errors)
    assert errors[0] < 0.04 and errors[3] > 5 * errors[0]


# -------------------------------------------------------------------------------------- one answer, whatever the ranks


@dataclass(frozen=True)
class Job:
    """One or more turns of a batch on a fresh engine."""

    cache: dict
    turns: list[list[int]]  # prompt lengths of each turn
    generate: dict = field(default_factory=dict)


NO_SINK = SMALL | {"sink_tokens": 0, "recent_tokens": 5}
JOBS = {
    "C25, 4 bits": Job(CODECS["4bit"] | NO_SINK, [[1, 2, 3, 5, 7, 17, 33, 70]], {"max_new_tokens": 6}),
    "4 bits": Job(CODECS["4bit"] | SMALL, [[1300, 40, 530]]),
    "4 bits, sampled": Job(CODECS["4bit"] | SMALL, [[1150, 600]], SAMPLED),
    "2 bits": Job(CODECS["2bit"] | SMALL, [[70, 1100]]),
    "2 bits, sampled": Job(CODECS["2bit"], [[520, 300]], SAMPLED),
    "tiered4": Job(CODECS["tiered4"] | SMALL, [[1600, 33]]),
    "tiered4, sampled": Job(CODECS["tiered4"] | SMALL, [[17, 1030]], SAMPLED | {"top_k": 50}),
    "minmax": Job(CODECS["minmax"] | SMALL | {"value_group_channels": 16}, [[1100, 513]]),
    "minmax, sampled": Job(CODECS["minmax"] | SMALL | {"value_group_channels": 16}, [[600]], SAMPLED),
    "exact": Job(EXACT | SMALL, [[1100, 513]]),
    "packed prefill": Job(CODECS["tiered4"] | SMALL, [[1200, 90]], {"prefill": "packed", "chunk": 128}),
    "small chunks": Job(CODECS["4bit"] | SMALL, [[1041, 300]], {"chunk": 64}),
    # A batch of 5 and a last chunk of 5 tokens: with so few rows torch's matrix products round as the threads have it.
    "rows of five": Job(CODECS["4bit"] | SMALL, [[517, 5, 40, 300, 33]]),
    "three turns": Job(CODECS["2bit"] | SMALL, [[600, 20], [1, 500], [30, 33]], {"max_new_tokens": 4}),
}


def run_job(mesh, folder, job: Job) -> dict:
    """What comes out, as plain data: it travels between processes."""
    engine = start(mesh, folder, job.cache, {"max_new_tokens": 12} | job.generate)
    results = []
    for turn, lengths in enumerate(job.turns):
        prompts = [tiny.prompt(length, 10 * turn + row) for row, length in enumerate(lengths)]
        results.append(engine.generate(prompts, keep=turn > 0))
    return {
        "tokens": [result.token_ids for result in results],
        "finish": [result.finish_reason for result in results],
        "logits": [hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16] for logits in engine.logits],  # to the bit
        "digest": engine.cache_digest(),
        "rotation": engine.rotation_digest,
    }


def run_jobs(mesh, folder, names: list[str], threads: int = 1) -> dict[str, dict]:
    torch.set_num_threads(threads)
    return {name: run_job(mesh, folder, JOBS[name]) for name in names} | {"gathers": mesh.gathers}


@pytest.fixture(scope="module")
def answers(llama) -> dict[str, dict]:
    """Every job on one rank."""
    return alone(run_jobs, llama, list(JOBS))


def assert_same(everyone: list[dict[str, dict]], answers: dict[str, dict]) -> None:
    """Token ids, finish reasons, logits and digests of all ranks; and all of them called the same number of collectives."""
    assert len({rank.pop("gathers") for rank in everyone}) == 1
    for rank in everyone:
        for name, found in rank.items():
            assert found == answers[name], name


def test_real_ranks_give_the_answer_of_one(llama, answers):
    """With gloo; that shapes are equal is checked at every gather."""
    assert_same(ranks.run_ranks(2, run_jobs, llama, list(JOBS), timeout_s=180), answers)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4, 8])
def test_other_numbers_of_real_ranks(llama, answers, size):
    assert_same(ranks.run_ranks(size, run_jobs, llama, list(JOBS), timeout_s=300), answers)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["C25, 4 bits", "tiered4, sampled", "packed prefill", "minmax", "three turns"])
def test_simulated_ranks_give_the_answer_of_one(llama, answers, size, name):
    assert_same(simulated.run(size, run_jobs, llama, [name]), answers)


def test_answers_differ_where_they_should(answers):
    """Else equality above would say little: jobs give different digests and tokens, and no answer repeats one token."""
    found = [answers[name] for name in JOBS]
    for key in ("digest", "tokens", "logits"):
        assert len({str(answer[key]) for answer in found}) == len(JOBS)
    assert all(len(set(tokens)) > 1 for answer in found for turn in answer["tokens"] for tokens in turn)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_threads_change_no_bit(llama, answers, monkeypatch, size):
    """Ranks with two threads each give the bits of one rank with one, and so of two ranks with one."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")  # two threads on a busy core would spin
    names = ["4 bits", "tiered4, sampled", "minmax", "rows of five"]
    assert_same(ranks.run_ranks(size, run_jobs, llama, names, 2, timeout_s=180), answers)


def test_a_sequence_answers_the_same_alone(llama):
    """C23: what else is in the batch changes no token; logits only as far as another number of rows may round."""
    job = replace(JOBS["4 bits"], turns=[[300, 40]])

    def one(mesh, length, row):
        engine = start(mesh, llama, job.cache, {"max_new_tokens": 12})
        return engine.generate([tiny.prompt(length, row)]).token_ids[0], torch.cat(engine.logits)

    def both(mesh):
        engine = start(mesh, llama, job.cache, {"max_new_tokens": 12})
        return engine.generate([tiny.prompt(300, 0), tiny.prompt(40, 1)]).token_ids, torch.stack(engine.logits, dim=1)

    tokens, logits = alone(both)
    for row, length in enumerate((300, 40)):
        found, steps = alone(one, length, row)
        assert found == tokens[row]
        torch.testing.assert_close(steps, logits[row], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- warm-up and failures


def test_warm_up_leaves_no_trace(llama):
    def run(mesh, warmup):
        engine = start(mesh, llama, CODECS["tiered4"] | SMALL, {"max_new_tokens": 6, "warmup": warmup, **SAMPLED})
        result = engine.generate([tiny.prompt(400)])
        return result.token_ids, engine.cache_digest(), engine.cache.reads.bits

    assert alone(run, True) == alone(run, False)


@pytest.mark.parametrize(
    ("length", "said"), [(20, "rank 0: logits are not finite, first in the attention of layer 1"), (400, "layer 1, token 64")]
)
def test_weights_that_are_not_finite_are_named(llama, length, said):
    """C06: an error with rank and layer instead of token 0 for ever."""

    def run(mesh):
        engine = start(mesh, llama, CODECS["4bit"] | SMALL, {"max_new_tokens": 3})
        with torch.no_grad():
            engine.model.module.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
        engine.generate([tiny.prompt(length)])

    with pytest.raises(FloatingPointError, match=said):
        alone(run)


def test_times_and_counts(llama):
    def run(mesh):
        progress = []
        result = start(mesh, llama, CODECS["4bit"] | SMALL, {"max_new_tokens": 7}).generate(
            [tiny.prompt(900), tiny.prompt(50)], on_prefill=lambda done, total: progress.append((done, total))
        )
        return result, progress

    result, progress = alone(run)
    assert 0 < result.prefill_s <= result.first_token_s and result.decode_s > 0
    assert result.decoded_tokens == 12
    assert progress[-1] == (950, 950) and progress == sorted(progress)
