"""Our own kernels for the dense part: transformers' layers over the same weights, and bits that nothing changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import simulated
import tiny
import torch
from chunked import read
from lossless import LosslessCache
from recorded import SMALL, RecordingEngine
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.decoder import linear
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.cpu import dense

CPU = torch.device("cpu")
TIERED = SMALL | {"key_bits": 4, "value_bits": 4, "scan_bits": 1}

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="no C++ kernels")


def isas() -> list[str]:
    found = []
    for isa in cpu.ISAS:
        try:
            cpu.choose(isa)
        except ValueError:
            continue
        found.append(isa)
    cpu.choose()
    return found


def isas_and_threads() -> Iterator[None]:
    """Every instruction set of this machine with one thread and with two: set while the body of the caller's loop runs."""
    threads = torch.get_num_threads()
    try:
        for isa in isas():
            with dispatch.forced(isa):
                for count in (1, 2):
                    torch.set_num_threads(count)
                    yield
    finally:
        torch.set_num_threads(threads)


def generate(served: model.ServedModel, cache: dict, lengths: list[int], tokens: int = 12) -> tuple[list, torch.Tensor]:
    """Token ids and the logits [steps, sequences, vocabulary] of a run on one rank."""

    def run(mesh):
        engine = RecordingEngine(served, CacheConfig(**cache), mesh, GenerateConfig(max_new_tokens=tokens))
        result = engine.generate([tiny.prompt(length, row) for row, length in enumerate(lengths)])
        return result.token_ids, torch.stack(engine.logits)

    return simulated.run(1, run)[0]


def load(folder, **kwargs) -> model.ServedModel:
    return model.load(str(folder), dtype=kwargs.pop("dtype", torch.float32), device=CPU, **kwargs)


SHAPES = {name: (name, {}) for name in tiny.CONFIGS} | {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "odd widths": ("llama", {"hidden_size": 72, "intermediate_size": 101, "head_dim": 24, "vocab_size": 259}),
    "many heads to one": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 56}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", ["model", "bfloat16"])
def test_a_step_is_that_of_transformers_layers(shape, weights, tmp_path):
    """A prompt of 37 tokens in all three rows, then three steps at their own positions; kept in bfloat16, transformers' layers
    are the widened ones."""
    architecture, sizes = SHAPES[shape]
    served = load(tiny.save(tmp_path, architecture, **sizes), weights=weights)
    for parameter in served.module.parameters():
        if parameter.dim() == 1:  # norms of a fresh model are all ones, biases zeros
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    served = replace(served, decoder=type(served.decoder)(served.module, served.head_dim))
    stock, caches = replace(served, decoder=None), (LosslessCache(), LosslessCache())
    positions = torch.stack([torch.arange(37), torch.arange(37) + 50, torch.arange(37) * 20])
    hidden = [each.embed(torch.tensor([tiny.prompt(37, row) for row in range(3)])) for each in (served, stock)]
    for index in range(2):
        hidden = [
            each.layer(index, states, positions, each.rotary(states, positions), cache)
            for each, states, cache in zip((served, stock), hidden, caches, strict=True)
        ]
        torch.testing.assert_close(*hidden, atol=2e-5 * hidden[1].abs().max().item(), rtol=0)
    for step in range(3):
        ids, positions = torch.tensor([[3 + step], [77], [200 - step]]), torch.tensor([[step], [90 + step], [900]])
        found = served.step(ids, positions, caches[0])
        wanted = stock.step(ids, positions, caches[1])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, atol=2e-5 * wanted.abs().max().item(), rtol=0)
    for index in range(2):
        for mine, theirs in zip(caches[0].kept[index], caches[1].kept[index], strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5 * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 63, 64, 65, 127, 129, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_odd_sizes(width, dtype):
    """Norm and matrix against float64; and every instruction set, thread count and batch gives the same bits."""
    torch.manual_seed(width)
    weight, norm, hidden = torch.randn(2 * width + 333, width).to(dtype), torch.rand(width), torch.randn(5, width)
    exact = (
        hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double() @ weight.double().T
    )
    found = []
    for _ in isas_and_threads():
        found.append(dense.head(dense.matrix(weight), norm, 1e-5, hidden))
        found.append(torch.cat([dense.head(dense.matrix(weight), norm, 1e-5, row[None]) for row in hidden]))
    torch.testing.assert_close(found[0].double(), exact, atol=2e-6 * math.sqrt(width), rtol=2e-6)
    assert all(torch.equal(other, found[0]) for other in found)
    if dtype == torch.bfloat16:
        assert torch.equal(dense.head(dense.matrix(weight.float()), norm, 1e-5, hidden), found[0])


@pytest.mark.parametrize("architecture", ["qwen3", "phi3"])
def test_no_thread_row_or_instruction_set_changes_a_bit_of_a_step(architecture, tmp_path):
    served = load(tiny.save(tmp_path, architecture))
    ids, positions = torch.tensor([[5], [6], [7], [8], [9]]), torch.tensor([[0], [70], [3], [2000], [11]])
    found = []
    for _ in isas_and_threads():
        found.append(served.step(ids, positions, LosslessCache()))
        found.append(torch.cat([served.step(ids[i : i + 1], positions[i : i + 1], LosslessCache()) for i in range(5)]))
    assert all(torch.equal(other, found[0]) for other in found)


def test_a_batch_changes_no_bit(tmp_path):
    """C23: a sequence alone and in a batch of three, prompts read exactly: the same logits at every step."""
    served = load(tiny.save(tmp_path))
    _, together = generate(served, TIERED, [700, 33, 300])
    for row, length in enumerate((700, 33, 300)):

        def alone(mesh, row=row, length=length):
            engine = RecordingEngine(served, CacheConfig(**TIERED), mesh, GenerateConfig(max_new_tokens=12))
            engine.generate([tiny.prompt(length, row)])
            return torch.cat(engine.logits)

        logits = simulated.run(1, alone)[0]
        assert torch.equal(logits[1:], together[1:, row])
        torch.testing.assert_close(logits[0], together[0, row], atol=1e-4, rtol=0)  # the prompt's head is torch's


# ------------------------------------------------------------------------------------------------- prompts in bfloat16


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_a_prompt_in_bfloat16_is_closer_to_float32_than_transformers_layers(architecture, tmp_path):
    """Both round what they keep; ours rounds fewer numbers between."""
    folder = tiny.save(tmp_path, architecture)
    half = load(folder, dtype=torch.bfloat16)
    assert half.decoder is not None and half.weights == torch.bfloat16
    whole = replace(load(folder, weights="bfloat16"), decoder=None)
    ours, theirs, wanted = (read(each, tiny.prompt(150), [150]) for each in (half, replace(half, decoder=None), whole))
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).norm() < (theirs.float() - wanted).norm() < 5e-2 * wanted.norm()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_neither_chunks_nor_threads_change_a_bit_of_a_prompt_in_bfloat16(architecture, tmp_path):
    served = load(tiny.save(tmp_path, architecture), dtype=torch.bfloat16)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found += [read(served, tiny.prompt(150), chunks) for chunks in ([150], [64, 64, 22], [1, 2, 1, 17, 129])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found)


def test_a_row_alone_is_that_of_a_batch():
    """Of 64 rows of this size torch alone sums 27 otherwise."""
    torch.manual_seed(0)
    module, x = torch.nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16), torch.randn(1, 64, 4096).bfloat16()
    assert torch.equal(torch.cat([linear(module, row) for row in x.split(1, 1)], 1), linear(module, x))


def test_numbers_are_rounded_as_torch_rounds_them():
    """Halves to even, infinities and NaN kept; the gate of bfloat16 numbers is that of their float32 values, rounded."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(16, -1)  # all there are
    up = bits.flip(0, 1).contiguous()
    for _ in isas_and_threads():
        gates, wide = bits.clone(), bits.float()
        dense.gate(gates, up)
        dense.gate(wide, up.float())
        torch.testing.assert_close(gates, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------ what the weights are kept in


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A checkpoint that is stored in bfloat16, as most are."""
    folder = tiny.save(tmp_path_factory.mktemp("rounded"), seed=3)
    file = folder / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return folder


def test_a_bfloat16_checkpoint_is_kept_so_and_rounds_nothing(rounded):
    """In float32 it answers with the bits of widened weights, and so with the token ids of `generate` in float32."""
    narrow, wide = load(rounded), load(rounded, weights="model")
    assert (narrow.weights, wide.weights) == (torch.bfloat16, torch.float32) and narrow.dtype == wide.dtype == torch.float32
    assert {parameter.dtype for parameter in narrow.module.parameters()} == {torch.bfloat16}
    assert narrow.fingerprint == wide.fingerprint
    exact = SMALL | {"codec": "exact", "key_bits": 16, "value_bits": 16}
    (tokens, logits), (others, wide_logits) = (generate(served, exact, [300, 40]) for served in (narrow, wide))
    assert tokens == others and torch.equal(logits, wide_logits)
    stock = AutoModelForCausalLM.from_pretrained(rounded, attn_implementation="eager", dtype=torch.float32).eval()
    for row, length in enumerate((300, 40)):
        prompt = torch.tensor([tiny.prompt(length, row)])
        assert stock.generate(prompt, max_new_tokens=12, do_sample=False)[0, length:].tolist() == tokens[row]


def test_one_float32_tensor_keeps_all_in_float32(rounded, tmp_path):
    weights = load_file(rounded / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-4
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((rounded / name).read_text())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path).weights == torch.float32


def test_float32_weights_are_rounded_only_on_demand(tmp_path):
    folder = tiny.save(tmp_path)
    assert load(folder).weights == torch.float32
    (_, exact), (_, near) = (generate(load(folder, weights=kept), TIERED, [200], 1) for kept in ("auto", "bfloat16"))
    assert 1e-4 < ((near - exact).norm() / exact.norm()).item() < 3e-2


def test_a_model_in_bfloat16_has_decode_steps_in_float32(rounded):
    """Fewer roundings than transformers' own bfloat16: closer to float32."""
    half, whole = load(rounded, dtype=torch.bfloat16), load(rounded)
    assert half.widened is None and half.decoder is not None
    ids, positions = torch.tensor([[5]]), torch.tensor([[0]])
    wanted = whole.step(ids, positions, LosslessCache())
    stock = replace(half, decoder=None).step(ids, positions, LosslessCache())
    assert (half.step(ids, positions, LosslessCache()) - wanted).norm() < 0.1 * (stock - wanted).norm()


def test_what_the_kernels_do_not_serve_is_left_to_transformers(tmp_path):
    folder = tiny.save(tmp_path, hidden_act="gelu")
    served = load(folder)
    assert served.decoder is None
    assert len(generate(served, TIERED, [100], 4)[0][0]) == 4
    with pytest.raises(ValueError, match=r"weights bfloat16: .*activation gelu.*leave it out"):
        load(folder, weights="bfloat16")


def test_weights_refusals(rounded):
    with pytest.raises(ValueError, match=r"weights bfloat16: .*dtype float16.*leave it out"):
        load(rounded, dtype=torch.float16, weights="bfloat16")
    with dispatch.forced("reference"), pytest.raises(ValueError, match=r"weights bfloat16: .*no compiled kernels"):
        load(rounded, weights="bfloat16")
    with pytest.raises(ValueError, match=r"generate\.weights"):
        GenerateConfig(weights="int4")
