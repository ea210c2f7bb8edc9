"""Flags that several commands take. They have no defaults: those live in the configuration, and a flag only overrides a field."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DEFAULT_PRESET = "4bit"

_CACHE = {
    "--codec": ("codec", str, "planes, minmax (round-to-nearest baseline) or exact"),
    "--kv-bits": ("kv_bits", int, "bits for keys and values, all scanned; 16 = exact"),
    "--key-bits": ("key_bits", int, "bits stored of a key element"),
    "--value-bits": ("value_bits", int, "bits stored of a value element"),
    "--recent-tokens": ("recent_tokens", int, "newest tokens that stay exact"),
    "--sink-tokens": ("sink_tokens", int, "first tokens that stay exact, rounded up to whole pages"),
    "--seed": ("seed", int, "seed of the rotations"),
}
_PARALLEL = {
    "--tp": ("tp", int, "tensor-parallel ranks (1)"),
    "--sp": ("sp", int, "sequence-parallel ranks (all ranks / tp)"),
    "--device": ("device", str, "auto, cpu or cuda"),
}
_MODEL = {
    "--model": ("model", str, "smollm2-135m, a directory, a .gguf file or a hub id"),
    "--dtype": ("dtype", str, "float32, bfloat16 or float16 (float32 on CPU, bfloat16 on GPU)"),
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """--config, and the flags of the cache, of the parallel grid and of the model."""
    parser.add_argument("--config", default=DEFAULT_PRESET, help=f"preset or YAML file ({DEFAULT_PRESET})")
    for title, section, flags in (("cache", "cache", _CACHE), ("parallel grid", "parallel", _PARALLEL), ("model", "generate", _MODEL)):
        group = parser.add_argument_group(title)
        for flag, (field, kind, meaning) in flags.items():
            add_field(group, flag, f"{section}.{field}", type=kind, help=meaning)


def add_field(parser: argparse._ActionsContainer, flag: str, field: str, **options: Any) -> None:
    """A flag that overrides one dotted field of the configuration, and is absent from the result when not given."""
    if options.get("type") is not None:
        options.setdefault("metavar", options["type"].__name__.upper())
    parser.add_argument(flag, dest=field, default=argparse.SUPPRESS, **options)


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What `bitkv_dist.config.build` takes: the fields that flags were given for."""
    return {name: value for name, value in vars(args).items() if "." in name}


def output_file(text: str) -> Path:
    """argparse type of a file to write: refused at once, not after the work, when its folder cannot hold it."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in an existing folder")
    return path
