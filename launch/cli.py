"""`bitkv COMMAND ...`: the launch scripts as subcommands of one console script, with the same flags."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from bitkv_dist import __version__
from bitkv_dist.launch import shell

COMMANDS = {
    "generate": "continue one or several prompts with a packed cache",
    "launch": "start a command on several hosts, or show what would start it",
    "diagnose": "check hosts, links and libraries, and that all ranks agree, before a long job",
    "evaluate": "perplexity, retrieval and drift against the exact cache",
    "calibrate": "fit a cache to a model on a text of yours",
    "plan": "what fits on given GPUs, and how fast it decodes",
}


def available() -> dict[str, str]:
    return {name: summary for name, summary in COMMANDS.items() if find_spec(f"bitkv_dist.launch.{name}")}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    commands = available()
    if argv[:1] in (["--help"], ["-h"]):
        print(_help(commands))
        return 0
    if argv[:1] == ["--version"]:
        print(f"bitkv {__version__}")
        return 0
    if not argv or argv[0] not in commands:
        given = repr(argv[0]) if argv else "missing"
        print(f"bitkv: command {given}: must be one of {', '.join(commands)}; see bitkv --help", file=sys.stderr)
        return 2
    shell.run(import_module(f"bitkv_dist.launch.{argv[0]}").main, argv[0], argv[1:])


def _help(commands: dict[str, str]) -> str:
    lines = [f"  {name:<10} {summary}" for name, summary in commands.items()]
    return "\n".join(
        [
            "usage: bitkv COMMAND [FLAGS]",
            "",
            "commands:",
            *lines,
            "",
            "bitkv COMMAND --help lists a command's flags.",
            "Several ranks: bitkv launch [FLAGS] COMMAND ..., or launch/COMMAND.py under deepspeed, torchrun, mpirun or srun.",
        ]
    )
