"""Compare KV codecs honestly with the exact cache: perplexity, retrieval, drift of every head, sensitivity of every layer.

bitkv evaluate --task ppl --text book.txt code.py --positions 1024:4096 --compare exact,minmax2,2bit,tiered4 --json results.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from types import SimpleNamespace

from bitkv_dist.launch import flags, shell

NAME = "evaluate"
COLUMNS = "exact,minmax4,minmax2,2bit,1bit,tiered2,tiered4"
# What each task reads besides --text, --json and the flags of model and window, and what it does without.
TASKS = {
    "ppl": {"compare": COLUMNS.split(","), "positions": (512, 1536), "plot": None},
    "retrieval": {
        "compare": COLUMNS.split(","),
        "context": [2048],
        "depths": [0.1, 0.3, 0.5, 0.7, 0.9],
        "kinds": ["passkey", "multikey", "keyvalue"],
        "trials": 1,
    },
    "drift": {"config": flags.DEFAULT_PRESET, "context": None},
    "sensitivity": {
        "config": "1bit",
        "positions": (512, 1024),
        "by": "layer",
        "raise_bits": None,
        "budget_bits": None,
        "output": None,
    },
}
_FIELDS = (
    ("--model", "generate.model", "smollm2-135m, a directory, a .gguf file or a hub id"),
    ("--dtype", "generate.dtype", "float32, bfloat16 or float16; float32 on a CPU and bfloat16 on a GPU without it"),
    ("--device", "parallel.device", "auto, cpu or cuda"),
    ("--page-tokens", "cache.page_tokens", "tokens sealed together, 64 or 128"),
    ("--sink-tokens", "cache.sink_tokens", "first tokens that stay exact, rounded up to whole pages"),
    ("--recent-tokens", "cache.recent_tokens", "newest tokens that stay exact"),
    ("--seed", "cache.seed", "seed of the rotations"),
    *flags.EVICTION,
)
_OF = "of all columns but exact ones; presets named by their bits take no others"
_BITS = tuple((flag, field, f"{says.partition(';')[0]}, {_OF}") for flag, field, says in flags.BITS)


def main(argv: list[str] | None = None) -> int:
    """One task, in one process; ValueError, before weights load, for what a user can put right."""
    asked = _options(_parser().parse_args(argv))

    from bitkv_dist.parallel.world import discover

    if (size := discover(os.environ).size) > 1:
        raise ValueError(f"world size {size}: evaluate runs in one process; start it without a launcher")

    from bitkv_dist.launch import tasks

    bench = tasks.Bench(asked)
    try:
        getattr(tasks, asked.task)(bench)
    finally:
        bench.stop_bars()
    return 0


def _options(given: argparse.Namespace) -> SimpleNamespace:
    """What the task reads, with what it does without; ValueError for a flag that it does not read."""
    defaults = TASKS[given.task]
    common = {name: value for name, value in vars(given).items() if name in ("task", "text", "json", "calibration")}
    overrides = {name: value for name, value in vars(given).items() if "." in name}
    special = {name: value for name, value in vars(given).items() if name in {name for task in TASKS.values() for name in task}}
    for name in special:
        if name not in defaults:
            readers = ", ".join(task for task, reads in TASKS.items() if name in reads)
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: task {given.task} does not read it; leave it out or use --task {readers}")
    return SimpleNamespace(**common, overrides=overrides, **(defaults | special))


def _parser() -> argparse.ArgumentParser:
    parser = shell.Parser(NAME, __doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, required=True, help="what to measure")
    texts = {"nargs": "+", "action": "extend", "required": True, "metavar": "FILE"}
    parser.add_argument("--text", **texts, help="UTF-8; ppl takes several")
    parser.add_argument("--json", type=shell.output_file, metavar="FILE", help="results; what it holds is not run again")
    made = {"nargs": "+", "action": "extend", "default": [], "metavar": "FILE"}
    parser.add_argument("--calibration", **made, help="of bitkv calibrate: what columns tailored and residual read")
    flags.add_field_flags(parser.add_argument_group("model and cache, the same for all columns"), (*_FIELDS, *_BITS))
    group = parser.add_argument_group("tasks")
    columns = f"ppl, retrieval: presets, YAML or calibration files, codecs of --calibration; comma-separated ({COLUMNS})"
    _add(group, "--compare", _names, "NAMES", columns)
    _add(group, "--config", str, "NAME", "drift, sensitivity: one such (4bit; 1bit)")
    _add(group, "--positions", _positions, "A:B", "ppl, sensitivity: tokens to predict (512:1536; 512:1024)")
    _add(group, "--context", _list_of(int), "N,..", "retrieval: tokens of a prompt (2048); drift: of the text (2048)")
    _add(group, "--depths", _list_of(float), "X,..", "retrieval: where the fact stands, 0 to 1 (0.1,0.3,0.5,0.7,0.9)")
    _add(group, "--kinds", _names, "NAMES", "retrieval: passkey, multikey, keyvalue (all)")
    _add(group, "--trials", int, "N", "retrieval: prompts per cell (1)")
    _add(group, "--plot", shell.output_file, "FILE.png", "ppl: quality against bits read")
    _add(group, "--by", str, "WHAT", "sensitivity: layer, or side: keys and values apart (layer)")
    _add(group, "--raise-bits", _list_of(int), "B,..", "sensitivity: depths to try (the next one that the codec stores)")
    _add(group, "--budget-bits", float, "X", "sensitivity: stored bits per element that the schedule may take")
    _add(group, "--output", shell.output_file, "FILE.yaml", "sensitivity: the schedule, for --config")
    return parser


def _add(group: argparse._ArgumentGroup, flag: str, kind: Callable, metavar: str, says: str) -> None:
    group.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=says)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: must be different names with commas between them")
    return names


def _positions(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be A:B, for example 1024:4096")
    return int(first), int(last)


def _list_of(kind: type) -> Callable[[str], list]:
    def parse(text: str) -> list:
        try:
            return [kind(item) for item in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be numbers with commas between them") from None

    return parse


if __name__ == "__main__":
    shell.run(main, NAME)
