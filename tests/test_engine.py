"""The engine end to end on tiny random models: it answers as the model does, whatever the number of ranks and threads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import pytest
import ranks
import simulated
import tiny
import torch
from transformers import AutoModelForCausalLM

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine

CPU = torch.device("cpu")
EXACT = {"codec": "exact", "key_bits": 16, "value_bits": 16}
SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}
CODECS = {
    "4bit": {"key_bits": 4, "value_bits": 4},
    "2bit": {"key_bits": 2, "value_bits": 2},
    "tiered4": {"key_bits": 4, "value_bits": 4, "scan_bits": 1},
    "minmax": {"codec": "minmax", "key_bits": 4, "value_bits": 4},
    "exact": EXACT,
}


class RecordingEngine(Engine):
    """Keeps the logits that every choice was made from."""

    def __init__(self, *args, **kwargs) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def choose(self, logits, live, result, on_token):
        self.logits.append(logits.clone())
        return super().choose(logits, live, result, on_token)


def alone(function, *args):
    """`function(mesh, *args)` in a world of one."""
    return simulated.run(1, function, *args)[0]


def start(mesh, folder, cache: dict, generate: dict) -> RecordingEngine:
    served = model.load(str(folder), dtype=torch.float32, device=CPU)
    if "eos" in generate:
        generate = dict(generate)
        served.generation_config.eos_token_id = generate.pop("eos")
    return RecordingEngine(served, CacheConfig(**cache), mesh, GenerateConfig(model=str(folder), **generate))


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


SAMPLED = {"temperature": 1.0, "sampling_seed": 11}
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


# -------------------------------------------------------------------------------------------------------------- ending


def ending(mesh, folder, generate: dict, stop_after: int | None = None):
    """(token ids, finish reasons, gathers) of two prompts; on_token ends sequence 0 after `stop_after` tokens."""
    engine = start(mesh, folder, CODECS["4bit"] | SMALL, generate)
    seen = [0, 0]

    def on_token(sequence: int, token: int) -> bool:
        seen[sequence] += 1
        return sequence == 0 and seen[0] == stop_after

    before = mesh.gathers
    result = engine.generate([tiny.prompt(200, 0), tiny.prompt(600, 1)], on_token)
    assert mesh.world.rank or seen == list(map(len, result.token_ids))
    return result.token_ids, result.finish_reason, mesh.gathers - before


@pytest.fixture(scope="module")
def free(llama) -> list[list[int]]:
    """What the two prompts continue with when nothing ends them."""
    return alone(ending, llama, {"max_new_tokens": 12})[0]


def first_only_at(tokens: list[int], other: list[int], step: int, other_step: int) -> int:
    """The token at `step` (from 1), which must not come earlier in it, nor before `other_step` in the other sequence."""
    token = tokens[step - 1]
    assert token not in tokens[: step - 1] and token not in other[: other_step - 1], "choose another seed"
    return token


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("steps", [(3, 7), (1, 1), (12, 2)])
def test_sequences_end_at_their_own_eos(llama, free, size, steps):
    """C32: EOS at different steps, several EOS ids; all ranks call the same number of collectives and stop together."""
    eos = [first_only_at(free[i], free[1 - i], steps[i], steps[1 - i]) for i in (0, 1)]
    everyone = simulated.run(size, ending, llama, {"max_new_tokens": 12, "eos": eos})
    for tokens, reasons, gathers in everyone:
        assert tokens == [free[0][: steps[0]], free[1][: steps[1]]]
        assert reasons == ["stop", "stop"]
        assert gathers == everyone[0][2]


def test_eos_can_be_ignored(llama, free):
    tokens, reasons, _ = alone(ending, llama, {"max_new_tokens": 12, "eos": [free[0][0]], "ignore_eos": True})
    assert tokens == free and reasons == ["length", "length"]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_caller_can_end_a_sequence(llama, size, sampling):
    """The other goes on as if nothing had happened, also where it draws from its own random stream."""
    free = alone(ending, llama, {"max_new_tokens": 12} | sampling)[0]
    for tokens, reasons, _ in simulated.run(size, ending, llama, {"max_new_tokens": 12} | sampling, 5):
        assert tokens == [free[0][:5], free[1]] and reasons == ["stop", "length"]


@pytest.mark.parametrize("size", [1, 2])
def test_no_new_tokens(llama, size):
    """C32: --max-new-tokens 0 fills the cache and gives nothing."""
    for tokens, reasons, _ in simulated.run(size, ending, llama, {"max_new_tokens": 0}):
        assert tokens == [[], []] and reasons == ["length", "length"]


def test_the_last_position_of_the_model_is_used_and_no_more(tmp_path):
    folder = tiny.save(tmp_path, max_position_embeddings=100)

    def run(mesh, length):
        return start(mesh, folder, EXACT | SMALL, {"max_new_tokens": 50}).generate([tiny.prompt(length), tiny.prompt(3)])

    result = alone(run, 90)
    assert [len(tokens) for tokens in result.token_ids] == [11, 50]  # what follows position 99 is the last that can be chosen
    assert result.finish_reason == ["length", "length"]
    assert len(alone(run, 100).token_ids[0]) == 1
    with pytest.raises(ValueError, match=r"prompt 0: 101 tokens, but .* has 100 positions; shorten it"):
        alone(run, 101)
    with pytest.raises(ValueError, match="prompt 0: has no tokens"):
        alone(run, 0)


# --------------------------------------------------------------------------------------------------------------- turns


def test_turns_equal_one_long_feeding(llama):
    """Packed prefill whose first turn ends at a chunk's end, with nothing generated between: the very same work."""
    text = tiny.prompt(700)

    def talk(mesh, *turns: int):
        engine = start(mesh, llama, CODECS["tiered4"] | SMALL, {"prefill": "packed", "chunk": 128, "max_new_tokens": 9})
        for begin, end in zip((0, *turns), turns, strict=False):
            engine.config = replace(engine.config, max_new_tokens=9 if end == 700 else 0)
            result = engine.generate([text[begin:end]], keep=begin > 0)
        return result.token_ids, torch.cat(engine.logits), engine.cache_digest()

    tokens, logits, digest = alone(talk, 700)
    for turns in ((256, 700), (128, 384, 700)):
        found, steps, other = alone(talk, *turns)
        assert (found, other) == (tokens, digest) and torch.equal(steps, logits)


@pytest.mark.parametrize("size", [1, 3])
def test_a_second_turn_continues_the_text(llama, size):
    """With the exact codec two turns give the tokens of one prompt made of all that was said, to the end."""
    turns = [[tiny.prompt(300, 0), tiny.prompt(20, 1)], [tiny.prompt(9, 2), tiny.prompt(250, 3)]]

    def talk(mesh):
        engine = start(mesh, llama, EXACT | SMALL, {"max_new_tokens": 10})
        first = engine.generate(turns[0])
        second = engine.generate(turns[1], keep=True)
        lengths = [engine.cache.length(sequence) for sequence in range(2)]
        whole = [a + b + c for a, b, c in zip(turns[0], first.token_ids, turns[1], strict=True)]
        assert lengths == [len(text) + 9 for text in whole]  # the last token of a turn is fed with the next one
        return second.token_ids, start(mesh, llama, EXACT | SMALL, {"max_new_tokens": 10}).generate(whole).token_ids

    for in_turns, at_once in simulated.run(size, talk):
        assert in_turns == at_once


def test_a_new_prompt_starts_afresh(llama):
    """Without keep nothing of the last batch counts: neither its lengths nor how many sequences it had."""

    def run(mesh):
        engine = start(mesh, llama, CODECS["4bit"] | SMALL, {"max_new_tokens": 5})
        engine.generate([tiny.prompt(2500)])
        many = [tiny.prompt(length, length) for length in (2000, 7, 90)]
        fresh = start(mesh, llama, CODECS["4bit"] | SMALL, {"max_new_tokens": 5})
        return engine.generate(many).token_ids, fresh.generate(many).token_ids

    again, fresh = alone(run)
    assert again == fresh


@pytest.mark.parametrize("size", [1, 2])
def test_prefills_in_any_pieces_give_the_same_logits(llama, size):
    """C11: 40 tokens as 40, 24 + 16, 39 + 1 and 40 x 1, all of them inside the exact window, at SP 1 and 2."""
    text = tiny.prompt(40)

    def logits(mesh, prefill, *pieces: int):
        engine = start(mesh, llama, CODECS["4bit"], {"prefill": prefill, "max_new_tokens": 1})
        begin = 0
        for piece in pieces:
            engine.pending = [[]]  # what was chosen after a piece is not part of the text
            engine.generate([text[begin : begin + piece]], keep=begin > 0)
            begin += piece
        return engine.logits[-1]

    wanted = simulated.run(size, logits, "exact", 40)[0]
    for prefill, pieces in (("packed", (40,)), ("exact", (24, 16)), ("packed", (39, 1)), ("packed", (1,) * 40)):
        torch.testing.assert_close(simulated.run(size, logits, prefill, *pieces)[0], wanted, atol=1e-4, rtol=0)


def test_three_tokens_on_four_ranks(llama):
    """C01: most shards are empty."""

    def logits(mesh):
        engine = start(mesh, llama, CODECS["4bit"] | SMALL, {"max_new_tokens": 4})
        engine.generate([tiny.prompt(3)])
        return torch.cat(engine.logits)

    wanted = alone(logits)
    assert torch.isfinite(wanted).all()
    assert all(torch.equal(found, wanted) for found in simulated.run(4, logits))


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
