"""Fit the codebooks of codec tailored or residual to a model on texts of yours: one file for --calibration.

bitkv calibrate --model smollm2-135m --codec tailored --text book.txt --output tailored.safetensors

Under a launcher the ranks share out the layers; the file is the same for any number of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitkv_dist.cache_config import CALIBRATED
from bitkv_dist.calibrated import FORMS
from bitkv_dist.config import RunConfig, build
from bitkv_dist.launch import flags, shell

if TYPE_CHECKING:
    from bitkv_dist.calibrated import Origin

NAME = "calibrate"
LEAST_TOKENS = {"tailored": 2048, "residual": 512}  # that teach: two for each word, and enough for means
LEAST_WINDOW = 64
_FIELDS = (
    ("--model", "generate.model", "smollm2-135m, a directory, a .gguf file or a hub id"),
    ("--dtype", "generate.dtype", "float32, bfloat16 or float16; float32 on a CPU and bfloat16 on a GPU without it"),
    ("--device", "parallel.device", "auto, cpu or cuda"),
    ("--start-timeout", "parallel.start_timeout_s", "seconds that ranks wait for each other"),
)


@dataclass(frozen=True)
class Text:
    """A text of the calibration: its name, digest and token ids."""

    name: str
    digest: str
    ids: list[int]

    @property
    def source(self) -> dict[str, Any]:
        return {"name": self.name, "digest": self.digest, "tokens": len(self.ids)}


def main(argv: list[str] | None = None) -> int:
    """ValueError, before weights load, for what a user can put right."""
    asked = _parser().parse_args(argv)
    config = build("exact", {name: value for name, value in vars(asked).items() if "." in name})
    _check(asked)

    import transformers

    from bitkv_dist import model as models
    from bitkv_dist.codec.codebooks import check_place
    from bitkv_dist.launch.display import Bar, Console
    from bitkv_dist.parallel import mesh as meshes

    transformers.logging.set_verbosity_error()
    positions = models.max_positions_of(models.check(config.generate.model))
    if asked.window > positions:
        raise ValueError(f"window {asked.window}: {config.generate.model} has {positions} positions; give at most {positions}")
    mesh = meshes.start(config.parallel, say=shell.say_for_all)
    console = Console(stderr=True, quiet=mesh.world.rank != 0, highlight=False, markup=False, soft_wrap=True)
    bar = Bar(console)
    try:
        if mesh.world.rank == 0:
            check_place(asked.output)
        texts = mesh.broadcast(_read(asked, config, bar) if mesh.world.rank == 0 else None)
        origin, heads = _calibrate(asked, config, mesh, texts, bar)
    finally:
        bar.stop()
    if mesh.world.rank == 0:
        print(*summary(origin, heads, asked.output), sep="\n")
    return 0


def _check(asked: argparse.Namespace) -> None:
    asked.form = asked.form or FORMS[asked.codec][0]
    if asked.form not in FORMS[asked.codec]:
        raise ValueError(f"form {asked.form}: codec {asked.codec} has {', '.join(FORMS[asked.codec])}; take one of these")
    if asked.output.suffix != ".safetensors":
        raise ValueError(f"output {str(asked.output)!r}: must end in .safetensors; add it")
    least = {"tokens": LEAST_TOKENS[asked.codec], "window": LEAST_WINDOW, "vectors": LEAST_TOKENS[asked.codec], "iterations": 1}
    for name, lowest in least.items():
        if getattr(asked, name) < lowest:
            raise ValueError(f"{name} {getattr(asked, name)}: must be at least {lowest} for codec {asked.codec}; leave it out")
    if not 0 <= asked.seed < 2**63:
        raise ValueError(f"seed {asked.seed}: must be between 0 and {2**63 - 1}; leave it out")


def _read(asked: argparse.Namespace, config: RunConfig, bar: Any) -> list[Text]:
    """The texts, each cut to its share of --tokens; ValueError where they are too short to fit anything."""
    from bitkv_dist import checkpoint, text
    from bitkv_dist.fit.attended import RECENT, SINK
    from bitkv_dist.fit.sample import taught

    raw = [(Path(path).name, text.read_prompt_file(path, "--text")) for path in asked.text]
    tokenizer = checkpoint.read_tokenizer(checkpoint.localise(config.generate.model, bar))
    share = asked.tokens // len(raw)
    texts = [
        Text(name, blake2b(content.encode(), digest_size=8).hexdigest(), text.encode_prompt(tokenizer, content)[:share])
        for name, content in raw
    ]
    teaching = [taught(len(window)) for window in windows_of(texts, asked.window)]
    teach = sum(teaching)
    longest = max(teaching, default=0)
    if teach < LEAST_TOKENS[asked.codec]:
        rule = f"{teach} tokens in all that teach, codec {asked.codec} is fitted to at least {LEAST_TOKENS[asked.codec]}"
        raise ValueError(f"text {' '.join(asked.text)}: {rule}; give more text or --tokens")
    if asked.form == "attended" and longest <= SINK + RECENT:
        rule = f"form attended learns behind {SINK + RECENT} tokens of a window, the longest here teaches {longest}"
        raise ValueError(f"window {asked.window}: {rule}; give a longer --window and text, or --form weighted")
    return texts


def windows_of(texts: Iterable[Text], most: int) -> list[list[int]]:
    """The texts' tokens in stretches of at most `most`, each read from position 0; a rest too short to say much is left out."""
    cut = [text.ids[start : start + most] for text in texts for start in range(0, len(text.ids), most)]
    return [window for window in cut if len(window) >= LEAST_WINDOW]


def _calibrate(asked: argparse.Namespace, config: RunConfig, mesh: Any, texts: list[Text],
               bar: Any) -> tuple[Origin, list[int]]:
    """What was written, and (on rank 0) how many of all heads are weighted. Every rank fits every size-th layer."""
    import torch

    from bitkv_dist import model as models
    from bitkv_dist.cache_config import GRANULE_TOKENS
    from bitkv_dist.calibrated import VERSION, Origin
    from bitkv_dist.codec.codebooks import save
    from bitkv_dist.fit.books import Fit, fit_layer
    from bitkv_dist.fit.sample import rope_of, walk

    dtype = getattr(torch, config.generate.dtype) if config.generate.dtype else None
    place = {"device": mesh.world.device, "weights": config.generate.weights}
    model = models.load(config.generate.model, dtype=dtype, progress=bar, **place)
    how = Fit(asked.codec, asked.form, asked.vectors, asked.iterations, asked.seed)
    rope = rope_of(model, GRANULE_TOKENS, torch.device("cpu"))  # where the fit is, wherever the model
    rank, size = mesh.world.rank, mesh.world.size
    found: list[tuple[dict, dict]] = []
    mine: list[tuple[dict, dict] | None] = [None]

    def visit(layer: int, windows: list) -> None:
        if layer % size == rank:
            mine[0] = fit_layer(windows, rope, how)
        if layer % size == size - 1 or layer == model.layers - 1:  # the others wait no longer than one layer takes
            found.extend(part for part in mesh.gather_objects(mine[0]) if part is not None)
            mine[0] = None

    walk(model, windows_of(texts, asked.window), visit, lambda done, total: bar("fitting layers", done, total))
    origin = Origin(
        VERSION, asked.codec, asked.form, model.name, f"{model.fingerprint:016x}", model.layers, model.kv_heads, model.head_dim,
        rope.scaling, "all KV heads" if asked.codec == "tailored" else "none", tuple(text.source for text in texts),
        asked.vectors, asked.seed, {part: sum(lost[part] for _, lost in found) / len(found) for part in found[0][1]}, "",
        asked.iterations, asked.window,
    )  # fmt: skip
    tensors = {name: torch.stack([layer[name] for layer, _ in found]) for name in found[0][0]} | {"inv_freq": rope.inv_freq}
    heads = tensors["K.weighted"].flatten().tolist() if "K.weighted" in tensors else []
    return (save(asked.output, origin, tensors) if rank == 0 else origin), heads


def summary(origin: Origin, heads: list[int], path: Path) -> list[str]:
    """What a person wants to know of the file that was written."""
    lost = {name: f"{share:.3f}" for name, share in origin.lost.items()}
    lines = [
        f"{origin.described()}; an eighth of the tokens held out",
        f"share of the variance that the codes lose, taught and held out: keys {lost['K.taught']}, {lost['K.held_out']}; "
        f"values {lost['V.taught']}, {lost['V.held_out']}",
        f"{path}: {path.stat().st_size / 1e6:,.1f} MB, digest {origin.digest}, model {origin.fingerprint}",
    ]
    if heads:
        lines.insert(2, f"{sum(heads)} of {len(heads)} heads weight their keys by the attention that channels receive")
    return lines


def _parser() -> shell.Parser:
    parser = shell.Parser(NAME, __doc__.partition("\n")[0])
    parser.add_argument("--codec", choices=CALIBRATED, required=True, help="what to fit")
    texts = {"nargs": "+", "action": "extend", "required": True, "metavar": "FILE"}
    parser.add_argument("--text", **texts, help="UTF-8, of the kind that the cache will hold")
    parser.add_argument("--output", type=shell.output_file, required=True, metavar="FILE.safetensors", help="what to write")
    says = "tailored: attended (by the attention that codes get), weighted (the article's: by all causal pairs), unweighted, "
    says += "or threshold (two levels of a channel)"
    parser.add_argument("--form", metavar="FORM", help=says)
    flags.add_field_flags(parser.add_argument_group("model"), _FIELDS)
    group = parser.add_argument_group("fitting")
    group.add_argument("--tokens", type=int, default=16384, metavar="N", help="tokens of all texts together (16384)")
    group.add_argument("--window", type=int, default=4096, metavar="N", help="tokens read at a time, from position 0 (4096)")
    says = "tokens that k-means sees, drawn at random (8192)"
    group.add_argument("--vectors", type=int, default=8192, metavar="N", help=says)
    group.add_argument("--iterations", type=int, default=8, metavar="N", help="of k-means (8)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    return parser


if __name__ == "__main__":
    shell.run(main, NAME)
