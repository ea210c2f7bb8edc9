"""How decoding scales over sequence ranks: measured on this machine, and simulated with the planner's model for more GPUs.

    python benchmarks/scaling.py --ranks 1,2,4 --plot scaling.png
    python benchmarks/scaling.py --config 1bit --tokens 262144 --gpu h100 --json scaling.json

Measured: real ranks (gloo, one thread each) decode with a random model whose caches are full, at contexts of a quarter, a half
and the whole of --tokens, and at the whole with batches. Strong scaling keeps the context, weak scaling gives every rank a
quarter of --tokens. Every rank notes when it enters and leaves each collective, on the machine's one clock: from its own
arrival to that of the last rank that it needs it *waits*, from there on it *exchanges*, the rest of a step is *compute*. Token
ids must be equal on all world sizes, for every job, before a time is printed. Ranks beyond the machine's cores share them.

Simulated: the planner's model (bitkv_dist/plan) of --model on --gpu, up to 64 GPUs and 10M tokens; nothing of it was run. Its
compute is weights, cache and fixed costs; ranks that wait are not in it. `sp` splits the sequence only, `tp` also the heads
inside a node. `fits`: whether a rank's share of weights and cache does. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filled import Shape, filled_engine, random_model

from bitkv_dist.config import ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.parallel import mesh as meshes
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.plan.latency import step_ms
from bitkv_dist.plan.machines import find_gpu, join
from bitkv_dist.plan.memory import Job, rank_bytes
from bitkv_dist.plan.models import MODELS
from bitkv_dist.split import tp_choices

BATCHES = (1, 2, 4)
WARM_STEPS = 2
PARTS = ("compute", "exchange", "wait")
FROM_RANK_0 = ("broadcast", "broadcast_tensor", "broadcast_checked")
SIMULATED_GPUS = (1, 2, 4, 8, 16, 32, 64)
SIMULATED_TOKENS = 10 << 20  # strong scaling, and weak scaling on the most GPUs
SIMULATED_BATCHES = (1, 4, 16, 64)
BATCH_GPUS, BATCH_TOKENS = 8, 1 << 17
NODE_SIZE = 8


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for ranks in args.ranks for row in launch(args, ranks, Path(folder, f"{ranks}.json"))]
    require_equal_ids(rows)
    found = {"measured": [row for row in rows if row["kinds"]], "simulated": simulated(args)}
    show(found)
    about = {"config": args.config, "token_ids_equal": True, "cores": os.cpu_count(), "machine": platform.machine()}
    line = json.dumps(about | {"model": args.model, "gpu": args.gpu, "torch": torch.__version__} | found)
    if args.json:
        args.json.write_text(line + "\n")
    if args.plot:
        from scaling_plot import draw

        draw(found, args.plot, f"{args.model} on {args.gpu.upper()}, {args.config}", f"{os.cpu_count()} CPU cores")
    print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--config", default="tiered4")
    parser.add_argument("--tokens", type=int, default=131072, help="measured: the longest context")
    parser.add_argument("--steps", type=int, default=12, help="measured: timed steps of each job")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b", help="simulated")
    parser.add_argument("--gpu", default="h200", help="simulated")
    parser.add_argument("--json", type=Path, help="also write the JSON object there")
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    shape = Shape(4, heads=16, kv_heads=4, hidden=1024, intermediate=2048)
    for name in vars(shape):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(shape, name), help="measured")
    return parser.parse_args()


# -- measured


def launch(args: argparse.Namespace, ranks: int, result: Path) -> list[dict[str, Any]]:
    """What `measure` finds in so many processes of one thread each; a single one is this."""
    args.result = result
    if ranks == 1:
        measure(args)
        return json.loads(result.read_text())
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    flags = {"--config": args.config, "--tokens": args.tokens, "--steps": args.steps, "--result": result}
    flags |= {f"--{name.replace('_', '-')}": getattr(args, name) for name in vars(Shape(0))}
    command = [*start, *(str(word) for pair in flags.items() for word in pair)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    return json.loads(result.read_text())


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    """One rank's part of all jobs; rank 0 writes what they took."""
    mesh = meshes.start(ParallelConfig(device="cpu"))
    torch.set_num_threads(1)  # a single rank has all cores otherwise
    model = random_model(Shape(**{name: getattr(args, name) for name in vars(Shape(0))}), args.tokens + 64, mesh)
    rows = []
    for tokens, batch in jobs(args.tokens):
        new_tokens = WARM_STEPS + args.steps
        engine = filled_engine(model, build(args.config, {}).cache, mesh, [tokens - new_tokens] * batch, new_tokens)
        rows.append({"ranks": mesh.sp, "tokens": tokens, "batch": batch} | decode(engine, args.steps))
        rows[-1]["kinds"] = kinds(mesh.sp, tokens, batch, args.tokens)
    if mesh.world.rank == 0:
        args.result.write_text(json.dumps(rows))
    mesh.close()


def jobs(tokens: int) -> list[tuple[int, int]]:
    """(context, batch): all that any of the world sizes shows, on each of them, so that their token ids can be compared."""
    return [(tokens // 4, 1), (tokens // 2, 1), *((tokens, batch) for batch in BATCHES)]


def kinds(ranks: int, tokens: int, batch: int, longest: int) -> list[str]:
    """What a job shows on so many ranks."""
    found = ["batch"] if tokens == longest else []
    if batch == 1:
        found += ["strong"] * (tokens == longest) + ["weak"] * (4 * tokens == ranks * longest)
    return found


def decode(engine: Engine, steps: int) -> dict[str, Any]:
    """Milliseconds of a median step and of its parts, means over the ranks; and all ids."""
    mesh, live = engine.mesh, list(range(engine.cache.sequences))
    ids: list[list[int]] = []
    marks: list[list[Mark]] = []  # of each step

    def step() -> float:
        marks.append([])
        started = time.monotonic()
        result = engine.decode(engine.step(live), [[] for _ in live], None, started)
        ids.append([tokens[0] for tokens in result.token_ids])
        return time.monotonic() - started

    with noted(mesh, marks):
        for _ in range(WARM_STEPS):
            step()
        times = [step() for _ in range(steps)]
    everyone = mesh.gather_objects((times, marks[WARM_STEPS:]))
    parts = [split(everyone, rank) for rank in range(len(everyone))]
    return {
        "ms": {name: statistics.mean(part[name] for part in parts) for name in ("total", *PARTS)},
        "spread_ms": [min(times) * 1e3, max(times) * 1e3],
        "ids": ids,
    }


Mark = tuple[float, float, list[int]]  # of a collective: arrival, departure, the ranks that must have arrived for it


class noted:
    """Writes each collective of a mesh with other ranks into the last list of `marks`, while it lasts."""

    def __init__(self, mesh: Mesh, marks: list[list[Mark]]) -> None:
        self.mesh, self.marks, self.inside = mesh, marks, False
        rank, everyone = mesh.world.rank, list(range(mesh.world.size))
        tp, sp = everyone[rank - mesh.tp_rank :][: mesh.tp], everyone[mesh.tp_rank :: mesh.tp]
        self.among = dict.fromkeys(("gather_sp", "swap_sp", "sum_sp", "largest_sp"), sp)
        self.among |= dict.fromkeys(("gather_objects", "all_equal", *FROM_RANK_0), everyone)
        self.either = {name: (tp, everyone) for name in ("gather", "sum")}  # as their second argument says

    def __enter__(self) -> None:
        for name in (*self.among, *self.either):
            setattr(self.mesh, name, self.timed(name, getattr(self.mesh, name)))

    def __exit__(self, *_) -> None:
        for name in (*self.among, *self.either):
            delattr(self.mesh, name)  # the methods of the class show again

    def timed(self, name: str, collective: Callable) -> Callable:
        def call(*args):
            ranks = self.among.get(name) or self.either[name][args[1]]
            if self.inside or len(ranks) == 1:  # one that another is made of, or none
                return collective(*args)
            arrived, self.inside = time.monotonic(), True
            found = collective(*args)
            self.inside = False
            self.marks[-1].append((arrived, time.monotonic(), [0] if name in FROM_RANK_0 else ranks))
            return found

        return call


def split(everyone: list[tuple[list[float], list[list[Mark]]]], rank: int) -> dict[str, float]:
    """The median step of one rank in milliseconds, and its parts by their shares of all steps."""
    times, steps = everyone[rank]
    found: dict[str, list[float]] = {name: [] for name in ("total", *PARTS)}
    for index, (seconds, marks) in enumerate(zip(times, steps, strict=True)):
        waited = exchanged = 0.0
        for call, (arrived, left, ranks) in enumerate(marks):
            ready = max(arrived, *(everyone[other][1][index][call][0] for other in ranks))
            waited += ready - arrived
            exchanged += max(0.0, left - ready)
        for name, value in zip(found, (seconds, seconds - waited - exchanged, exchanged, waited), strict=True):
            found[name].append(value * 1e3)
    whole = statistics.median(found["total"])
    return {name: whole * sum(values) / sum(found["total"]) for name, values in found.items()}


def require_equal_ids(rows: list[dict[str, Any]]) -> None:
    first: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        other = first.setdefault((row["tokens"], row["batch"]), row)
        if other["ids"] != row["ids"]:
            job = f"{row['tokens']} tokens, batch {row['batch']}"
            raise SystemExit(f"{job}: {other['ranks']} and {row['ranks']} ranks give other token ids; no time is shown")


# -- simulated


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the planner's model, labelled as such."""
    job = Job(MODELS[args.model], build(args.config, {}).cache, BATCH_TOKENS)
    rows = []
    for gpus in SIMULATED_GPUS:
        rows += [simulate(args, replace(job, context=SIMULATED_TOKENS), gpus, "strong", layout) for layout in ("sp", "tp")]
        part = replace(job, context=SIMULATED_TOKENS // SIMULATED_GPUS[-1] * gpus)
        rows += [simulate(args, part, gpus, "weak", layout) for layout in ("sp", "tp")]
    for batch in SIMULATED_BATCHES:
        rows += [simulate(args, replace(job, batch=batch), BATCH_GPUS, "batch", layout) for layout in ("sp", "tp")]
    return rows


def simulate(args: argparse.Namespace, job: Job, gpus: int, kind: str, layout: str) -> dict[str, Any]:
    sizes = [size for size in tp_choices(job.shape.heads, job.shape.kv_heads) if gpus % size == 0 and size <= NODE_SIZE]
    tp = 1 if layout == "sp" else max(sizes)
    machine = join(find_gpu(args.gpu, None, None), gpus, NODE_SIZE, [])
    took, held = step_ms(job, machine, tp, gpus // tp), rank_bytes(replace(job, prefill="packed"), tp, gpus // tp)
    ms = {"total": took.total, "compute": took.weights + took.cache + took.fixed, "exchange": took.collectives, "wait": None}
    place = {"layout": layout, "ranks": gpus, "tokens": job.context, "batch": job.batch}
    return {"kinds": [kind], **place, "fits": held.total <= machine.gpu.memory_bytes, "ms": ms}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    titles = {
        "measured": f"MEASURED here, {os.cpu_count()} cores, token ids equal on all world sizes",
        "simulated": "SIMULATED with the planner's model, not run",
    }
    for source, title in titles.items():
        print(f"\n{title}\n{'':8s}{'layout':>7s}{'ranks':>6s}{'tokens':>10s}{'batch':>6s}" + "".join(
            f"{name:>10s}" for name in ("ms", *PARTS)))  # fmt: skip
        for kind in ("strong", "weak", "batch"):
            for row in found[source]:
                if kind in row["kinds"]:
                    ms = "".join(f"{'-' if value is None else f'{value:.2f}':>10s}" for value in row["ms"].values())
                    place = f"{row.get('layout', 'sp'):>7s}{row['ranks']:6d}{row['tokens']:10d}{row['batch']:6d}"
                    print(f"{kind:8s}{place}{ms}" + ("" if row.get("fits", True) else "  does not fit"))


if __name__ == "__main__":
    main()
