"""Training through the codec: the forward is the packed cache's, the gradient passes straight, and a few steps pay."""

from collections.abc import Iterable
from pathlib import Path

import calibrations
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bitkv_dist import model as models
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.fit.straight_through import seen_through, straight_through

ONE_BIT = CacheConfig(key_bits=1, value_bits=1, page_tokens=64, sink_tokens=0, recent_tokens=0)
MINMAX = CacheConfig("minmax", 2, 2, page_tokens=64, sink_tokens=64, value_group_channels=16)
IDS = torch.tensor([tiny.prompt(40) * 8, tiny.prompt(40, seed=1) * 8])  # texts of repeated phrases


def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS, labels=IDS, use_cache=False).loss


def losses_of_steps(model: PreTrainedModel, config: CacheConfig, trained: Iterable[torch.nn.Parameter]) -> list[float]:
    """The losses under the codec before each of eight steps."""
    optimiser, losses = torch.optim.Adam(trained, 2e-3), []
    with straight_through(model, config):
        for _ in range(8):
            optimiser.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    return losses


def test_forward_is_coded_and_the_gradient_is_not():
    torch.manual_seed(0)
    codec = make_codec(MINMAX, HeadShape(1, 0, 2, 16, torch.float32), 0)
    k, v = (torch.randn(3, 2, 200, 16, requires_grad=True) for _ in range(2))
    found = seen_through(codec, MINMAX, k, v)
    decoded = codec.decode(codec.encode(k[:, :, 64:128].detach(), v[:, :, 64:128].detach()))
    for x, seen, coded in zip((k, v), found, decoded, strict=True):
        torch.testing.assert_close(seen[:, :, 64:128], coded, atol=1e-6, rtol=0)
        assert torch.equal(seen[:, :, :64], x[:, :, :64]) and torch.equal(seen[:, :, 192:], x[:, :, 192:])  # sink; not full
        assert not torch.equal(seen[:, :, 128:192], x[:, :, 128:192])
        weight = torch.randn_like(seen)
        (gradient,) = torch.autograd.grad((seen * weight).sum(), x)
        torch.testing.assert_close(gradient, weight)


@pytest.mark.parametrize("config", [ONE_BIT, MINMAX])
def test_a_few_steps_lower_the_loss_under_the_codec(tmp_path, config):
    """On a random model; outside, it attends as before."""
    model = model_of(tiny.save(tmp_path))
    with torch.no_grad():
        plain = loss_of(model)
    losses = losses_of_steps(model, config, model.parameters())
    assert abs(losses[0] - plain) > 1e-3  # it was the codec's loss
    assert losses[-1] < 0.9 * losses[0]
    assert model.config._attn_implementation != "bitkv_straight_through"
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize(("codec", "bits"), [("tailored", 1), ("tailored", 3), ("residual", 2)])
def test_a_few_steps_lower_the_loss_under_codebooks(tmp_path, codec, bits):
    """Codebooks fitted to the model as it was; what it learns, it learns with its keys and values coded by them."""
    folder = tiny.save(tmp_path)
    file = calibrations.fitted_to(models.load(str(folder), dtype=torch.float32, device=torch.device("cpu")), tmp_path, codec,
                                  tiny.prompt(2048))  # fmt: skip
    config = CacheConfig(codec, bits, bits, calibration=file, page_tokens=64, sink_tokens=0, recent_tokens=0)
    model = model_of(folder)
    with torch.no_grad():
        plain = loss_of(model)
        with straight_through(model, config):
            before = loss_of(model)
    assert abs(before - plain) > 1e-3  # it is the codec's loss
    trained = {name: parameter for name, parameter in model.named_parameters() if "self_attn" in name}
    assert any("k_proj" in name for name in trained) and any("v_proj" in name for name in trained)
    losses = losses_of_steps(model, config, trained.values())
    assert all(torch.isfinite(parameter.grad).all() and parameter.grad.any() for parameter in trained.values())
    assert losses[-1] < 0.95 * before
    with pytest.raises(ValueError, match=r"with fingerprint .*, this model's is .*; calibrate with this model"):
        straight_through(model, config).__enter__()  # its books are of the weights that it started from


def test_a_cache_is_refused(tmp_path):
    model, ids = model_of(tiny.save(tmp_path)), torch.tensor([tiny.prompt(8)])
    past = model(ids).past_key_values
    with straight_through(model, ONE_BIT), pytest.raises(ValueError, match="9 keys for 1 queries: a training forward takes"):
        model(ids[:, :1], past_key_values=past)
