"""`diagnose`: what one runs before a long job. Do all ranks rotate with the same signs, seal the same bytes, run the same
libraries, and reach each other quickly? Tables, and exit status 0 or 1.

deepspeed --num_gpus 4 launch/diagnose.py --model smollm2-135m --cache
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bitkv_dist.launch import shell
from bitkv_dist.launch.flags import add_run_flags, read_config


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    run = read_config(args)

    import torch

    from bitkv_dist import model as models
    from bitkv_dist.launch import findings, probes
    from bitkv_dist.parallel.digest import config_digest
    from bitkv_dist.parallel.mesh import start

    model_config = models.check(run.generate.model, run.parallel.tp, shell.launched_size())
    positions = models.max_positions_of(model_config)
    shape = (models.layers_of(model_config), models.head_dim_of(model_config), positions)
    run.cache.check_model(*shape, models.loops_of(model_config), model_config.num_key_value_heads)
    mesh = start(run.parallel, say=shell.say_for_all)
    dtype = getattr(torch, run.generate.dtype) if run.generate.dtype else None
    model = models.load(run.generate.model, dtype=dtype, device=mesh.world.device, weights=run.generate.weights, ranks=mesh)
    mesh.ready()

    world = {"size": mesh.world.size, "tp": mesh.tp, "sp": mesh.sp}
    world |= {"layout": mesh.split.layout, "launcher": mesh.world.launcher, "backend": mesh.world.backend}
    world["ranks"] = probes.hosts(mesh, config_digest(run.cache))
    report = {"schema": 1, "ok": True, "world": world, "rotation": _rotation(mesh, model, run.cache, args.inject)}
    report["versions"] = {"mismatches": probes.unlike_versions(world["ranks"])}
    report["network"] = probes.network(mesh, model)
    if args.inject or not report["rotation"]["mismatches"]:  # an engine would refuse to start
        report["dry_run"] = probes.dry_run(mesh, model, run.cache, run.generate)
        if args.cache:
            report["cache"] = probes.sealed_pages(mesh, model, run.cache, run.generate)
    report["warnings"] = [
        f"rank {row['rank']} (host {row['host']}): its clock is {row['clock_skew_ms'] / 1e3:+.1f} s from rank 0's"
        for row in world["ranks"]
        if abs(row["clock_skew_ms"]) > probes.CLOCK_LIMIT_S * 1e3
    ]
    report["ok"] = not any(part["mismatches"] for part in report.values() if isinstance(part, dict) and "mismatches" in part)
    if mesh.world.rank == 0:
        findings.show(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


def _parser() -> shell.Parser:
    parser = shell.Parser("diagnose", __doc__)
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


def _rotation(mesh, model, cache, inject: tuple[int, int] | None) -> dict:
    from bitkv_dist.agreement import compare

    rank, layer = inject or (None, None)
    if inject and not (rank < mesh.world.size and layer < model.layers):
        raise ValueError(f"--inject {rank}:{layer}: must name one of {mesh.world.size} ranks and one of {model.layers} layers")
    found = compare(mesh, model, cache, flip_word_of_layer=layer if rank == mesh.world.rank else None)
    return {"digest": found.rotation, "layers": model.layers, "mismatches": [asdict(m) for m in found.mismatches]}


if __name__ == "__main__":
    shell.run(main, "diagnose")
