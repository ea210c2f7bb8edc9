"""A model that runs its layers in loops, through the engine and beside its own forward in transformers."""

import json

import pytest
import simulated
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bitkv_dist import model as models
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine
from bitkv_dist.plan.models import from_config

EXACT = CacheConfig("exact", 16, 16, page_tokens=64, sink_tokens=64, recent_tokens=32)


def test_exact_gives_the_tokens_of_generate(tmp_path):
    """Against the module's own forward, whose cache is that of transformers: 16 tokens and their logits."""
    folder = tiny.save(tmp_path, "ouro", seed=3)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    seen = []

    def ours(mesh):
        served = models.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
        engine = Engine(served, EXACT, mesh, GenerateConfig(max_new_tokens=16))
        choose = engine.choose
        engine.choose = lambda logits, *rest: seen.append(logits) or choose(logits, *rest)
        return engine.generate(prompts).token_ids

    prompts = [tiny.prompt(length) for length in (1, 33, 300)]
    (found,) = simulated.run(1, ours)
    for prompt, tokens, logits in zip(prompts, found, torch.stack(seen, 1), strict=True):
        wanted = stock.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
        assert tokens == wanted
        with torch.no_grad():
            forced = stock(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits, forced, atol=1e-4, rtol=0)
    assert len({tuple(tokens) for tokens in found}) == 3


def test_loops_change_the_answer_and_cost_no_weights(tmp_path):
    """A slot of the cache for each layer of each loop, the parameters of one loop."""
    folder = tiny.save(tmp_path, "ouro")
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tiny.prompt(20)])
    with torch.no_grad():
        found = model(ids, use_cache=True)
        assert len(found.past_key_values.layers) == 6 == models.layers_of(config)
        keys = [layer.keys for layer in found.past_key_values.layers]
        assert not any(torch.allclose(keys[0], other) for other in keys[1:])
        model.config.total_ut_steps = 1
        assert not torch.allclose(model(ids).logits, found.logits, atol=0.1)
    shape = from_config("tiny", config, 16, 4096)
    assert shape.elements() == sum(parameter.numel() for parameter in model.parameters())
    assert shape.read_elements() > 2 * shape.elements() - 2 * 256 * 64  # a step reads the layers three times


@pytest.mark.parametrize(("changed", "message"), [
    ({"early_exit_threshold": 0.5}, "early_exit_threshold 0.5 is not served; all loops run; set it to 1.0"),
    ({"total_ut_steps": 0}, "total_ut_steps 0 is not served; it must be at least 1"),
])  # fmt: skip
def test_what_is_not_served_is_refused_by_name(tmp_path, changed, message):
    folder = tiny.save(tmp_path, "ouro")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | changed))
    with pytest.raises(ValueError, match=message):
        models.check(str(folder))
