"""What fits on given GPUs, and how fast it decodes: bytes per rank, largest context, milliseconds per token, for every TP x SP.

bitkv plan --model llama-3.1-8b --context 1M --gpus 8 --gpu h200 --config 1bit

Bytes are those that the cache and the prefill allocate; times are estimates.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitkv_dist.config import RunConfig
from bitkv_dist.launch import flags, shell

if TYPE_CHECKING:
    from bitkv_dist.plan.grids import Plan
    from bitkv_dist.plan.models import ModelShape

NAME = "plan"
UNITS = {"K": 1 << 10, "M": 1 << 20}
NODE_SIZE = 8
DTYPE = "bfloat16"
_FIELDS = (
    ("--model", "generate.model", "built-in name, directory, .gguf file or hub id"),
    ("--dtype", "generate.dtype", f"float32, bfloat16 or float16 ({DTYPE})"),
    ("--prefill", "generate.prefill", "exact, packed, or auto: exact where it fits"),
    ("--prefill-memory", "generate.prefill_memory_gb", "GB that a layer's prompt keys may take in an exact prefill"),
    ("--tp", "parallel.tp", "look at the grids with so many tensor-parallel ranks"),
    ("--sp", "parallel.sp", "look at the grid with so many sequence-parallel ranks"),
    ("--layout", "parallel.layout", "weights behind attention: replicated over SP, or helix: shared by all ranks"),
)


def main(argv: list[str] | None = None) -> int:
    """ValueError for what a user can put right; exit status 0 whether the job fits or not."""
    asked = _parser().parse_args(argv)
    run = flags.read_config(asked)

    from bitkv_dist.parallel.world import discover

    if (size := discover(os.environ).size) > 1:
        raise ValueError(f"world size {size}: plan runs in one process; start it without a launcher")

    from bitkv_dist.launch import plan_tables

    found = make_plan(asked, run)
    warnings = _warnings(found)
    if asked.json is not None:
        asked.json.write_text(json.dumps(as_dict(found, warnings), indent=1) + "\n", encoding="utf-8")
    plan_tables.show_plan(found, Path(asked.config).stem, warnings)
    if asked.plot is not None:
        plan_tables.plot(found, asked.plot)
    return 0


def make_plan(asked: argparse.Namespace, run: RunConfig) -> Plan:
    """The plan of a command line and its configuration."""
    import torch

    from bitkv_dist.plan import grids, machines, memory

    shape = model_shape(run.generate.model)
    run.cache.check_model(shape.layers, shape.head_dim, loops=shape.loops, kv_heads=shape.kv_heads)
    tp, sp = _asked_grid(asked, run)
    gpus = asked.gpus or (tp or 1) * (sp or 1)
    gpu = machines.find_gpu(asked.gpu, asked.memory, asked.bandwidth)
    machine = machines.join(gpu, gpus, asked.node_size, asked.link or [])
    job = memory.Job(
        shape,
        run.cache,
        asked.context or shape.positions,
        asked.batch,
        getattr(torch, run.generate.dtype or DTYPE),
        run.generate.prefill,
        run.generate.chunk,
        run.generate.prefill_memory_gb,
        layout=run.parallel.layout,
    )
    return grids.plan(job, machine, tp, sp)


def model_shape(name: str) -> ModelShape:
    """A built-in shape, or that of a model's configuration; no weights are read."""
    from bitkv_dist.plan import models as shapes

    if shape := shapes.built_in(name):
        return shape
    if "/" not in name and not Path(name).exists():
        raise shapes.unknown(name)

    from bitkv_dist import model as models

    config = models.check(name)
    return shapes.from_config(name, config, models.head_dim_of(config), models.max_positions_of(config))


def as_dict(found: Plan, warnings: list[str]) -> dict[str, Any]:
    """The JSON object: the chosen grid's figures on top, all grids below."""
    job, machine, chosen = found.job, found.machine, found.chosen
    return {
        "schema": 1,
        "model": job.shape.name,
        "context": job.context,
        "batch": job.batch,
        "gpus": machine.gpus,
        "gpu": machine.gpu.name,
        "memory_bytes": machine.gpu.memory_bytes,
        "bandwidth_gb_s": machine.gpu.bandwidth_gb_s,
        "node_size": machine.node_size,
        "grid": chosen.ranks,
        "layout": job.layout,
        **{name: value for name, value in chosen.as_dict().items() if name not in ("tp", "sp")},
        "best_grid": found.best.ranks,
        "estimated": ["ms_per_token", "sharding_pays_above_tokens", "the workspace in bytes_per_rank.prefill_peak"],
        "warnings": warnings,
        "grids": [grid.as_dict() for grid in found.grids],
        "other_caches": {name: grid.as_dict() for name, grid in found.baselines.items()},
    }


def _asked_grid(asked: argparse.Namespace, run: RunConfig) -> tuple[int | None, int | None]:
    """--tp and --sp, or what the configuration file says of them; tp 1 is its default and says nothing."""
    given, parallel = vars(asked), run.parallel
    tp = parallel.tp if "parallel.tp" in given or parallel.tp > 1 else None
    return tp, parallel.sp


def _warnings(found: Plan) -> list[str]:
    job, refine = found.job, found.job.config.refine
    said = []
    if job.context > job.shape.positions:
        said.append(f"context {job.context:,}: {job.shape.name} has {job.shape.positions:,} positions; generate refuses more")
    if refine is not None and refine.rule == "mass":
        said.append("refine.rule mass: how many tokens it refines is known after a run; the times assume half of them")
    if refine is not None and refine.granularity == "head":
        said.append("refine.granularity head: the heads of a group are taken to choose the same tokens; they read more")
    return said


def _parser() -> shell.Parser:
    parser = shell.Parser(NAME, __doc__.partition("\n")[0])
    preset = flags.DEFAULT_PRESET
    parser.add_argument("--config", default=preset, metavar="NAME", help=f"preset or YAML file ({preset})")
    job = parser.add_argument_group("job")
    says = "tokens of a sequence, answer included: 131072, 128K, 1M (all positions)"
    job.add_argument("--context", type=_tokens, metavar="TOKENS", help=says)
    job.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences at a time (1)")
    flags.add_field_flags(job, _FIELDS)
    flags.add_cache_flags(parser)
    gpus = parser.add_argument_group("machine")
    gpus.add_argument("--gpus", type=_count, metavar="N", help="GPUs in all (tp x sp)")
    gpus.add_argument("--gpu", metavar="NAME", help="a100, h100, h200, b200 or mi300x")
    gpus.add_argument("--memory", type=float, metavar="GB", help="of a GPU, instead of the table's")
    gpus.add_argument("--bandwidth", type=float, metavar="GB/S", help="of a GPU's memory, instead of the table's")
    gpus.add_argument("--node-size", type=_count, default=NODE_SIZE, metavar="N", help=f"GPUs of a node ({NODE_SIZE})")
    links = "in a node: nvlink, xgmi, pcie (the GPU's); between nodes: ib, roce, ethernet (ib); or GB/s[:us] for both"
    gpus.add_argument("--link", action="append", metavar="LINK", help=f"repeatable; {links}")
    parser.add_argument("--json", type=shell.output_file, metavar="FILE", help="write the plan there as well")
    parser.add_argument("--plot", type=shell.output_file, metavar="FILE.png", help="milliseconds per token over the context")
    return parser


def _tokens(text: str) -> int:
    """131072, 128K or 1M; K = 1,024 and M = 1,048,576."""
    digits, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    try:
        number = float(digits) * unit if unit > 1 else int(digits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of tokens such as 131072, 128K or 1M") from None
    if not 1 <= number < 1 << 40 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of tokens, at least 1; for example 128K")
    return int(number)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


if __name__ == "__main__":
    shell.run(main, NAME)
