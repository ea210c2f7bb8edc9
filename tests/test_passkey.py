"""smollm2-135m reads a key out of sealed pages on two ranks, wherever it stands in a 3,000-token text."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig

FACT = "\n\nThe pass key is 48213. Remember it. 48213 is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
DEPTHS = (0.1, 0.5, 0.8)
TOKENS = 3000
TEXT = "tale.txt"


def answers(mesh, depths: tuple[float, ...], all_bits: tuple[int, ...], name: str = TEXT) -> dict[tuple[int, float], str]:
    """What comes after the question, by bits and depth."""
    from bitkv_dist import model as models
    from bitkv_dist.engine import Engine

    model = models.load("smollm2-135m", dtype=None, device=torch.device("cpu"))
    text = model.tokenizer((Path(__file__).parent / "data" / name).read_text(encoding="utf-8")).input_ids
    fact, question = (model.tokenizer(part).input_ids for part in (FACT, QUESTION))
    filler = text[: TOKENS - len(fact) - len(question)]
    found = {}
    for bits in all_bits:
        engine = Engine(model, CacheConfig(key_bits=bits, value_bits=bits), mesh, GenerateConfig(max_new_tokens=8))
        for depth in depths:
            cut = int(depth * len(filler))
            prompt = filler[:cut] + fact + filler[cut:] + question
            found[bits, depth] = model.tokenizer.decode(engine.generate([prompt]).token_ids[0])
    return found


@pytest.mark.slow
def test_the_key_is_read_at_8_4_and_2_bits():
    """What 1 bit gives is printed (-s shows it), not judged."""
    found = run_ranks(2, answers, DEPTHS, (8, 4, 2, 1), timeout_s=900)[0]
    print({depth: found[1, depth] for depth in DEPTHS})
    wrong = {key: text for key, text in found.items() if key[0] > 1 and not text.strip().startswith("48213")}
    assert not wrong
