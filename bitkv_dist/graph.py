"""A decode step as a graph: recorded once, replayed for every token after it.

Everything in it that changes from step to step is a number on the device (see tables.py). What runs on the host, sealing above
all, stays outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    def check(self, device: torch.device, backend: str, sharers: int) -> None:
        """ValueError where a step cannot be recorded; backend: that of the ranks' collectives; sharers: ranks that share the
        weights."""

    def record(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """`run` without running it: (replay, the tensor that each replay fills). What it reads must stay where it is."""


class CudaGraphs:
    def check(self, device: torch.device, backend: str, sharers: int) -> None:
        if device.type != "cuda":
            raise ValueError(f"generate.graph true: graphs need a GPU, and this rank runs on {device.type}; leave it false")
        if backend not in ("none", "nccl"):
            raise ValueError(f"generate.graph true: exchanges of {backend} cannot be recorded, nccl's can; leave it false")
        if sharers > 1:
            remedy = "use tp 1 and layout replicated"
            raise ValueError(f"generate.graph true: a step of {sharers} ranks that share weights is not recorded; {remedy}")

    def record(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device something meanwhile: nccl's looks after its collectives.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output


class StepGraph:
    """The first call runs, so that every kernel is compiled and every workspace there; the second records; all later replay.

    key: what the graph was made for.
    """

    def __init__(self, key: object, run: Run, recorder: Recorder) -> None:
        self.key, self.run, self.recorder = key, run, recorder
        self.warm = False
        self.replay: Callable[[], None] | None = None
        self.output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """The result of the step; the next call writes over it."""
        if not self.warm:
            self.warm = True
            return self.run()
        if self.replay is None:
            self.replay, self.output = self.recorder.record(self.run)
        self.replay()
        return self.output
