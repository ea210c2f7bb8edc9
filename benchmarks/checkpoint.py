"""What a periodic checkpoint costs at a long context: bytes and seconds, beside a whole snapshot of the same cache.

    python benchmarks/checkpoint.py --tokens 65536 --layers 4
    python benchmarks/checkpoint.py --tokens 1048576 --layers 1 --config 1bit

One rank with the KV heads of Llama-3.1-8B and a small random model around them, its cache full of random pages. It decodes
--every tokens, then saves twice: beside the checkpoint before, whose unchanged files are taken over, and whole, as every
checkpoint would be without that (another folder, replaced each time too). Checked: both load, and hold the live pages.
`needed` is what is new since the checkpoint before: sealed pages and the exact windows. The disk's rate is that of one file,
written and flushed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode_1m import world_of_one
from filled import Shape, filled_engine, random_model

from bitkv_dist.config import build
from bitkv_dist.engine import Engine
from bitkv_dist.snapshot.load import load
from bitkv_dist.snapshot.manifest import Manifest
from bitkv_dist.snapshot.save import save
from bitkv_dist.snapshot.saved import Saved


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    with torch.inference_mode(), tempfile.TemporaryDirectory(dir=args.folder) as place:
        found = measure(args, Path(place))
    show(args, found)
    about = {name: getattr(args, name) for name in ("tokens", "layers", "config", "every", "checkpoints")}
    print(json.dumps(about | found | {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--config", default="tiered4")
    parser.add_argument("--every", type=int, default=256, help="tokens between two checkpoints")
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; the system's temporary folder")
    return parser.parse_args()


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    config, mesh = build(args.config, {}).cache, world_of_one(1)
    shape = Shape(args.layers, heads=8, kv_heads=8, head_dim=128, hidden=256, intermediate=512)
    new_tokens = args.every * args.checkpoints
    model = random_model(shape, args.tokens + new_tokens, mesh)
    engine = filled_engine(model, config, mesh, [args.tokens], new_tokens)
    engine.pending, engine.histories = [[]], [[0] * args.tokens]
    saved, runs = timed(engine, place / "kept", None)[0], []
    for _ in range(args.checkpoints):
        before = engine.cache.sealed_tokens(0)
        for _ in range(args.every):
            engine.pending = [[0]]
            engine.step([0])
            engine.histories[0].append(0)
        saved, taken_s = timed(engine, place / "kept", saved)
        whole, whole_s = timed(engine, place / "whole", None)
        runs.append({"new_bytes": saved.new_bytes, "s": taken_s, "whole_bytes": whole.new_bytes, "whole_s": whole_s})
        runs[-1]["needed_bytes"] = needed_bytes(engine, engine.cache.sealed_tokens(0) - before)
    digest = engine.cache_digest()
    for folder in (place / "kept", place / "whole"):
        load(engine, folder, Manifest.read(folder))
        assert engine.cache_digest() == digest
    names = [name for name in runs[0] if name != "s"]
    found = {name: statistics.median(run[name] for run in runs) for name in (*names, "s")}
    files = len(list((place / "kept").glob("*.safetensors")))
    return found | {"files": files, "manifest_bytes": (place / "kept" / "manifest.json").stat().st_size,
                    "spread_s": [min(run["s"] for run in runs), max(run["s"] for run in runs)],
                    "most_new_bytes": max(run["new_bytes"] for run in runs), "disk_gb_s": disk_gb_s(place)}  # fmt: skip


def timed(engine: Engine, folder: Path, before: Saved | None) -> tuple[Saved, float]:
    started = time.perf_counter()
    saved = save(engine, folder, before=before)
    return saved, time.perf_counter() - started


def needed_bytes(engine: Engine, sealed_tokens: int) -> int:
    """What so many newly sealed tokens take, and the rows that are exact now."""
    pages, heads = sealed_tokens // engine.cache_config.page_tokens, engine.heads.kv_heads
    return sum(pages * heads * layer.codec.record_bytes + layer.states[0].rows().nbytes for layer in engine.cache.layers)


def disk_gb_s(place: Path) -> float:
    content = os.urandom(1 << 20) * 256
    started = time.perf_counter()
    with (place / "stream").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content) / (time.perf_counter() - started) / 1e9


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    mb = {name: f"{value / 1e6:,.1f} MB" for name, value in found.items() if name.endswith("bytes")}
    low, high = found["spread_s"]
    print(f"{args.tokens:,} tokens of {args.config}, {args.layers} layers, a checkpoint every {args.every} tokens")
    print(f"  needed: {mb['needed_bytes']}; the disk takes {found['disk_gb_s']:.2f} GB/s")
    print(f"  whole: {mb['whole_bytes']}, {found['whole_s']:.2f} s")
    print(f"  checkpoint: {mb['new_bytes']} (at most {mb['most_new_bytes']}), {found['s']:.2f} s ({low:.2f} .. {high:.2f})")
    print(f"  {found['files']} files, manifest {mb['manifest_bytes']}")


if __name__ == "__main__":
    main()
