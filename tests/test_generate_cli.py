"""The command line of `generate`: refusals in one line, text and report of real runs of a tiny random model."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import commands
import pytest
import tiny
import torch
from ranks import ROOT, launched, run_command
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bitkv_dist.launch import generate
from bitkv_dist.launch.dialogue import turns
from bitkv_dist.launch.display import Bar, Texts

POSITIONS = 400
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REPORT = {
    "schema": None,
    "text": None,
    "token_ids": None,
    "prompt_tokens": None,
    "finish_reason": None,
    "prefill": None,
    "world": {"size", "tp", "sp", "backend", "device"},
    "kv": {"codec", "key_bits", "value_bits", "stored_bits_per_element", "read_bits_per_element", "read_bits_total"}
    | {"ratio", "ratio_total", "bytes_total", "bytes_per_rank", "bf16_bytes", "sealed_tokens", "exact_tokens"},
    "timing": {"load_s", "prefill_s", "prefill_tokens_per_s", "first_token_s", "decode_s", "decode_tokens_per_s"},
    "memory": {"peak_rss_bytes_per_rank"},
    "digest": {"rotation", "cache"},
    "kernel": {"backend", "reason"},
    "promise": {"other_sp", "other_tp_or_layout"},
    "exchange": {"layout", "kind", "bytes_per_layer"},
}


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<e>"])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>")
    made.chat_template = CHAT
    return made


@pytest.fixture(scope="module")
def reference(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**tiny.SIZES | sizes)).eval()
    model.generation_config = GenerationConfig(repetition_penalty=1.1, eos_token_id=tokenizer.eos_token_id)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, reference, tokenizer):
    place = tmp_path_factory.mktemp("a model's folder")
    reference.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Calls main in this process, as a world of one; returns (stdout, report)."""

    def call(*argv: str) -> tuple[str, dict]:
        path = tmp_path / "report.json"
        commands.call(generate, "--model", folder, "--device", "cpu", "--json", path, *argv)
        return capsys.readouterr().out, json.loads(path.read_text())

    return call


def expected(reference, tokenizer, prompt: str, tokens: int) -> list[int]:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return reference.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()


refused = partial(commands.refused, generate)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "prompt: none given"),
        (["--prompt", ""], "has no tokens"),
        (["--prompt", "x", "--kv-bits", "3.5"], "3.5"),
        (["--prompt", "x", "--kv-bits", "5"], "cache.kv_bits 5"),
        (["--prompt", "x", "--kv-bits", "16", "--codec", "planes"], "cache.kv_bits 16"),
        (["--prompt", "x", "--kv-bit", "2"], "--kv-bit"),
        (["--prompt", "x", "--sp", "0"], "parallel.sp 0"),
        (["--prompt", "x", "--tp", "3"], "tp 3"),
        (["--prompt", "x", "--sp", "2"], "sp 2"),
        (["--prompt", "x", "--chunk", "300"], "generate.chunk 300"),
        (["--prompt", "x", "--config", "3bit"], "did you mean"),
        (["--prompt", "x", "--top-p", "0.9"], "generate.top_p 0.9"),
        (["--prompt", "x", "--json", "/no/such/folder/r.json"], "/no/such/folder/r.json"),
        (["--prompt-file", "/no/such/file.txt"], "prompt file '/no/such/file.txt'"),
        (["--prompt", "x", "--prompt", "y", "--interactive"], "interactive with 2 prompts"),
        (["--prompt", "x" * (POSITIONS + 1)], f"prompt of {POSITIONS + 1} tokens: the model has {POSITIONS} positions"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_refused_before_weights_load(capsys, folder, monkeypatch, argv, part):
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    assert part in refused(capsys, "--model", folder, "--device", "cpu", *argv)


def test_beams_are_refused_before_weights_load(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    place = shutil.copytree(folder, tmp_path / "beams", ignore=shutil.ignore_patterns("*.safetensors"))
    (place / "generation_config.json").write_text('{"num_beams": 4}')
    message = refused(capsys, "--model", str(place), "--device", "cpu", "--prompt", "x")
    assert "generation_config.num_beams 4: not served" in message


def test_a_wrong_model_name_is_refused(capsys):
    assert "smollm2-135m" in refused(capsys, "--prompt", "x", "--model", "smollm2-135")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--kv-bits 7", "cache.kv_bits 7: "),
        ("--kv-bits 3.5", "argument --kv-bits: invalid int value: '3.5'"),
        ("--sp 0", "parallel.sp 0: "),
        ("--sp 2", "tp 1 x sp 2: "),
        ("--tp 3", "tp 3: must divide the 2 KV heads"),
        ("--tp 16", "tp 16: must divide the 2 KV heads"),
    ],
)
def test_exit_status_and_one_line(folder, flag, said):
    """C22: also where assertions are off."""
    argv = [sys.executable, "-O", "-m", "bitkv_dist.launch.generate", "--model", folder, "--device", "cpu", "--prompt", "x"]
    done = subprocess.run([*argv, *flag.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"bitkv generate: {said}")


def test_exact_equals_generate(run, reference, tokenizer):
    out, report = run("--kv-bits", "16", "--prompt", "hello world", "--max-new-tokens", "24")
    ids = expected(reference, tokenizer, "hello world", 24)
    assert report["token_ids"] == [ids]
    assert report["text"] == [tokenizer.decode(ids)]
    assert out == report["text"][0] + "\n"
    assert report["kv"]["codec"] == "exact"


def test_report_has_exactly_the_promised_keys(run):
    _, report = run("--config", "2bit", "--prompt", "x" * 390, "--max-new-tokens", "3", "--sink-tokens", "0", "--digest")
    assert report["schema"] == 1
    for name, keys in REPORT.items():
        if keys is not None:
            assert keys <= set(report[name])
    assert set(report) == set(REPORT)
    assert report["kv"]["sealed_tokens"] == 256 and report["prompt_tokens"] == [390]
    assert report["kv"]["bytes_total"] == sum(report["kv"]["bytes_per_rank"])
    assert report["digest"]["cache"] and report["digest"]["rotation"]


def test_several_prompts_do_not_mix(run, reference, tokenizer, tmp_path):
    path = tmp_path / 'it\'s & "x".txt'
    path.write_bytes(b"\xef\xbb\xbfthird prompt\r\n")
    argv = ("--config", "exact", "--prompt", "one", "--prompt", "second", "--prompt-file", str(path), "--max-new-tokens", "12")
    out, report = run(*argv)
    texts = ("one", "second", "third prompt")
    assert report["token_ids"] == [expected(reference, tokenizer, text, 12) for text in texts]
    assert out == "".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(report["text"], 1))
    quiet, again = run(*argv, "--no-stream")
    assert quiet == out and again["token_ids"] == report["token_ids"]


def test_stop_string(run, reference, tokenizer):
    text = tokenizer.decode(expected(reference, tokenizer, "hello world", 24))
    stop = text[6:9]
    out, report = run("--kv-bits", "16", "--prompt", "hello world", "--max-new-tokens", "24", "--stop", stop)
    assert report["text"] == [text[: text.index(stop)]] and report["finish_reason"] == ["stop"]
    assert out == report["text"][0] + "\n"


def test_no_new_tokens(run):
    out, report = run("--prompt", "hello", "--max-new-tokens", "0")
    assert (report["token_ids"], report["text"], report["finish_reason"], out) == ([[]], [""], ["length"], "\n")


def test_sampling_seed_repeats(run):
    argv = ("--prompt", "hello", "--temperature", "1", "--max-new-tokens", "16")
    runs = [run(*argv, "--sampling-seed", seed)[1]["token_ids"] for seed in ("7", "7", "8")]
    assert runs[0] == runs[1] != runs[2]


def test_chat_applies_the_template(run):
    _, plain = run("--prompt", "hi", "--max-new-tokens", "1")
    _, chat = run("--prompt", "hi", "--max-new-tokens", "1", "--chat")
    assert (plain["prompt_tokens"], chat["prompt_tokens"]) == ([2], [len("[user]hi[assistant]")])


def test_json_on_stdout_takes_the_place_of_the_text(folder, capsys):
    commands.call(generate, "--model", folder, "--device", "cpu", "--prompt", "hi", "--max-new-tokens", 4, "--json", "-")
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == [2]


def test_turns_are_appended_to_the_cache(run, reference, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" and then\n\n the end\n"))
    out, report = run("--kv-bits", "16", "--prompt", "once", "--interactive", "--no-chat", "--max-new-tokens", "6")
    ids = tokenizer("once").input_ids
    for turn, said in zip(("", " and then", " the end"), report["token_ids"], strict=True):
        ids += tokenizer(turn, add_special_tokens=False).input_ids if turn else []
        whole = reference.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0].tolist()
        assert said == whole[len(ids) :]
        ids = whole
    assert report["prompt_tokens"] == [4, 9, 8]
    assert out == "".join(f"{text}\n" for text in report["text"])


def test_a_full_conversation_says_so_and_goes_on(run, monkeypatch):
    said = []
    monkeypatch.setattr("bitkv_dist.launch.dialogue.say", said.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * POSITIONS + "\nshort\n"))
    _, report = run("--interactive", "--no-chat", "--max-new-tokens", "2", "--prompt", "a")
    assert report["prompt_tokens"] == [1, 5]
    assert len(said) == 1 and f"has {POSITIONS} positions" in said[0]


class _Alone:
    """A mesh of one that counts how often rank 0 spoke."""

    world = SimpleNamespace(rank=0)

    def __init__(self) -> None:
        self.said = 0

    def broadcast(self, turn):
        self.said += 1
        return turn


def test_rank_0_speaks_up_while_nothing_is_typed():
    """Other ranks wait in a collective that has a timeout: the person at the keyboard has none."""
    reading, writing = os.pipe()
    mesh = _Alone()
    with os.fdopen(reading) as source:
        taken = turns(mesh, lambda line: [len(line)], patience_s=0.02, source=source)
        threading.Timer(0.5, os.write, (writing, b"four\n\nsix or\r\n")).start()
        assert next(taken) == [4] and mesh.said > 5
        assert next(taken) == [6]
        os.close(writing)
        assert list(taken) == []


def test_bar_only_on_a_terminal():
    for console, shown in ((Console(file=io.StringIO()), False), (Console(file=io.StringIO(), force_terminal=True), True)):
        bar = Bar(console, "tokens")
        for done in (1, 50, 100):
            bar("reading", done, 100)
        said = console.file.getvalue()
        assert ("reading" in said) is shown and (re.search(r"\d tokens/s.*\d:\d\d:\d\d", said) is not None) is shown


def test_live_text_comes_token_by_token(tokenizer, capsys):
    texts = Texts(tokenizer, [[], []], (), live=True, visible=True)
    for token in tokenizer("ab").input_ids:
        texts.push(1, token)
        texts.push(0, token)
        assert capsys.readouterr().out.endswith(tokenizer.decode([token]))
    texts.finish()
    assert capsys.readouterr().out == "\n--- 2 of 2 ---\nab\n"


def test_two_ranks_follow_the_conversation(folder, tmp_path):
    """Real processes: turns typed on rank 0 reach the other rank, also after a pause longer than a collective may take."""
    path, preset = tmp_path / "report.json", tmp_path / "run.yaml"
    preset.write_text("cache: {codec: exact, key_bits: 16, value_bits: 16}\nparallel: {step_timeout_s: 4}\n")
    argv = ["--model", folder, "--device", "cpu", "--config", preset, "--interactive", "--no-chat", "--max-new-tokens", "4"]
    command = launched("torchrun", 2, ROOT / "launch" / "generate.py", *map(str, [*argv, "--json", path]))
    typed = f"(echo 'once upon'; sleep 16; echo ' and then') | exec {shlex.join(command)}"  # start-up, then a pause
    ended = run_command(["sh", "-c", typed], timeout_s=90)
    assert ended.status == 0, ended.err
    report = json.loads(path.read_text())
    assert report["prompt_tokens"] == [9, 9] and report["world"]["size"] == 2
    assert ended.out == "".join(f"{text}\n" for text in report["text"])


def test_start_up_lines(folder):
    """One per rank, then the grid, then the digest that all have agreed on; rank 0 alone says them."""
    argv = ["--model", folder, "--device", "cpu", "--prompt", "hi", "--max-new-tokens", "1"]
    ended = run_command(launched("torchrun", 3, ROOT / "launch" / "generate.py", *argv))
    assert ended.status == 0, ended.err
    *ranks, grid, digest = ended.messages()[:5]
    for rank, line in enumerate(ranks):
        host = re.escape(socket.gethostname())
        assert re.match(rf"bitkv: rank {rank} \(host {host}\) on cpu, backend gloo, 1 thread( on cores [\d,-]+)?$", line)
    assert grid == "bitkv: world size 3 (sp 3 x tp 1, layout replicated) by torchrun, backend gloo, device cpu, torch.float32"
    assert re.match(r"bitkv: rotation digest [0-9a-f]{16}, agreed by all ranks$", digest)
    assert ended.err.count("agreed by all ranks") == 1
