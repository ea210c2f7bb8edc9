"""What the stages of gpu_check share: the device, the package without installing it, timing, and a line of JSON."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16  # calls between two events


def arguments(description: str, **extra: dict) -> argparse.Namespace:
    """--dry-run and the stage's own flags; without a GPU only a dry run can start. Call it before the package is imported."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, kernels in Triton's interpreter")
    for name, kind in extra.items():
        parser.add_argument(f"--{name}", **kind)
    found = parser.parse_args()
    if found.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    find_package()
    import torch

    torch.manual_seed(0)
    if not found.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry-run shows that the stage runs")
    return found


def find_package() -> None:
    """Make `bitkv_dist` importable from this checkout where it is not installed."""
    if importlib.util.find_spec("bitkv_dist") is not None:
        return
    package = ROOT / "bitkv_dist"
    spec = importlib.util.spec_from_file_location(
        "bitkv_dist", package / "__init__.py", submodule_search_locations=[str(package), str(ROOT)]
    )
    sys.modules["bitkv_dist"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bitkv_dist"])


def device_of(dry_run: bool):
    import torch

    return torch.device("cpu" if dry_run else "cuda")


def kernels_of(dry_run: bool):
    """A context in which the Triton kernels serve the device."""
    from contextlib import nullcontext

    from bitkv_dist.kernels import dispatch

    return dispatch.forced(dispatch.TRITON) if dry_run else nullcontext()


def emit(stage: str, **values) -> None:
    """One JSON line on standard output."""
    print(json.dumps({"stage": stage} | values), flush=True)


def l2_bytes(device) -> int:
    """The last cache before memory; a size to rotate over where nothing is timed."""
    import torch

    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 16


def sets_beyond_cache(bytes_each: int, device, most: int = 64) -> int:
    """How many buffers of this size are walked in turn so that none is still in the cache when it comes again."""
    return max(2, min(most, 1 + -(-2 * l2_bytes(device) // bytes_each)))


def graphed(call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """The call as a CUDA graph, so that the launches of many small kernels are not what is timed; (call, how)."""
    import torch

    if not torch.cuda.is_available():
        return call, "eager"
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay, "graph"
    except RuntimeError as error:
        torch.cuda.synchronize()
        return call, f"eager: {str(error).splitlines()[0][:160]}"


def time_ms(calls: Sequence[Callable[[], object]], repeats: int = 30, budget_s: float = 0.6) -> tuple[float, float, float]:
    """(median, least, most) milliseconds of a call, over batches of calls that follow one another without a wait.

    The calls are taken in turn; the first batch is not counted. Without a GPU one call is timed, and means nothing.
    """
    import torch

    if not torch.cuda.is_available():
        started = time.perf_counter()
        calls[-1]()
        return ((time.perf_counter() - started) * 1e3,) * 3
    turns, times, began = itertools.cycle(calls), [], time.perf_counter()
    while len(times) <= repeats and (len(times) < 4 or time.perf_counter() - began < budget_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BATCH):
            next(turns)()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / BATCH)
    return statistics.median(times[1:]), min(times[1:]), max(times[1:])


def copy_gb_s(device) -> float:
    """Bytes read and written per second by a copy far larger than the cache, in GB/s."""
    import torch

    data = torch.empty((1 << 30) if device.type == "cuda" else 1 << 22, dtype=torch.uint8, device=device)
    target = torch.empty_like(data)
    median, _, _ = time_ms([lambda: target.copy_(data)])
    return 2 * data.numel() / median / 1e6
