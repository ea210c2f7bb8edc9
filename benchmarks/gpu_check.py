"""All that only a GPU can show, in one command and under nine minutes, with nothing to download.

    benchmarks/gpu_check.sh                     on a machine with a GPU
    benchmarks/gpu_check.sh --dry-run           tiny sizes on any machine: every line runs, no number means anything

Correctness of all kernels against the reference, decode latency against torch's flash attention and (where it is installed)
FlashInfer, the cost of encoding, the decode step of the engine as a CUDA graph, and decoding with a random model of the shape
of Llama-3.1-8B. Each stage is a process of its own with a time limit: one that fails or hangs does not lose the rest. Standard
output is JSON lines, written to --json FILE as well; the last one says which targets were met. The exit status is 1 when a
stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAGES = (  # name, script, its flags, limit in seconds
    ("correctness", "gpu_correctness.py", (), 125),
    *((f"decode {kind}", "gpu_decode.py", ("--kind", kind), 30) for kind in ("1", "2", "4", "tiered4")),
    ("decode tailored", "gpu_decode.py", ("--kind", "tailored"), 45),
    ("decode sdpa", "gpu_decode.py", ("--kind", "sdpa"), 40),
    ("decode flashinfer", "gpu_decode.py", ("--kind", "flashinfer"), 40),
    ("encode", "gpu_decode.py", ("--kind", "encode"), 30),
    ("step", "gpu_engine.py", ("--model", "small"), 45),
    ("step 8b", "gpu_engine.py", ("--model", "8b"), 80),
)
DRY_RUN_LIMIT_S = 240
TARGET_CONTEXT = 131072
TARGETS = {"bf16 flash decoding": 5.0, "the bytes of fp8": 2.5}  # times faster than these is one bit to be


def run_stage(script: str, flags: tuple[str, ...], limit_s: int) -> tuple[list[dict], str | None]:
    """(the stage's JSON lines, why it failed or None). What it had printed before it failed is kept."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, str(HERE / script), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, complaints = process.communicate(timeout=limit_s)
            last = (complaints.strip().splitlines() or ["no message"])[-1]
            failure = None if process.returncode == 0 else f"exit status {process.returncode}: {last}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started itself too
            out, _ = process.communicate()
            failure = f"took more than {limit_s} s"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], failure


def environment() -> dict:
    """Versions, commit and machine."""
    import torch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    described = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    found = {
        "stage": "environment",
        "commit": described.stdout.strip() or None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "flashinfer-python")},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "processors": properties.multi_processor_count,
        }
    return found


def ratios(decodes: list[dict]) -> dict[str, dict[str, float]]:
    """How many times faster than the best bf16 peer each kind of packed cache decodes, by context."""
    peers: dict[int, float] = {}
    for line in decodes:
        if line["kind"].endswith("bf16"):
            peers[line["context"]] = min(line["ms"], peers.get(line["context"], line["ms"]))
    found: dict[str, dict[str, float]] = {}
    for line in decodes:
        if " " not in line["kind"] and line["context"] in peers:
            found.setdefault(line["kind"], {})[str(line["context"])] = round(peers[line["context"]] / line["ms"], 2)
    return found


def targets(decodes: list[dict]) -> dict[str, dict]:
    """What decoding at one bit over 131,072 tokens is for: how many times faster it is than flash attention over bf16, and than
    the bytes of an fp8 cache could be copied. None: not measured."""
    at = {line["kind"]: line for line in decodes if line["context"] == TARGET_CONTEXT}
    ours, flash = at.get("1"), at.get("sdpa bf16")
    times = dict.fromkeys(TARGETS)
    if ours and flash:
        fp8_ms = flash["bytes"] / 2 / (flash["copy_gb_s"] * 1e6)
        times |= {"bf16 flash decoding": flash["ms"] / ours["ms"], "the bytes of fp8": fp8_ms / ours["ms"]}
    return {
        name: {"at_least": least, "found": times[name], "result": judged(times[name], least)}
        for name, least in TARGETS.items()
    }


def judged(found: float | None, least: float) -> str:
    if found is None:
        return "not measured"
    return "pass" if found >= least else "miss"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    parser.add_argument("--only", help="stages whose name starts so")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    started, failures, lines = time.perf_counter(), {}, []

    def show(line: dict) -> None:
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
        if args.json:  # after each line: an interruption keeps what there is
            args.json.write_text("\n".join(lines) + "\n")

    show(environment())
    for name, script, flags, limit_s in STAGES:
        if args.only and not name.startswith(args.only):
            continue
        began = time.perf_counter()
        dry = ("--dry-run",) if args.dry_run else ()
        found, failure = run_stage(script, (*flags, *dry), DRY_RUN_LIMIT_S if args.dry_run else limit_s)
        for line in found:
            show(line)
        if failure:
            failures[name] = failure
            show({"stage": name, "failed": failure})
        print(f"{name}: {failure or 'done'}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    spent = round(time.perf_counter() - started, 1)
    decodes = [line for line in map(json.loads, lines) if line["stage"] == "decode" and "ms" in line]
    met = targets(decodes)
    for name, target in met.items():
        print(f"target: {target['at_least']} times faster than {name}: {target['result']}", file=sys.stderr, flush=True)
    show({"stage": "summary", "dry_run": args.dry_run, "failed": failures, "seconds": spent, "times_faster": ratios(decodes),
          "targets": met})  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
