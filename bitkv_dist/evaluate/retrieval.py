"""Does a packed cache still find a fact far back in its context? Prompts made of any text, answered by the real engine.

Three tasks, all plain continuation: `passkey` hides one number, `multikey` the numbers of several people and asks for that of
one, `keyvalue` a list of pairs and asks for one of them. The first number that the model writes is its answer.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.prefill import Progress
from bitkv_dist.text import encode_prompt

NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Hugo")
WORDS = ("harbour", "lantern", "orchard", "copper", "violin", "granite", "meadow", "saddle", "candle", "anchor", "walnut")
ANSWER = GenerateConfig(max_new_tokens=12, stream=False)


@dataclass(frozen=True)
class Riddle:
    """Facts to hide, which of them is asked for, how the question begins, and the number that continues it."""

    facts: list[str]
    asked: int
    question: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """Token ids, of exactly the length asked for, and the number that continues them."""

    ids: list[int]
    answer: str


def passkey(chance: random.Random) -> Riddle:
    number = numbers(chance, 1)[0]
    fact = f"The secret pass key is {number}. Remember it. {number} is the secret pass key."
    return Riddle([fact], 0, "As said above, the secret pass key is", number)


def multikey(chance: random.Random) -> Riddle:
    names, found, asked = chance.sample(NAMES, 4), numbers(chance, 4), chance.randrange(4)
    facts = [f"The secret pass key of {name} is {number}. Remember it." for name, number in zip(names, found, strict=True)]
    who = names[asked]
    return Riddle(facts, asked, f"As said above, the secret pass key of {who} is", found[asked])


def keyvalue(chance: random.Random) -> Riddle:
    words, found, asked = chance.sample(WORDS, 6), numbers(chance, 6), chance.randrange(6)
    pairs = "\n".join(f"{word} = {number}" for word, number in zip(words, found, strict=True))
    return Riddle([f"Code list:\n{pairs}\nEnd of the code list."], 0, f"From the code list:\n{words[asked]} =", found[asked])


TASKS: dict[str, Callable[[random.Random], Riddle]] = {"passkey": passkey, "multikey": multikey, "keyvalue": keyvalue}


def numbers(chance: random.Random, count: int) -> list[str]:
    """Different five-digit numbers."""
    return [str(number) for number in chance.sample(range(10_000, 100_000), count)]


def make_prompt(tokenizer: PreTrainedTokenizerBase, text: str, task: str, context: int, depth: float, trial: int = 0) -> Prompt:
    """A prompt of `context` tokens: `text`, repeated as often as it takes, with the fact asked for at `depth` of it, 0 to 1.

    Facts stand between sentences; the ones that are not asked for are spread evenly. The same arguments give the same prompt.
    """
    riddle = TASKS[task](random.Random(f"{task} {context} {depth:g} {trial}"))
    facts = [encode_prompt(tokenizer, f"\n\n{fact}\n\n") for fact in riddle.facts]
    question = encode_prompt(tokenizer, f"\n\n{riddle.question}")
    room = context - sum(map(len, facts)) - len(question)
    if room < 1:
        least = context - room + 1
        raise ValueError(f"context {context}: facts and question of {task} take {least - 1} tokens; give at least {least}")
    hay = encode_prompt(tokenizer, text)
    hay = (hay * -(-room // len(hay)))[:room]
    depths = [(i + 0.5) / len(facts) for i in range(len(facts))]
    depths[riddle.asked] = depth
    ids, taken = [], 0
    for place, fact in sorted(zip((sentence_end(tokenizer, hay, depth) for depth in depths), facts, strict=True)):
        ids += hay[taken:place] + fact
        taken = place
    return Prompt(ids + hay[taken:] + question, riddle.answer)


def sentence_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], depth: float) -> int:
    """How many of `ids` there are up to the last end of a sentence before `depth`; up to `depth` itself where there is none."""
    place = round(depth * len(ids))
    for end in range(place, 0, -1):
        if re.search(r"[.!?\n]\W*$", tokenizer.decode(ids[end - 1 : end])):
            return end
    return place


def answers(engines: list[Engine], prompt: Prompt, progress: Progress = lambda done, total: None) -> list[bool]:
    """Whether each of the engines (of one model, whose config should be ANSWER) continues the prompt with the right number,
    greedily. The prompt is read once for all of them."""
    first, *others = engines
    with torch.inference_mode():
        logits = first.begin([prompt.ids], progress, others)
        return [continues(engine, logits, prompt) for engine in engines]


def continues(engine: Engine, logits: torch.Tensor, prompt: Prompt) -> bool:
    """Whether the engine, which holds the prompt, goes on from `logits` with its answer."""
    tokenizer, said = engine.model.tokenizer, []

    def number_has_ended(sequence: int, token: int) -> bool:
        said.append(token)
        return re.search(r"\d\D", tokenizer.decode(said)) is not None

    engine.decode(logits, [prompt.ids], number_has_ended, time.perf_counter())
    found = re.search(r"\d+", tokenizer.decode(said))
    return found is not None and found.group() == prompt.answer
