"""Where a sequence ends, and how the next turn goes on from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulated
import tiny
import torch
from recorded import CODECS, EXACT, SAMPLED, SMALL, alone, start


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("llama"), intermediate_size=64, head_dim=16)


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
