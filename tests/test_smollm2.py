"""The built-in model with the exact cache gives the token ids of `model.generate`."""

from pathlib import Path

import pytest
import torch
from chunked import read
from transformers import AutoModelForCausalLM

from bitkv_dist import checkpoint, model
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.kernels import cpu
from bitkv_dist.parallel.heartbeat import Heart, Pulse
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.parallel.world import World


@pytest.mark.slow
@pytest.mark.skipif(cpu.load() is None, reason="no C++ kernels")
def test_a_prompt_in_bfloat16_is_no_farther_from_float32_than_that_of_transformers():
    """Logits of 700 tokens, read exactly: by transformers' own model in float32 and in bfloat16, and by our layers."""
    place = checkpoint.localise("smollm2-135m", None)
    served = model.load("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cpu"))
    stock = [AutoModelForCausalLM.from_pretrained(place, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for text in ("tale", "handbook"):
        ids = served.tokenizer((Path(__file__).parent / "data" / f"{text}.txt").read_text()).input_ids[:700]
        with torch.inference_mode():
            wanted, theirs = (each(torch.tensor([ids])).logits[0].float() for each in stock)
            ours = served.head(read(served, ids, [512, 188]))
        assert (ours - wanted).norm() <= (theirs - wanted).norm() < 3e-2 * wanted.norm()


@pytest.mark.slow
def test_exact_gives_the_tokens_of_generate():
    served = model.load("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    ids = served.tokenizer("The lock of a canal lifts a boat by").input_ids
    stock = AutoModelForCausalLM.from_pretrained(checkpoint.localise("smollm2-135m", None), dtype=torch.float32)
    expected = stock.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
    world = World(0, 1, 0, 1, "here", "python", "none", torch.device("cpu"), 1)
    mesh = Mesh(world, 1, 1, ParallelConfig(), Heart(Pulse(), 0))
    engine = Engine(served, build("exact", {}).cache, mesh, GenerateConfig(max_new_tokens=64))
    assert engine.generate([ids]).token_ids[0] == expected
