"""Flags that override fields of the configuration. They have no defaults: those live in the configuration."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import get_args, get_type_hints

from bitkv_dist.config import SECTIONS, RunConfig, build

DEFAULT_PRESET = "4bit"
_MODEL = (
    ("--model", "generate.model", "smollm2-135m, a directory, a .gguf file or a hub id"),
    ("--dtype", "generate.dtype", "float32, bfloat16 or float16; float32 on a CPU and bfloat16 on a GPU without it"),
    ("--weights", "generate.weights", "kept in: model (that is --dtype), bfloat16 (rounding if need be) or auto (if not)"),
)
EVICTION = (
    ("--eviction", "cache.eviction", "none, window (the newest sealed tokens stay) or heavy (those that are attended to most)"),
    ("--eviction-keep", "cache.eviction_keep", "below 1: share of the sealed tokens that stays; else so many tokens"),
)
BITS = (
    ("--kv-bits", "cache.kv_bits", "bits of keys and values, all scanned (tailored: words first); 16 = exact"),
    ("--key-bits", "cache.key_bits", "bits stored of a key element"),
    ("--value-bits", "cache.value_bits", "bits stored of a value element"),
)
_CACHE = (
    ("--codec", "cache.codec", "planes, minmax (the round-to-nearest baseline), exact, tailored or residual"),
    ("--calibration", "cache.calibration", "tailored, residual: the file that bitkv calibrate made"),
    *BITS,
    ("--recent-tokens", "cache.recent_tokens", "newest tokens that stay exact"),
    ("--sink-tokens", "cache.sink_tokens", "first tokens that stay exact, rounded up to whole pages"),
    ("--seed", "cache.seed", "seed of the rotations"),
    *EVICTION,
)
_GRID = (
    ("--tp", "parallel.tp", "tensor-parallel ranks"),
    ("--sp", "parallel.sp", "sequence-parallel ranks; all ranks / tp without it"),
    ("--layout", "parallel.layout", "weights behind attention: replicated over SP, or helix: shared by all ranks"),
    ("--exchange", "parallel.exchange", "of attention: allgather, alltoall (helix), allreduce (not bit-identical) or auto"),
    ("--device", "parallel.device", "auto, cpu or cuda"),
    ("--bind", "parallel.bind", "auto: each rank to its own cores, or those near its GPU; or none"),
    ("--start-timeout", "parallel.start_timeout_s", "seconds that ranks wait for each other while they start and load"),
    ("--step-timeout", "parallel.step_timeout_s", "seconds that they wait for each other afterwards"),
    ("--cpu-isa", "parallel.cpu_isa", "of the CPU kernels, if hosts differ: auto, avx512bf16, avx512, avxvnni, avx2, portable"),
)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """What every command that loads a model takes: --config, and the flags of model, cache and parallel grid."""
    parser.add_argument("--config", default=DEFAULT_PRESET, metavar="NAME", help=f"preset or YAML file ({DEFAULT_PRESET})")
    for title, fields in (("model", _MODEL), ("cache", _CACHE), ("parallel grid", _GRID)):
        add_field_flags(parser.add_argument_group(title), fields)


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the cache, for a command that loads no model; --bits is --kv-bits."""
    group = parser.add_argument_group("cache")
    add_field_flags(group, (("--bits", "cache.kv_bits", "the same as --kv-bits"), *_CACHE))


def add_field_flags(group: argparse._ActionsContainer, fields: Iterable[tuple[str, str, str]]) -> None:
    """(flag, dotted field, help) each: a value of the field's own type, absent from the result when the flag is not given."""
    for flag, field, says in fields:
        kind = _type_of(field)
        group.add_argument(flag, dest=field, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=says)


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """The preset of --config with the fields that flags were given for."""
    return build(arguments.config, {name: value for name, value in vars(arguments).items() if "." in name})


def _type_of(field: str) -> type:
    """int for `int | None`."""
    if field == "cache.kv_bits":  # a shorthand of `build`
        return int
    section, name = field.split(".")
    hint = get_type_hints(SECTIONS[section])[name]
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)
