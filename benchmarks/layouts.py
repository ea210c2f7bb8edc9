"""What the grids of one machine take for a real prompt: prefill, decode, peak memory, and what of the time is exchange.

    python benchmarks/layouts.py                                                   # 1 rank and 2 sequence ranks, in turns
    python benchmarks/layouts.py --grids sp2,sp2-gathered,helix2,tp3 --rounds 2 --json -

Grids: `sp2` (2 sequence ranks, replicated weights), `tp3` (heads on 3 ranks), `helix2` (2 sequence ranks, `--layout helix`);
`-gathered` gathers one KV head of a layer's keys and values at a time, as a small `--prefill-memory` does where they do not fit
(see prefill_memory.py). Real ranks (gloo, one thread each) read the first --tokens tokens of a text exactly, after a short
warm-up, and decode; the whole is repeated in turns. Every rank notes when it enters and leaves each collective: as in
scaling.py it *waits* until the last rank that it needs has arrived, *exchanges* from there on, and *computes* the rest. Memory
is the resident set's peak in the prefill, and in brackets how far that is above what was resident before it (the former counts
the mapped weights, which ranks share). Token ids must be the same on all grids, and the sealed bytes those of the first one for
every replicated grid of its TP, before a time is printed. Ranks beyond the machine's cores share them. Shown are the
fastest round of each grid and how slow the slowest was; `speed-up`: of the prefill over the first grid's. The last line is one
JSON object.
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
from pathlib import Path
from typing import Any

import torch
import transformers
from prefill_memory import resident_bytes
from scaling import PARTS, decode, noted, split

from bitkv_dist import model as models
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.parallel import mesh as meshes
from bitkv_dist.text import read_prompt_file

WARM_TOKENS = 700
GATHERED = "-gathered"
SHOWN = (("prefill_s", "prefill_slowest_s"), ("decode_ms", "decode_slowest_ms"))
WIDTHS = (11, 9, 9, 7, 9)


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args)
        return
    rows: dict[str, list[dict[str, Any]]] = {grid: [] for grid in args.grids}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for grid in args.grids:
                rows[grid].append(launch(grid, Path(folder, f"{grid}{turn}.json")))
    require_one_answer(rows)
    found = {grid: summary(runs, rows[args.grids[0]]) for grid, runs in rows.items()}
    show(found)
    about = {"model": args.model, "config": args.config, "tokens": args.tokens, "steps": args.steps, "rounds": args.rounds}
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "token_ids_equal": True}
    line = json.dumps(about | machine | {"grids": found})
    if args.json and args.json != "-":
        Path(args.json).write_text(line + "\n")
    print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", type=lambda text: text.split(","), default=["sp1", "sp2"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--config", default="tiered4")
    parser.add_argument("--text", default="tests/data/tale.txt")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--steps", type=int, default=16, help="timed tokens")
    parser.add_argument("--json", help="also write the JSON object to this file; - is the last line, which is always printed")
    parser.add_argument("--grid", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for grid in args.grids:
        parallel_of(grid)
    return args


def parallel_of(grid: str) -> tuple[int, ParallelConfig]:
    """How many ranks a grid has, and what they are told."""
    name = grid.removesuffix(GATHERED)
    kind, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    if kind not in ("sp", "tp", "helix") or not number:
        raise SystemExit(f"grid {grid}: must be sp, tp or helix and a number of ranks, such as sp2, and perhaps {GATHERED}")
    layout = "helix" if kind == "helix" else "replicated"
    return int(number), ParallelConfig(device="cpu", tp=int(number) if kind == "tp" else 1, layout=layout)


def launch(grid: str, result: Path) -> dict[str, Any]:
    ranks = str(parallel_of(grid)[0])
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, __file__]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run([*start, *sys.argv[1:], "--grid", grid, "--result", str(result)], check=True, env=env)
    return json.loads(result.read_text())


def measure(args: argparse.Namespace) -> None:
    """One rank's part of a grid; rank 0 writes what it took."""
    transformers.logging.set_verbosity_error()
    mesh = meshes.start(parallel_of(args.grid)[1])
    served = models.load(args.model, dtype=torch.float32, device=mesh.world.device, ranks=mesh)
    engine = Engine(served, build(args.config, {}).cache, mesh, GenerateConfig(max_new_tokens=1, ignore_eos=True))
    if args.grid.endswith(GATHERED):
        engine.fitting_heads = lambda prompts: 1
    prompt = served.tokenizer(read_prompt_file(args.text, "--text")).input_ids[: args.tokens]
    if len(prompt) < args.tokens:
        raise SystemExit(f"tokens {args.tokens}: {args.text} has {len(prompt)}; give fewer, or another text")
    engine.generate([prompt[:WARM_TOKENS]])
    mesh.gather_objects(None)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, marks, started = resident_bytes(), [[]], time.monotonic()
    with noted(mesh, marks):
        first = engine.generate([prompt]).token_ids[0]
    took = time.monotonic() - started
    peak = resident_bytes("VmHWM")
    everyone = mesh.gather_objects(([took], marks))
    parts = [split(everyone, rank) for rank in range(len(everyone))]
    prefill_s = {name: statistics.mean(part[name] for part in parts) / 1e3 for name in ("total", *PARTS)}
    steps = decode_steps(engine, args.steps)
    memory_bytes = mesh.gather_objects((peak, peak - before))
    digest = engine.cache_digest()
    if mesh.world.rank == 0:
        ids = [*first, *(tokens[0] for tokens in steps.pop("ids"))]
        row = {"tp": mesh.tp, "layout": mesh.split.layout, "ids": ids, "digest": digest}
        row |= {"prefill_s": prefill_s, "decode": steps, "peak_bytes": list(map(max, zip(*memory_bytes, strict=True)))}
        args.result.write_text(json.dumps(row))
    mesh.close()


@torch.inference_mode()
def decode_steps(engine: Engine, steps: int) -> dict[str, Any]:
    return decode(engine, steps)


def require_one_answer(rows: dict[str, list[dict[str, Any]]]) -> None:
    """SystemExit where a grid has other token ids, or a replicated one of the same TP other sealed bytes, than the first."""
    (name, (first, *_)), *_ = rows.items()
    for grid, runs in rows.items():
        for run in runs:
            alike = (run["tp"], run["layout"]) == (first["tp"], first["layout"]) == (run["tp"], "replicated")
            for what in ("ids", *["digest"] * alike):
                if run[what] != first[what]:
                    raise SystemExit(f"{grid}: other {what} than {name}; no time is shown")


def summary(runs: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest round, for prefill and decode apart: whatever else the machine does only adds time."""
    prefill, steps = min((run["prefill_s"] for run in runs), key=whole), min((run["decode"]["ms"] for run in runs), key=whole)
    return {
        "prefill_s": prefill,
        "prefill_slowest_s": max(run["prefill_s"]["total"] for run in runs),
        "speedup": min(run["prefill_s"]["total"] for run in first) / prefill["total"],
        "decode_ms": steps,
        "decode_slowest_ms": max(run["decode"]["ms"]["total"] for run in runs),
        "peak_bytes": [max(sizes) for sizes in zip(*(run["peak_bytes"] for run in runs), strict=True)],
    }


def whole(parts: dict[str, float]) -> float:
    return parts["total"]


def show(found: dict[str, dict[str, Any]]) -> None:
    columns = f"{'':9s}{'compute':>9s}{'exchange':>9s}{'wait':>7s}{'slowest':>9s}"
    print(f"{'grid':14s} prefill, s{columns[7:]} speed-up   decode, ms{columns[7:]}   peak MB")
    for grid, row in found.items():
        peak, above = (size / 1e6 for size in row["peak_bytes"])
        seconds, ms = ([*row[key].values(), row[slowest]] for key, slowest in SHOWN)
        shown = "".join(f"{value:{width}.2f}" for value, width in zip(seconds, WIDTHS, strict=True))
        per_token = "".join(f"{value:{width}.1f}" for value, width in zip(ms, WIDTHS, strict=True))
        print(f"{grid:14s}{shown}{row['speedup']:9.2f}  {per_token}   {peak:.0f} ({above:.0f})")


if __name__ == "__main__":
    main()
