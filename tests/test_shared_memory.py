"""Ranks of a host share the pages of one file, whatever part of the model each has: memory at load, measured (C37)."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from ranks import run_ranks

from bitkv_dist import model
from bitkv_dist.split import Split

MEMORY = Path("/proc/self/smaps_rollup")
GRIDS = [(1, 4, "replicated"), (2, 2, "replicated"), (4, 1, "replicated"), (1, 4, "helix"), (2, 2, "helix")]


def proportional_bytes() -> int:
    """This process's memory, each shared page divided by the number of processes that map it."""
    return next(int(line.split()[1]) * 1024 for line in MEMORY.read_text().splitlines() if line.startswith("Pss:"))


def pss_of_grids(mesh, folder: str) -> dict[tuple, tuple[int, int]]:
    """For each grid, all ranks' memory above what they had before: once the model is loaded, and once all of it was read."""
    found = {}
    for tp, sp, layout in (GRIDS[0], *GRIDS):  # what a first load leaves in the libraries is not the model's
        sp_rank, tp_rank = divmod(mesh.world.rank, tp)
        gc.collect()
        mesh.gather_objects(None)
        before, steps = proportional_bytes(), []
        served = model.load(
            folder, dtype=None, device=mesh.world.device, ranks=SimpleNamespace(split=Split(tp, sp, tp_rank, sp_rank, layout))
        )
        for touched in (False, True):
            if touched:
                assert all(torch.isfinite(parameter.sum()) for parameter in served.module.parameters())
            mesh.gather_objects(None)  # nobody measures while others still read
            steps.append(sum(mesh.gather_objects(proportional_bytes() - before)))
        found[tp, sp, layout] = tuple(steps)
        del served
    return found


@pytest.mark.slow
@pytest.mark.skipif(not MEMORY.exists(), reason="needs Linux")
def test_memory_at_load_is_that_of_one_model(tmp_path):
    """Four ranks, 240 MB of float32 weights: below 1.3 times these, also with columns that no rank has alone."""
    sizes = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    folder = tiny.save(tmp_path, num_attention_heads=16, num_key_value_heads=4, **sizes)
    model_bytes = (folder / "model.safetensors").stat().st_size
    for grid, steps in run_ranks(4, pss_of_grids, str(folder), timeout_s=300)[0].items():
        assert max(steps) < 1.3 * model_bytes, (grid, steps, model_bytes)
