"""What reading a long prompt exactly takes on every rank, beside the planner's formula.

    python benchmarks/prefill_memory.py --tokens 131072 --sp 1,2,4
    python benchmarks/prefill_memory.py --model smollm2-135m --tokens 4096 --sp 1
    python benchmarks/prefill_memory.py --model smollm2-135m --extend --layers 2 --tokens 32768 --sp 1,2

For each number of sequence ranks the engine reads a prompt of random tokens, with a random Llama-shaped model of 2 layers and 4
heads unless --model names another, and generates two tokens; --layers ends the run after so many (each needs what the first
does, but what later ones would touch is not resident). --extend stretches the model's positions over the prompt. Measured on
every rank: the live tensors by class (weights, packed cache, exact windows, and, while an exact prefill runs, hidden states and
the keys and values of a layer), the peak of all live tensors, and the peak of the resident set minus what it was after the
imports. `error` is the planner's figure over the measured one, minus 1; the tensors are compared without the planner's constant
for libraries. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from bitkv_dist import checkpoint
from bitkv_dist import model as models
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.parallel import mesh as meshes
from bitkv_dist.plan.memory import PACKED_SPARE_BYTES, SPARE_WORKSPACE_BYTES, Job, every_rank
from bitkv_dist.plan.models import from_config

NEW_TOKENS = 2
SHAPE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 4, "head_dim": 32, "bos_token_id": None, "eos_token_id": None}
CLASSES = ("weights", "cache", "exact", "hidden", "layer_kv")


class EnoughLayers(Exception):
    """Ends a run that was to measure the first layers only."""


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operators return, until they die; `peak` is their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.bytes -= size


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        measure(args)
        return
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder), args.tokens)
        if args.extend:
            model = extended(model, args.tokens + NEW_TOKENS, Path(folder, "extended"))
        runs = [launch(args, model, sp, Path(folder, f"{sp}.json")) for sp in args.sp]
    show(runs)
    print(json.dumps({"tokens": args.tokens, "config": args.config, "torch": torch.__version__, "runs": runs}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sp", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--model", help="a model instead of the random one")
    parser.add_argument("--extend", action="store_true", help="stretch the model's rotary positions to the prompt's length")
    parser.add_argument("--layers", type=int, help="end an exact prefill after so many layers")
    parser.add_argument("--config", default="4bit")
    parser.add_argument("--prefill", default="exact")
    parser.add_argument("--prefill-memory", type=float, help="gigabytes for a layer's keys and values, on each rank")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def random_model(folder: Path, tokens: int) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=tokens + NEW_TOKENS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return str(folder / "model")


def extended(model: str, positions: int, folder: Path) -> str:
    """The same model with linearly interpolated rotary positions; its weights are linked, not copied."""
    place = Path(checkpoint.localise(model))
    folder.mkdir()
    for file in place.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((place / "config.json").read_text())
    factor = max(1.0, positions / config["max_position_embeddings"])
    rope = config["rope_parameters"] | {"rope_type": "linear", "factor": factor}
    config |= {"max_position_embeddings": positions, "rope_parameters": rope}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def launch(args: argparse.Namespace, model: str, sp: int, result: Path) -> dict[str, Any]:
    """Run this file in `sp` processes of one thread each."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sp), __file__]
    flags = {"--model": model, "--tokens": args.tokens, "--config": args.config, "--prefill": args.prefill, "--result": result}
    flags |= {f"--{name}": value for name, value in (("layers", args.layers), ("prefill-memory", args.prefill_memory)) if value}
    command = [*start, *(str(word) for pair in flags.items() for word in pair)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    return json.loads(result.read_text())


def measure(args: argparse.Namespace) -> None:
    """One rank's part of a run; rank 0 writes what all have measured."""
    mesh = meshes.start(ParallelConfig(device="cpu"))
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    served = models.load(args.model, dtype=torch.float32, device=mesh.world.device)
    run = build(args.config, {})
    held = {"prefill": args.prefill, "prefill_memory_gb": args.prefill_memory}
    generate = GenerateConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, **held)
    engine = Engine(served, run.cache, mesh, generate)
    prompt = torch.randint(0, served.config.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    classes = dict.fromkeys(CLASSES, 0)

    def look(done: float, total: int) -> None:
        """In the middle of the first layer of an exact prefill, of the prompt of a packed one."""
        if not classes["hidden"] and done >= total / served.layers / 2:
            classes.update(live_by_class(engine, served))
        if args.layers and done > total * args.layers / served.layers:  # a chunk after them: they are sealed
            raise EnoughLayers

    with Live() as live, contextlib.suppress(EnoughLayers):
        engine.generate([prompt], on_prefill=look)
    weights = storages(served.module.parameters())
    own = {"classes": classes, "peak_tensors": live.peak + weights, "peak_rss": resident_bytes("VmHWM") - before}
    everyone = mesh.gather_objects(own)
    if mesh.world.rank == 0:
        shape = from_config("model", served.config, served.head_dim, served.max_positions)
        spare = PACKED_SPARE_BYTES if args.prefill == "packed" else SPARE_WORKSPACE_BYTES
        job = Job(shape, run.cache, args.tokens + NEW_TOKENS, dtype=torch.float32, **held)
        ranks = [
            found | {"planned": asdict(plan) | {"total": plan.total, "spare": spare}, "error": errors(found, plan.total, spare)}
            for found, plan in zip(everyone, every_rank(job, 1, mesh.sp), strict=True)
        ]
        args.result.write_text(json.dumps({"sp": mesh.sp, "ranks": ranks}))
    mesh.close()


def live_by_class(engine: Engine, served: models.ServedModel) -> dict[str, int]:
    states = [state for layer in engine.cache.layers for state in layer.states]
    hidden = [
        thing
        for thing in gc.get_objects()
        if type(thing) is torch.Tensor and thing.dim() == 2 and thing.shape[-1] == served.config.hidden_size
    ]
    return {
        "weights": storages(served.module.parameters()),
        "cache": sum(state.sealed.bytes for state in states),
        "exact": storages(state.exact for state in states),
        "hidden": storages(hidden),
        "layer_kv": storages(state.prompt.rows for state in states if state.prompt is not None),
    }


def errors(found: dict[str, Any], planned_bytes: int, spare_bytes: int) -> dict[str, float]:
    return {
        "tensors": (planned_bytes - spare_bytes) / found["peak_tensors"] - 1,
        "resident": planned_bytes / found["peak_rss"] - 1,
    }


def storages(tensors) -> int:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def resident_bytes(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def show(runs: list[dict[str, Any]]) -> None:
    """Megabytes per rank, measured beside planned."""
    print(f"{'sp':>3s} {'rank':>4s} {'':9s} " + " ".join(f"{name:>9s}" for name in (*CLASSES, "tensors", "resident")))
    for run in runs:
        for rank, found in enumerate(run["ranks"]):
            plan, error = found["planned"], found["error"]
            measured = [*(found["classes"][name] for name in CLASSES), found["peak_tensors"], found["peak_rss"]]
            planned = [plan[name] for name in CLASSES[:3]]
            totals = [plan["total"] - plan["spare"], plan["total"]]
            print(f"{run['sp']:3d} {rank:4d} measured  {megabytes(measured)}")
            print(f"{'':8s} planned   {megabytes(planned)} {'':19s} {megabytes(totals)}")
            print(f"{'':8s} error     {'':49s} {error['tensors']:+9.1%} {error['resident']:+9.1%}")


def megabytes(sizes: list[int]) -> str:
    return " ".join(f"{size / 1e6:9.2f}" for size in sizes)


if __name__ == "__main__":
    main()
