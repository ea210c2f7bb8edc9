"""A stand-in for CUDA graphs on a CPU: what one step did to tensors, done again without the step's Python.

Every torch operation and every launch of a Triton kernel is written down with the very tensors it used. Replaying it repeats
them on the same memory, as a CUDA graph does. What a graph cannot hold is refused: reading a number back from the device, and
bringing data of the host to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime import interpreter

HOST = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "lift_fresh", "masked_select")


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.played: list[Callable[[], None]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation._schema.name.split("::")[1]
        if name in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if operation._schema.is_mutable:  # recording changes nothing: what is written may hold anything yet
            self.played.append(lambda: operation(*args, **kwargs))
            return kwargs.get("out", args[0])
        found = operation(*args, **kwargs)
        outputs = [t for t in tree_flatten(found)[0] if isinstance(t, torch.Tensor)]
        inputs = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        if all(t.untyped_storage().data_ptr() in inputs for t in outputs):
            return found  # views: of memory that is written elsewhere

        def again() -> None:
            fresh = [t for t in tree_flatten(operation(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
            for output, value in zip(outputs, fresh, strict=True):
                output.copy_(value)

        self.played.append(again)
        return found


class TapeRecorder:
    """graph.Recorder that replays a tape; `recorded` counts the recordings, `steps` the operations of the last."""

    def __init__(self) -> None:
        self.recorded = self.steps = 0

    def check(self, device: torch.device, backend: str, sharers: int) -> None:
        pass

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        tape, launch = Tape(), interpreter.GridExecutor.__call__

        def launched(executor, *args, **kwargs) -> None:
            tape.played.append(lambda: launch(executor, *args, **kwargs))

        interpreter.GridExecutor.__call__ = launched
        try:
            with tape:
                output = run()
        finally:
            interpreter.GridExecutor.__call__ = launch
        self.recorded, self.steps = self.recorded + 1, len(tape.played)

        def replay() -> None:
            for play in tape.played:
                play()

        return replay, output
