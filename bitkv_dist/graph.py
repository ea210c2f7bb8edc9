"""A decode step as a graph: recorded once, replayed for every token after it.

Everything in it that changes from step to step is a number on the device (see tables.py). What runs on the host, sealing above
all, stays outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Run = Callable[[], torch.Tensor]
Recorder = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]  # a call -> (replay, the tensor that each replay fills)


def record_cuda(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
    """`run` as a CUDA graph; recording it does not run it. What it reads must stay where it is."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


class StepGraph:
    """The first call runs, so that every kernel is compiled and every workspace there; the second records; all later replay.

    key: what the graph was made for.
    """

    def __init__(self, key: object, run: Run, recorder: Recorder) -> None:
        self.key, self.run, self.recorder = key, run, recorder
        self.warm, self.replay = False, None
        self.output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """The result of the step; the next call writes over it."""
        if not self.warm:
            self.warm = True
            return self.run()
        if self.replay is None:
            self.replay, self.output = self.recorder(self.run)
        self.replay()
        return self.output
