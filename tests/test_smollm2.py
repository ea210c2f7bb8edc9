"""The built-in model with the exact cache gives the token ids of `model.generate`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bitkv_dist import checkpoint, model
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.parallel.heartbeat import Heart, Pulse
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.parallel.world import World


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
