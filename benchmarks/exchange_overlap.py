"""Does it pay to send a sequence's partials while the next sequence is still attended to?

    python benchmarks/exchange_overlap.py --tokens 8192,16384,24576,32768 --json -

Real sequence ranks (gloo, one thread each) decode a batch with a random model of smollm2's heads whose caches are full. In each
layer either one collective sends the partials of all sequences when the last one's are there, which is what the engine does,
or asynchronous ones leave as soon as so many sequences' partials are there, and are waited for after the last one's attention.
Logits of every step must have the same bits before a time is printed. Ways take turns, step by step; a step's time is its
slowest rank's, medians with spread. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from filled import Shape, filled_engine, random_model

from bitkv_dist.config import ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.layer import PackedLayer
from bitkv_dist.parallel import mesh as meshes
from bitkv_dist.parallel.exchange import in_tree_order, packed
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.partial import Partial, root

SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 576, "intermediate": 1536}
WARM_STEPS = 3


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args)
        return
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    raise SystemExit(subprocess.run([*start, *sys.argv[1:]], env=env).returncode)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="tiered4")
    parser.add_argument("--tokens", type=numbers, default=[8192, 16384, 24576, 32768], help="of each sequence")
    parser.add_argument("--at-once", type=numbers, default=[1, 2], help="sequences of an asynchronous collective")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each way")
    parser.add_argument("--json", help="also write the JSON object to this file; - is the last line, which is always printed")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    mesh = meshes.start(ParallelConfig(device="cpu"))
    steps = WARM_STEPS + args.steps
    model = random_model(Shape(args.layers, **SMOLLM2), max(args.tokens) + steps, mesh)
    lengths, cache = [tokens - steps for tokens in args.tokens], build(args.config, {}).cache
    ways = {"one collective": filled_engine(model, cache, mesh, lengths, steps)}
    for count in args.at_once:
        name = f"asynchronous, {count} sequence{'s' * (count > 1)} each"
        ways[name] = engine = filled_engine(model, cache, mesh, lengths, steps)
        for layer in engine.cache.layers:
            layer.attend_fused = overlapped(layer, mesh, count)
    seconds = timed(ways, mesh, steps)
    if mesh.world.rank == 0:
        show(args, {way: [1e3 * taken for taken in found[WARM_STEPS:]] for way, found in seconds.items()})
    mesh.close()


def overlapped(layer: PackedLayer, mesh: Mesh, at_once: int) -> Callable[..., None]:
    """`PackedLayer.attend_fused` with asynchronous collectives of `at_once` sequences' partials."""

    def begin(nodes: list[Partial], sequences: list[int]) -> tuple:
        sent = packed(nodes, sequences, mesh.sp_rank, mesh.sp)
        received = sent.new_empty(mesh.sp, *sent.shape)
        work = dist.all_gather_single(received.view(-1), sent.view(-1), group=mesh._sp_group, async_op=True)
        return work, received, sequences

    def attend(queries: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        step, shard = layer.cache.step, layer.cache.shard
        exacts, nodes, sent, exchanges = [], [], 0, []
        for sequence, query, (rows, count) in zip(step.sequences, queries, layer.rows, strict=True):
            state = layer.states[sequence]
            if sequence not in step.views:
                step.views[sequence] = state.view(shard.nodes, query.shape[2])
            exact, found, reads = layer.codec.see(step.views[sequence], query, rows, state.sealed.slabs, count)
            exacts.append(exact)
            nodes.append(found)
            layer.cache.count_exact(count)
            layer.cache.counted.add(reads)
            if len(nodes) - sent == at_once or len(nodes) == len(queries):
                exchanges.append(begin(nodes[sent:], step.sequences[sent : len(nodes)]))
                sent = len(nodes)
        row = 0
        for work, received, sequences in exchanges:
            work.wait()
            for place, sequence in enumerate(sequences):
                layer.codec.conclude(root(in_tree_order(received[:, place], sequence, mesh.sp)), exacts[row], outputs[row])
                row += 1
        layer.rows = []

    return attend


def timed(ways: dict[str, Engine], mesh: Mesh, steps: int) -> dict[str, list[float]]:
    """Seconds of each way's steps, the slowest rank's; SystemExit where logits differ."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for step in range(steps):
        logits = {}
        for way in names[step % len(names) :] + names[: step % len(names)]:
            engine = ways[way]
            live = list(range(engine.cache.sequences))
            mesh.gather_objects(None)
            started = time.monotonic()
            logits[way] = engine.step(live)
            seconds[way].append(time.monotonic() - started)
            engine.decode(logits[way], [[] for _ in live], None, started)
        different = [way for way in names if not torch.equal(logits[way], logits[names[0]])]
        if different:
            raise SystemExit(f"step {step}: {', '.join(different)}: other logits than {names[0]}; no time is shown")
    everyone = mesh.gather_objects(seconds)
    return {way: [max(taken) for taken in zip(*(found[way] for found in everyone), strict=True)] for way in names}


def show(args: argparse.Namespace, ms: dict[str, list[float]]) -> None:
    print(f"{args.ranks} ranks, {len(args.tokens)} sequences of {args.tokens} tokens, {args.layers} layers; logits are equal")
    base, rows = next(iter(ms.values())), {}
    for way, found in ms.items():
        low, middle, high = statistics.quantiles(found, n=4)
        ratio = statistics.median(own / other for own, other in zip(found, base, strict=True))
        rows[way] = {"ms": middle, "quartiles_ms": [low, high], "to_one_collective": ratio}
        print(f"{way:32s}{middle:8.2f} ms ({low:.2f} .. {high:.2f}), {ratio:.3f} of one collective step by step")
    about = {"ranks": args.ranks, "tokens": args.tokens, "layers": args.layers, "config": args.config, "steps": args.steps}
    machine = {"logits_equal": True, "cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    line = json.dumps(about | machine | {"ways": rows})
    if args.json and args.json != "-":
        with open(args.json, "w") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
