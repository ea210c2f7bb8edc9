"""The command line of `calibrate`, and what generate, evaluate and snapshots make of its files."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import simulated
import tiny
import torch
from commands import call
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitkv_dist.calibrated import read_origin
from bitkv_dist.codec.codebooks import content_digest, save
from bitkv_dist.config import build
from bitkv_dist.kernels import dispatch
from bitkv_dist.launch import calibrate, diagnose, evaluate, generate
from bitkv_dist.launch.display import Bar, Console

DATA = Path(__file__).parent / "data"
TALE, HANDBOOK = str(DATA / "tale.txt"), str(DATA / "handbook.txt")
QUICK = ("--tokens", "2600", "--window", "1024", "--vectors", "2048", "--iterations", "1", "--device", "cpu")
WINDOW = ("--page-tokens", "64", "--sink-tokens", "64", "--recent-tokens", "64", "--device", "cpu")


def save_model(place: Path, seed: int = 0) -> str:
    return str(tiny.save_tokenizer(tiny.save(place, vocab_size=257, head_dim=16, max_position_embeddings=2048, seed=seed)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("a model's folder"))


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    found = {}
    for codec in ("tailored", "residual"):
        found[codec] = str(place / f"{codec}.safetensors")
        call(calibrate, "--model", folder, "--codec", codec, "--text", TALE, "--output", found[codec], *QUICK)
    return found


def test_a_file_and_what_is_said_of_it(folder, tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    argv = ("--model", folder, "--codec", "tailored", "--form", "threshold", "--output", str(path), *QUICK)
    call(calibrate, *argv, "--text", TALE, HANDBOOK)
    origin, out = read_origin(str(path)), capsys.readouterr().out
    assert (origin.codec, origin.form, origin.model, origin.scale) == ("tailored", "threshold", folder, "all KV heads")
    assert [text["name"] for text in origin.texts] == ["tale.txt", "handbook.txt"]
    assert [text["tokens"] for text in origin.texts] == [1300, 1300] and all(len(text["digest"]) == 16 for text in origin.texts)
    assert set(origin.lost) == {"K.taught", "K.held_out", "V.taught", "V.held_out"}
    assert (origin.vectors, origin.iterations, origin.window) == (2048, 1, 1024)
    how = "fitted to 2,600 tokens in windows of 1,024, 2,048 vectors in 1 iterations, seed 0; an eighth of the tokens held out"
    assert how in out and "4 of 4 heads" in out
    assert f"keys {origin.lost['K.taught']:.3f}, {origin.lost['K.held_out']:.3f}" in out and origin.digest in out
    first = path.read_bytes()
    call(calibrate, *argv, "--text", TALE, HANDBOOK)
    assert path.read_bytes() == first


def one_rank(mesh, asked: argparse.Namespace, config, texts) -> str:
    asked = argparse.Namespace(**vars(asked) | {"output": Path(asked.output) if mesh.world.rank == 0 else None})
    return calibrate._calibrate(asked, config, mesh, texts, Bar(Console(quiet=True)))[0].digest


def test_ranks_share_the_layers_and_write_the_same_file(folder, files, tmp_path):
    path = tmp_path / "ranks.safetensors"
    argv = ("--model", folder, "--codec", "tailored", "--text", TALE, "--output", str(path), *QUICK)
    asked = calibrate._parser().parse_args(argv)
    config = build("exact", {name: value for name, value in vars(asked).items() if "." in name})
    calibrate._check(asked)
    texts = calibrate._read(asked, config, Bar(Console(quiet=True)))
    simulated.run(2, one_rank, asked, config, texts)
    assert path.read_bytes() == Path(files["tailored"]).read_bytes()


def test_generate_reads_it_and_snapshots_know_it(folder, files, tmp_path, capsys):
    prompt, report, kept = tmp_path / "prompt.txt", tmp_path / "report.json", tmp_path / "kept"
    prompt.write_text(Path(HANDBOOK).read_text()[:900])
    base = ("--model", folder, "--codec", "tailored", "--sink-tokens", "0", "--recent-tokens", "64", "--device", "cpu")
    common = (*base, "--max-new-tokens", "6", "--ignore-eos", "--digest", "--json", str(report), "--no-stream")
    call(generate, *common, "--calibration", files["tailored"], "--prompt-file", str(prompt), "--save-cache", str(kept))
    first = json.loads(report.read_text())
    assert first["kv"]["codec"] == "tailored" and first["kv"]["codebook_bytes_per_rank"] > 0
    assert first["kernel"]["backend"] == dispatch.backend(torch.device("cpu"))[0]
    known = first["kv"]["calibration"]
    assert (known["digest"], known["iterations"], known["window"]) == (read_origin(files["tailored"]).digest, 1, 1024)
    assert "fitted to 2,600 tokens in windows of 1,024" in capsys.readouterr().err
    elsewhere = tmp_path / "moved.safetensors"
    elsewhere.write_bytes(Path(files["tailored"]).read_bytes())
    call(generate, *common, "--calibration", str(elsewhere), "--load-cache", str(kept))
    again = json.loads(report.read_text())
    assert again["token_ids"] == first["token_ids"] and again["digest"] == first["digest"]
    other = tmp_path / "other.safetensors"
    call(calibrate, "--model", folder, "--codec", "tailored", "--text", HANDBOOK, "--output", str(other), *QUICK)
    with pytest.raises(ValueError, match=r"cache\.calibration_digest is '.*' there and '.*' in this run"):
        call(generate, *common, "--calibration", str(other), "--load-cache", str(kept))


def test_columns_of_an_evaluation(folder, files, tmp_path, capsys):
    results = tmp_path / "results.json"
    argv = ("--model", folder, "--task", "ppl", "--text", HANDBOOK, "--positions", "300:400", *WINDOW)
    argv = (*argv, "--json", str(results))
    call(evaluate, *argv, "--compare", "exact,tailored,residual", "--calibration", files["tailored"], files["residual"])
    rows = {row["codec"]: row for row in json.loads(results.read_text())["rows"]}
    assert "tailored: its codebooks, 0.3 MB, are not in the stored bits" in capsys.readouterr().out
    assert 1.25 < rows["tailored"]["stored_bits"] < rows["residual"]["stored_bits"] < 2.2 and rows["residual"]["kl"] > 0
    same = tmp_path / "same.json"
    call(evaluate, *argv[:-1], str(same), "--compare", files["tailored"])
    assert json.loads(same.read_text())["rows"][0] == rows["tailored"]
    words = {}
    for bits in ("1", "3"):
        deep = tmp_path / f"{bits}.json"
        asked = ("--compare", "exact,tailored", "--calibration", files["tailored"], "--kv-bits", bits)
        call(evaluate, *argv[:-1], str(deep), *asked)
        words[bits] = json.loads(deep.read_text())["rows"][1]
    assert words["1"] == rows["tailored"] and words["3"]["stored_bits"] > 3.25 and words["3"]["kl"] < words["1"]["kl"]
    out = " ".join(capsys.readouterr().out.split())
    assert "fitted to 2,600 tokens in windows of 1,024, 2,048 vectors in 1 iterations" in out
    with pytest.raises(ValueError, match=r"codec residual: 0 files of --calibration hold its codebooks, it takes one; give"):
        call(evaluate, *argv, "--compare", "residual", "--calibration", files["tailored"])
    with pytest.raises(ValueError, match="nothing that is asked for is codec tailored; name the codec or leave it out"):
        call(evaluate, *argv, "--compare", "exact", "--calibration", files["tailored"])


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--codec", "planes"), "argument --codec: invalid choice: 'planes'"),
        (("--form", "attended", "--window", "256"), "window 256: form attended learns behind 256 tokens of a window"),
        (("--form", "two-stage"), "form two-stage: codec tailored has attended, weighted, unweighted, threshold"),
        (("--output", "x.bin"), "output 'x.bin': must end in .safetensors; add it"),
        (("--output", "no/such/x.safetensors"), "must be a file in an existing folder"),
        (("--output", "/proc/x.safetensors"), "output '/proc/x.safetensors': cannot be written (No such file or directory)"),
        (("--output", "x" * 240 + ".safetensors"), "cannot be written (File name too long); give a file in another folder"),
        (("--text", "no.txt"), "--text 'no.txt': cannot be read (No such file or directory); give a text file"),
        (("--text", "empty.txt"), "--text 'empty.txt': is empty; write text into it"),
        (("--text", "binary.txt"), "--text 'binary.txt': not UTF-8 (byte 0); convert it to UTF-8"),
        (("--text", "."), "--text '.': cannot be read (Is a directory); give a text file"),
        (("--text", "short.txt"), "text short.txt: 88 tokens in all that teach, codec tailored is fitted to at least 2048"),
        (("--tokens", "2339"), "2047 tokens in all that teach, codec tailored is fitted to at least 2048; give more text"),
        (("--seed", "-1"), f"seed -1: must be between 0 and {2**63 - 1}; leave it out"),
        (("--seed", str(2**63)), f"seed {2**63}: must be between 0 and {2**63 - 1}; leave it out"),
        (("--window", "4096"), "has 2048 positions; give at most 2048"),
        (("--vectors", "10"), "vectors 10: must be at least 2048 for codec tailored; leave it out"),
    ],
)
def test_refused_before_weights_load(folder, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256))[::-1])
    (tmp_path / "short.txt").write_text("x" * 100)
    given = {"--model": folder, "--codec": "tailored", "--text": TALE, "--output": "x.safetensors", "--window": "1024"}
    given |= {"--device": "cpu"} | dict(zip(argv[::2], argv[1::2], strict=True))
    try:
        call(calibrate, *(word for pair in given.items() for word in pair))
    except ValueError as error:
        found = str(error)
    except SystemExit as leaving:
        assert leaving.code == 2
        found = capsys.readouterr().err.strip()
    assert message in found and "\n" not in found
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_from_before_window_and_iterations_is_read(files, tmp_path):
    """As this program wrote them then: without the two fields, and digested without them."""
    tensors = load_file(files["residual"])
    old = replace(read_origin(files["residual"]), window=None, iterations=None)
    path = tmp_path / "old.safetensors"
    digest = save(path, old, tensors).digest
    with safe_open(path, "pt") as file:
        assert "window" not in file.metadata()["bitkv"] and "iterations" not in file.metadata()["bitkv"]
    origin = read_origin(str(path))
    assert origin.digest == digest == content_digest(origin, load_file(path)) and origin.window is None
    assert origin.described().endswith("fitted to 2,600 tokens, 2,048 vectors, seed 0")


def test_what_is_not_finite_is_refused(tmp_path):
    """A weight that overflowed: one line that names the layer, no file, no traceback of k-means."""
    folder = save_model(tmp_path)
    weights = load_file(Path(folder) / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][3, 5] = float("inf")
    save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="values of layer 1 are not finite; check its weights, or give another --dtype"):
        call(calibrate, "--model", folder, "--codec", "residual", "--text", TALE, "--output", str(path), *QUICK)
    assert not path.exists()


@pytest.mark.parametrize("command", [generate, evaluate, diagnose], ids=["generate", "evaluate", "diagnose"])
def test_a_file_of_other_kv_heads_is_refused_before_weights_load(files, tmp_path, monkeypatch, command):
    monkeypatch.setattr("bitkv_dist.model.load", lambda *_, **__: pytest.fail("weights were loaded"))
    sizes = {"vocab_size": 257, "head_dim": 16, "max_position_embeddings": 2048, "num_key_value_heads": 4}
    other = str(tiny.save_tokenizer(tiny.save(tmp_path, **sizes)))
    how = ("--codec", "residual", "--calibration", files["residual"])
    argv = {generate: (*how, "--prompt", "x"), diagnose: how, evaluate: ("--task", "ppl", "--text", TALE, "--compare", how[3])}
    with pytest.raises(ValueError, match=r"whose kv_heads are 2; this model's are 4; calibrate with this model"):
        call(command, "--model", other, "--device", "cpu", *argv[command])


def test_another_models_file_is_refused(files, tmp_path):
    other = save_model(tmp_path, seed=5)
    argv = ("--codec", "residual", "--calibration", files["residual"], "--prompt", "x", "--device", "cpu")
    with pytest.raises(ValueError, match=r"with fingerprint .*, this model's is .*; calibrate with this model"):
        call(generate, "--model", other, *argv)
