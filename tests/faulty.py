"""`generate` with a fault in one rank, as a script for test_faults: faulty.py FAULT RANK [FLAGS of generate].

The faulty rank writes "fault at TIME" to stderr when it happens; every rank writes "pid PID".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from bitkv_dist.launch import shell


def main(argv: list[str]) -> int:
    fault, rank, *flags = [word for word in argv if not word.startswith("--local_rank")]  # deepspeed puts it first
    sys.stderr.write(f"pid {os.getpid()}\n")
    if shell.launched_rank() == int(rank):
        flags = FLAGS.get(fault, lambda flags: flags)(flags)
        if fault in ACTS:
            happen(*ACTS[fault])
    from bitkv_dist.launch import generate

    return generate.main(flags)


def happen(place: str, act: Callable) -> None:
    """Do `act` in the third call of a function of the engine; in the second of those that are called once per layer."""
    from bitkv_dist import prefill
    from bitkv_dist.engine import Engine
    from bitkv_dist.parallel import roll

    owner, name = {
        "step": (Engine, "step"),
        "choose": (Engine, "choose"),
        "prefill": (prefill, "run_layer"),
        "versions": (roll, "versions"),
    }[place]
    real, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        result = real(*args, **kwargs)
        if place == "versions" or len(calls) == (2 if place == "prefill" else 3):
            sys.stderr.write(f"fault at {time.time()}\n")  # in one piece, or the lines of two ranks mix
            return act(result)
        return result

    setattr(owner, name, wrapped)


def killed_once(result):
    """Dies unless torchrun has started it again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def boom(result):
    raise RuntimeError("boom")


ACTS = {
    "raise": ("step", boom),
    "kill-decode": ("step", lambda result: os.kill(os.getpid(), signal.SIGKILL)),
    "kill-decode-once": ("step", killed_once),
    "kill-prefill": ("prefill", lambda result: os.kill(os.getpid(), signal.SIGKILL)),
    "stop": ("step", lambda result: os.kill(os.getpid(), signal.SIGSTOP) or result),
    "sleep": ("step", lambda result: time.sleep(1000)),
    "busy": ("step", lambda result: [time.sleep(0.2) for _ in iter(int, 1)]),
    "wander": ("choose", lambda result: [(token ^ 1, state) for token, state in result]),
    "version": ("versions", lambda result: result | {"torch": "1.0"}),
}
FLAGS = {
    "seed": lambda flags: [*flags, "--seed", "7"],
    "prompt": lambda flags: [*flags, "--prompt-file", "/no/such/file.txt"],
    "config": lambda flags: [*flags, "--recent-tokens", "64"],
    "model": lambda flags: [*flags, "--model", os.environ["OTHER_MODEL"]],
}

if __name__ == "__main__":
    shell.run(main, "generate")
