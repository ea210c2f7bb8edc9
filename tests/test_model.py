"""Models load from every kind of source, run layer by layer, and what cannot be served is refused by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from lossless import continue_greedily
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bitkv_dist import model

CPU = torch.device("cpu")
SIZES = {"vocab_size": 131, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny random model of each served architecture, saved as a directory."""
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.save(root / name, name, seed, **SIZES) for seed, name in enumerate(tiny.CONFIGS)}


@pytest.fixture
def copy_of(folders, tmp_path):
    """A copy of a tiny model with other entries in its config.json; without weights, so that a refusal precedes them."""

    def copy(name: str, weights: bool = False, **entries) -> Path:
        folder = tmp_path / name
        shutil.copytree(folders[name], folder, ignore=None if weights else shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


def load(folder, **kwargs) -> model.ServedModel:
    return model.load(str(folder), dtype=kwargs.pop("dtype", None), device=CPU, **kwargs)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_layers_and_chunks_give_the_tokens_of_generate(folders, name):
    prompt = [3 + 7 * i % 128 for i in range(40)]
    stock = AutoModelForCausalLM.from_pretrained(folders[name])
    expected = stock.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    served = load(folders[name])
    assert served.dtype == torch.float32
    assert continue_greedily(served, prompt, [16, 16, 8], 12) == expected
    assert continue_greedily(served, prompt, [40], 12) == expected
    assert continue_greedily(served, prompt, [39, 1], 12) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(folders, dtype):
    served = load(folders["llama"], dtype=dtype)
    hidden = served.embed(torch.tensor([[3, 4, 5]]))
    assert hidden.dtype == dtype
    logits = served.head(hidden[:, -1])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_sizes(folders):
    served = load(folders["qwen3"])
    assert (served.layers, served.heads, served.kv_heads, served.head_dim) == (2, 4, 2, 32)
    assert (served.local_heads, served.local_kv_heads, served.first_kv_head) == (4, 2, 0)
    assert served.max_positions == 512
    assert served.tokenizer is None
    assert served.generation_config.eos_token_id == 2
    assert not served.module.training


def test_head_works_on_the_given_rows_only(folders):
    served = load(folders["llama"])
    hidden = torch.randn(3, 64)
    assert served.head(hidden).shape == (3, 131)
    torch.testing.assert_close(served.head(hidden)[1:2], served.head(hidden[1:2]))


REFUSED = {
    "an unknown architecture": ("llama", {"model_type": "gemma2"}, "gemma2"),
    "an architecture transformers does not know": ("llama", {"model_type": "brandnew"}, "brandnew"),
    "attention sinks": ("llama", {"model_type": "gpt_oss"}, "gpt_oss"),
    "an encoder-decoder": ("llama", {"model_type": "t5"}, "t5"),
    "another head": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "encoder-decoder by flag": ("llama", {"is_encoder_decoder": True}, "encoder-decoder"),
    "a window in every layer": ("mistral", {"sliding_window": 16}, "sliding_window 16"),
    "a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
        "sliding_window 16",
    ),
    "rope that changes with length": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type dynamic",
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            }
        },
        "rope_type longrope",
    ),
    "quantized weights": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    "softcap": ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    "head dim not a multiple of 8": ("qwen3", {"head_dim": 36}, "head_dim 36"),
    "head dim with an odd part of 11": ("qwen3", {"head_dim": 88}, "head_dim 88"),
    "a config nobody can build": ("llama", {"num_hidden_layers": "many"}, "config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_weights_load(copy_of, case):
    name, entries, named = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        load(copy_of(name, **entries))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


SERVED = {
    "no window": ("mistral", {"sliding_window": None}),
    "a window that is switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    "a window longer than any text": ("mistral", {"sliding_window": 512}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 5e5,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


@pytest.mark.parametrize("case", SERVED)
def test_served(copy_of, case):
    name, entries = SERVED[case]
    folder = copy_of(name, weights=True, **entries)
    prompt = list(range(3, 43))
    stock = AutoModelForCausalLM.from_pretrained(folder)
    expected = stock.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    assert continue_greedily(load(folder), prompt, [40], 4) == expected


def test_yarn_extends_the_positions(copy_of):
    name, entries = SERVED["yarn"]
    assert model.max_positions_of(model.check(str(copy_of(name, **entries)))) == 1024


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_head_dims(copy_of, head_dim):
    assert model.head_dim_of(model.check(str(copy_of("qwen3", head_dim=head_dim)))) == head_dim


@pytest.mark.parametrize(
    ("name", "tp", "named"),
    [
        ("llama", 3, "nearest that does is 2"),
        ("llama", 8, "nearest that does is 4"),
        ("llama", 0, "nearest that does is 1"),
    ],
)
def test_tensor_parallel_refusals(copy_of, name, tp, named):
    with pytest.raises(ValueError, match=f"tp {tp}: .*{named}"):
        model.check(str(copy_of(name)), tp)


def test_the_nearest_grid_has_as_many_ranks(copy_of):
    folder = str(copy_of("llama"))
    with pytest.raises(ValueError, match=r"the nearest that does is 2 \(--tp 2 --sp 3\)"):
        model.check(folder, 3, 6)
    with pytest.raises(ValueError, match=r"the nearest that does is 1 \(--tp 1 --sp 9\)"):
        model.check(folder, 3, 9)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("llama", 4), ("phi3", 2)])
def test_tensor_parallel_that_fits(copy_of, name, tp):
    model.check(str(copy_of(name)), tp, 8)


def test_dtype(folders):
    with pytest.raises(ValueError, match="float64"):
        load(folders["llama"], dtype=torch.float64)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("no/such/folder", "no/such/folder"),
        ("/no/such/folder", "directory"),
        ("weights.gguf", "no such file"),
        ("smollm2-135M", "did you mean smollm2-135m"),
        (__file__, "hub id"),
        ("", "directory"),
    ],
)
def test_sources_that_do_not_exist(source, named):
    with pytest.raises(ValueError, match=named):
        model.check(source)


def test_directory_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        model.check(str(tmp_path))


def test_weights_are_complete_or_refused(copy_of):
    folder = copy_of("llama", weights=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing \(the first: model\.norm\.weight\)"):
        load(folder)
    save_file(weights | {"model.norm.weight": norm, "model.extra.weight": norm.clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not part of the model \(the first: model\.extra\.weight\)"):
        load(folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read"):
        load(folder)


def test_fingerprint_tells_weights_apart(copy_of, folders):
    original = load(folders["llama"]).fingerprint
    folder = copy_of("llama", weights=True, transformers_version="0.0.0")
    assert load(folder).fingerprint == original
    assert 0 <= original < 1 << 64
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, file, {"format": "pt"})
    assert load(folder).fingerprint != original
    rope = {"rope_type": "default", "rope_theta": 2e4}
    other = json.loads((folders["llama"] / "config.json").read_text()) | {"rope_parameters": rope}
    shutil.copy(folders["llama"] / "model.safetensors", file)
    (folder / "config.json").write_text(json.dumps(other))
    assert load(folder).fingerprint != original


def test_fingerprint_is_the_same_in_another_process(folders):
    code = (
        "import sys, torch; from bitkv_dist import model; "
        "print(model.load(sys.argv[1], dtype=None, device=torch.device('cpu')).fingerprint, 'deepspeed' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-P", "-c", code, folders["llama"]], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert printed.split() == [str(load(folders["llama"]).fingerprint), "False"]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, so that no other process can share it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous line")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_weights_stay_shared_between_processes(tmp_path):
    tiny.save(tmp_path, vocab_size=4096, hidden_size=1024, intermediate_size=4096)
    weight_bytes = (tmp_path / "model.safetensors").stat().st_size
    before = anonymous_bytes()
    served = load(tmp_path)
    assert all(torch.isfinite(parameter.sum()) for parameter in served.module.parameters())  # touches every page
    assert anonymous_bytes() - before < weight_bytes / 4


def test_built_in_model():
    served = load("smollm2-135m")
    assert (served.layers, served.heads, served.kv_heads, served.head_dim, served.max_positions) == (30, 9, 3, 64, 8192)
    prompt = served.tokenizer("The capital of France is")["input_ids"]
    assert served.tokenizer.decode(continue_greedily(served, prompt, [len(prompt)], 1)) == " Paris"
    assert served.tokenizer.chat_template
