"""Retrieval prompts: as long as asked for, facts where asked for, one right answer; and answers judged by the first number."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from bitkv_dist import model as models
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.config import ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.evaluate.retrieval import ANSWER, TASKS, Prompt, answers, make_prompt
from bitkv_dist.parallel import mesh as meshes

TALE = (Path(__file__).parent / "data" / "tale.txt").read_text()
EXACT = CacheConfig("exact", 16, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.save_tokenizer(tiny.save(tmp_path_factory.mktemp("model"), vocab_size=257))
    return models.load(str(folder), dtype=None, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def mesh():
    started = meshes.start(ParallelConfig(device="cpu"))
    yield started
    started.close()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [1000, 1001, 2048])
@pytest.mark.parametrize("depth", [0, 0.33, 0.5, 1])
def test_prompts(model, task, context, depth):
    prompt = make_prompt(model.tokenizer, TALE, task, context, depth)
    text = model.tokenizer.decode(prompt.ids)
    assert len(prompt.ids) == context
    assert re.fullmatch(r"[1-9]\d{4}", prompt.answer) and prompt.answer in text
    assert not text.endswith(prompt.answer) and not text[-1].isspace()
    assert prompt == make_prompt(model.tokenizer, TALE, task, context, depth)
    assert prompt.answer != make_prompt(model.tokenizer, TALE, task, context, depth, trial=1).answer
    numbers = re.findall(r"\d{5}", text)
    assert {"passkey": 1, "multikey": 4, "keyvalue": 6}[task] == len(set(numbers))


@pytest.mark.parametrize("task", TASKS)
def test_the_fact_stands_at_its_depth_between_sentences(model, task):
    for depth in (0, 0.25, 0.5, 0.75, 1):
        text = model.tokenizer.decode(make_prompt(model.tokenizer, TALE, task, 4000, depth).ids)
        number = make_prompt(model.tokenizer, TALE, task, 4000, depth).answer
        before = text[: text.index(number)]
        paragraph = before[before.rindex("\n\n") :]
        # It stands after the end of a sentence, and facts and question take room, too.
        assert abs((len(before) - len(paragraph)) / 4000 - depth) < 0.16
        rest = before.removesuffix(paragraph).rstrip()
        assert not rest or rest[-1] in '.!?"\'' or rest.endswith("Four"), rest[-20:]


def test_short_texts_are_repeated_and_short_contexts_refused(model):
    prompt = make_prompt(model.tokenizer, "One sentence. Another one.", "passkey", 500, 0.5)
    assert len(prompt.ids) == 500 and model.tokenizer.decode(prompt.ids).count("Another one.") > 5
    with pytest.raises(ValueError, match=r"context 50: facts and question of passkey take \d+ tokens; give at least"):
        make_prompt(model.tokenizer, TALE, "passkey", 50, 0.5)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" 48213.", True),
        ("48213", True),
        (" is 48213 and", True),
        (" 48213 or 5", True),
        (" 482134.", False),
        (" 4821.", False),
        (" 12345, not 48213", False),
        (" nothing", False),
        ("", False),
    ],
)
def test_the_first_number_is_the_answer(model, said, right):
    class Parrot:
        """An engine that says what it is told to, token by token, until it is stopped."""

        def __init__(self):
            self.model = model

        def begin(self, prompts, progress, others):
            return None

        def decode(self, logits, prompts, on_token, started):
            for token in model.tokenizer(said).input_ids:
                if on_token(0, token):
                    break

    assert answers([Parrot()], Prompt([1], "48213")) == [right]


def test_real_engines_read_the_prompt_once_and_go_on_as_each_alone(model, mesh):
    """Layers that learn from the prompt get its probes, whoever leads."""
    configs = {name: build(name, {}).cache for name in ("tiered4", "exact", "1bit", "minmax2")}
    configs["fitted"] = replace(configs["tiered4"], score="fitted")
    configs["mass"] = replace(configs["tiered4"], refine=RefineConfig(rule="mass", value=0.9))
    prompt = make_prompt(model.tokenizer, TALE, "passkey", 1500, 0.5)
    engines = {name: Engine(model, config, mesh, ANSWER) for name, config in configs.items()}
    seen = []
    assert answers(list(engines.values()), prompt, lambda done, total: seen.append((done, total))) == [False] * len(configs)
    assert seen[-1] == (1500, 1500) and sorted(seen) == seen
    for name, config in configs.items():
        alone = Engine(model, config, mesh, ANSWER)
        assert answers([alone], prompt) == [False]  # random weights
        assert engines[name].cache_digest() == alone.cache_digest()
        assert engines[name].histories == alone.histories
        assert 1500 < len(alone.histories[0]) <= 1500 + ANSWER.max_new_tokens and alone.histories[0][:1500] == prompt.ids


def test_a_packed_prefill_cannot_be_shared(model, mesh):
    engines = [Engine(model, EXACT, mesh, replace(ANSWER, prefill="packed")) for _ in range(2)]
    with pytest.raises(ValueError, match="prefill packed: depends on the cache"):
        answers(engines, Prompt([1] * 600, "48213"))


@pytest.mark.slow
def test_smollm2(mesh):
    """The exact cache answers, tiered4 answers as it does."""
    served = models.load("smollm2-135m", dtype=None, device=torch.device("cpu"))
    text = (Path(__file__).parent / "data" / "handbook.txt").read_text()
    engines = [Engine(served, build(name, {}).cache, mesh, ANSWER) for name in ("exact", "tiered4")]
    for depth in (0.2, 0.5, 0.8):
        assert answers(engines, make_prompt(served.tokenizer, text, "passkey", 2000, depth)) == [True, True]
