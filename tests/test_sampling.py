"""Sampling: the same tokens as `model.generate` under its logits processors, and draws that depend on the seed alone."""

import pytest
import tiny
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bitkv_dist.config import GenerateConfig
from bitkv_dist.sampling import Sampler, eos_ids, refuse_unserved

VOCAB = 50
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**tiny.SIZES | sizes | {"vocab_size": VOCAB, "initializer_range": 0.4})).eval()


@torch.no_grad()
def ours(model, prompt, settings, generate, eos=(), tokens=24, row=0):
    sampler = Sampler(settings, generate, eos, CPU)
    ids = list(prompt)
    for _ in range(tokens):
        logits = model(torch.tensor([ids])).logits[:, -1].float()
        ids += sampler.pick(logits, [ids], [row])
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def reference(model, prompt, settings, tokens=24):
    settings = GenerationConfig(**(settings.to_diff_dict() | {"max_new_tokens": tokens, "pad_token_id": None}))
    return model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"suppress_tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9]},
        {"begin_suppress_tokens": list(range(25))},
        {"sequence_bias": [[[7], 5.0], [[8, 9], 3.0]]},
        {"min_new_tokens": 10, "eos_token_id": list(range(20))},
        {"min_length": 9, "eos_token_id": list(range(20))},
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [1, 2]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "remove_invalid_values": True, "renormalize_logits": True},
    ],
    ids=lambda rules: "+".join(rules) or "plain",
)
def test_greedy_equals_generate(model, rules):
    settings = GenerationConfig(**rules)
    for prompt in ([11, 3, 4, 11, 3], [9]):
        got = ours(model, prompt, settings, GenerateConfig(), eos_ids(settings, None))
        assert got == reference(model, prompt, settings)


@pytest.mark.parametrize(
    "rules", [{}, {"min_p": 0.1}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.02}, {"top_h": 0.5}]
)
def test_sampling_keeps_the_tokens_generate_would_keep(model, rules):
    """The share of each token over many draws, against the scores that `generate` samples from."""
    generate = GenerateConfig(temperature=0.7, top_k=20, top_p=0.9, sampling_seed=1)
    prompt = [5, 6, 7]
    settings = GenerationConfig(**rules)
    theirs = model.generate(
        torch.tensor([prompt]),
        generation_config=GenerationConfig(**rules, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=1),
        output_scores=True,
        return_dict_in_generate=True,
    )
    share = torch.softmax(theirs.scores[0][0].double(), dim=-1)
    sampler = Sampler(settings, generate, (), CPU)
    logits = model(torch.tensor([prompt])).logits[:, -1].float().detach()
    draws = 1500
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for _ in range(draws):
        counts[sampler.pick(logits, [prompt], [0])[0]] += 1
    assert counts[share == 0].sum() == 0
    spread = (share * (1 - share) / draws).sqrt()
    assert ((counts / draws - share).abs() <= 5 * spread + 1e-9).all()


def test_draws_depend_on_seed_and_index_only():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    histories = [[1], [1, 2], [3]]

    def draws(seed, rows):
        sampler = Sampler(GenerationConfig(), GenerateConfig(temperature=1, sampling_seed=seed), (), CPU)
        return [sampler.pick(logits[rows], [histories[i] for i in rows], rows) for _ in range(40)]

    together = draws(7, [0, 1, 2])
    assert together == draws(7, [0, 1, 2])
    assert [step[1] for step in together] == [step[0] for step in draws(7, [1])]
    assert [step[2] for step in together] == [step[0] for step in draws(7, [2, 0])]
    assert together != draws(8, [0, 1, 2])
    assert draws(None, [0]) != draws(None, [0])
    same = logits[:1].repeat(2, 1)
    sampler = Sampler(GenerationConfig(), GenerateConfig(temperature=1, sampling_seed=7), (), CPU)
    steps = [sampler.pick(same, [[1], [1]], [0, 1]) for _ in range(40)]
    assert [a for a, _ in steps] != [b for _, b in steps]  # equal prompts in a batch are drawn independently


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(10)
    Sampler(GenerationConfig(), GenerateConfig(temperature=1), (), CPU).pick(torch.zeros(1, VOCAB), [[1]], [0])
    assert torch.allclose(torch.randn(3), torch.tensor([-0.6014, -1.0122, -0.3023]), atol=1e-4)


def test_threads_do_not_change_a_draw():
    logits = torch.randn(1, 152_000, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sampler = Sampler(GenerationConfig(), GenerateConfig(temperature=1, top_p=0.95, sampling_seed=5), (), CPU)
        results.append([sampler.pick(logits, [[1]], [0]) for _ in range(8)])
    torch.set_num_threads(before)
    assert results[0] == results[1]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_name_the_sequence(temperature, bad):
    logits = torch.zeros(2, VOCAB)
    logits[1, 7] = bad
    sampler = Sampler(GenerationConfig(), GenerateConfig(temperature=temperature), (), CPU)
    with pytest.raises(RuntimeError, match="sequence 5"):
        sampler.pick(logits, [[1], [1]], [3, 5])
    with pytest.raises(RuntimeError, match="sequence 5"):
        sampler.pick(torch.full((1, VOCAB), -float("inf")), [[1]], [5])


def test_excluded_tokens_are_never_drawn():
    logits = torch.full((1, VOCAB), -float("inf"))
    logits[0, [0, VOCAB - 1]] = 0
    sampler = Sampler(GenerationConfig(), GenerateConfig(temperature=1, sampling_seed=0), (), CPU)
    assert {sampler.pick(logits, [[1]], [0])[0] for _ in range(50)} == {0, VOCAB - 1}


def test_histories_that_grow_are_seen_whole():
    """The device buffer is extended, not rebuilt: the penalty must still reach the first and the last token."""
    settings = GenerationConfig(repetition_penalty=100.0)
    sampler = Sampler(settings, GenerateConfig(), (), CPU)
    logits = torch.linspace(1, 2, VOCAB)[None]
    history = [VOCAB - 1]
    for expected in range(VOCAB - 2, 5, -1):
        assert sampler.pick(logits, [history], [0]) == [expected]
        history.append(expected)


def test_eos_ids():
    class WithEos:
        eos_token_id = 9

    assert eos_ids(GenerationConfig(eos_token_id=[5, 6, 7]), WithEos) == (5, 6, 7)
    assert eos_ids(GenerationConfig(eos_token_id=4), None) == (4,)
    assert eos_ids(GenerationConfig(), WithEos) == (9,)
    assert eos_ids(GenerationConfig(), None) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("forced_eos_token_id", 2),
        ("encoder_repetition_penalty", 1.2),
        ("stop_strings", ["x"]),
        ("max_time", 3.0),
        ("token_healing", True),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, value):
    settings = GenerationConfig()
    setattr(settings, name, value)
    with pytest.raises(ValueError, match=f"generation_config.{name} "):
        refuse_unserved(settings)
    with pytest.raises(ValueError, match=f"generation_config.{name} "):
        Sampler(settings, GenerateConfig(), (), CPU)


def test_usual_settings_are_served():
    refuse_unserved(GenerationConfig())
    refuse_unserved(
        GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, num_beams=1, repetition_penalty=1.05)
    )
