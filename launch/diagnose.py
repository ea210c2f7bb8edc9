"""`diagnose`: do all ranks rotate with the same signs, and seal the same bytes? A table, and exit status 0 or 1.

deepspeed --num_gpus 4 launch/diagnose.py --model smollm2-135m --cache
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from bitkv_dist.launch import shell
from bitkv_dist.launch.flags import add_run_flags, read_config

PROBE_PAGES, PROBE_NEW_TOKENS = 4, 4  # --cache: pages to seal, tokens to generate behind them
SHOWN_ROWS = 20


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    run = read_config(args)

    import torch

    from bitkv_dist import model as models
    from bitkv_dist.parallel.mesh import start

    model_config = models.check(run.generate.model, run.parallel.tp)
    positions = models.max_positions_of(model_config)
    run.cache.check_model(model_config.num_hidden_layers, models.head_dim_of(model_config), positions)
    mesh = start(run.parallel, say=shell.say_for_all)
    place = {"tp_mesh": mesh.tp_mesh, "tp": mesh.tp, "tp_rank": mesh.tp_rank}
    dtype = getattr(torch, run.generate.dtype) if run.generate.dtype else None
    model = models.load(run.generate.model, dtype=dtype, device=mesh.world.device, **place)
    mesh.ready()

    report = {"schema": 1, "ok": True, "world": _world(mesh), "rotation": _rotation(mesh, model, run.cache, args.inject)}
    if args.cache and (args.inject or not report["rotation"]["mismatches"]):
        report["cache"] = _cache(mesh, model, run)
    report["ok"] = not any(report[part]["mismatches"] for part in ("rotation", "cache") if part in report)
    if mesh.world.rank == 0:
        _show(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


def _parser() -> shell.Parser:
    parser = shell.Parser("diagnose", "Check that all ranks agree on seeds, configuration and model, and on sealed bytes.")
    add_run_flags(parser)
    parser.add_argument("--cache", action="store_true", help="also generate a few tokens and compare every sealed page")
    parser.add_argument(
        "--inject", type=_rank_and_layer, metavar="RANK:LAYER", help="flip one rotation word there, to see that it is found"
    )
    parser.add_argument("--json", type=shell.output_file, metavar="FILE", help="write the report there as well")
    return parser


def _rank_and_layer(text: str) -> tuple[int, int]:
    rank, _, layer = text.partition(":")
    if not (rank.isdecimal() and layer.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be RANK:LAYER, for example 1:7")
    return int(rank), int(layer)


def _world(mesh) -> dict:
    world = mesh.world
    mine = {
        "rank": world.rank,
        "sp_rank": mesh.sp_rank,
        "tp_rank": mesh.tp_rank,
        "host": world.host,
        "device": str(world.device),
        "threads": world.threads,
    }
    return {
        "size": world.size,
        "tp": mesh.tp,
        "sp": mesh.sp,
        "launcher": world.launcher,
        "backend": world.backend,
        "ranks": mesh.gather_objects(mine),
    }


def _rotation(mesh, model, cache, inject: tuple[int, int] | None) -> dict:
    from bitkv_dist.agreement import compare

    rank, layer = inject or (None, None)
    if inject and not (rank < mesh.world.size and layer < model.layers):
        raise ValueError(f"--inject {rank}:{layer}: must name one of {mesh.world.size} ranks and one of {model.layers} layers")
    found = compare(mesh, model, cache, flip_word_of_layer=layer if rank == mesh.world.rank else None)
    return {"digest": found.rotation, "layers": model.layers, "mismatches": [asdict(m) for m in found.mismatches]}


def _cache(mesh, model, run) -> dict:
    """Generate with a cache in which every SP rank seals the pages of all, and compare page by page."""
    from bitkv_dist.engine import Engine
    from bitkv_dist.parallel.digest import combine, odd_ones

    cache = run.cache
    tokens = cache.sink_rounded + PROBE_PAGES * cache.page_tokens + cache.recent_tokens
    if tokens + PROBE_NEW_TOKENS > model.max_positions:
        raise ValueError(
            f"--cache: needs {tokens + PROBE_NEW_TOKENS} positions to seal {PROBE_PAGES} pages, the model has "
            f"{model.max_positions}; use smaller --recent-tokens or --sink-tokens"
        )
    generate = replace(run.generate, max_new_tokens=PROBE_NEW_TOKENS, ignore_eos=True, stream=False)
    engine = Engine(model, cache, mesh, generate, audit=True)
    vocabulary = model.config.vocab_size
    engine.generate([[7919 * i % vocabulary for i in range(tokens)]], None)

    everyone = mesh.gather_objects(engine.page_digests())
    names = ("layer", "sequence", "page", "kv_head")
    mismatches = [{"rank": rank, **dict(zip(names, key, strict=True))} for rank, key in odd_ones(everyone)]
    pages = {key: digest for theirs in everyone for key, digest in theirs.items()}
    return {"digest": combine(pages), "pages": len(pages), "mismatches": mismatches}


def _show(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    world, rotation = report["world"], report["rotation"]
    table = Table(title=f"{world['size']} ranks, tp {world['tp']} x sp {world['sp']}, {world['launcher']}, {world['backend']}")
    for heading in ("rank", "sp", "tp", "host", "device", "threads", "rotation"):
        table.add_column(heading)
    odd_ranks = {mismatch["rank"] for mismatch in rotation["mismatches"]}
    for row in world["ranks"]:
        verdict = "[red]differs" if row["rank"] in odd_ranks else "agrees"
        table.add_row(*(str(row[key]) for key in ("rank", "sp_rank", "tp_rank", "host", "device", "threads")), verdict)
    console.print(table)
    _show_mismatches(console, "rotation", rotation["mismatches"], f"{rotation['layers']} layers, digest {rotation['digest']}")
    if cache := report.get("cache"):
        _show_mismatches(console, "cache", cache["mismatches"], f"{cache['pages']} sealed pages, digest {cache['digest']}")


def _show_mismatches(console, title: str, mismatches: list[dict], agreed: str) -> None:
    from rich.table import Table

    if not mismatches:
        console.print(f"{title}: all ranks agree ({agreed})")
        return
    table = Table(title=f"{title}: {len(mismatches)} mismatches")
    for heading in mismatches[0]:
        table.add_column(heading)
    for mismatch in mismatches[:SHOWN_ROWS]:
        table.add_row(*map(str, mismatch.values()))
    console.print(table)
    if len(mismatches) > SHOWN_ROWS:
        console.print(f"and {len(mismatches) - SHOWN_ROWS} more; --json FILE has them all")


if __name__ == "__main__":
    shell.run(main, "diagnose")
