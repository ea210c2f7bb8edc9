"""The roll call: before the ranks talk to each other, each leaves a line about itself in the rendezvous store.

Rank 0 reads all of them and publishes the list, or why the ranks do not belong together: process groups of different grids
would wait for each other until they time out, without a word about the reason.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

COMPARED_VERSIONS = ("bitkv_dist", "torch", "transformers", "triton")  # libraries whose numbers reach the tokens
SHOWN_VERSIONS = (*COMPARED_VERSIONS, "numpy", "deepspeed")
_VERDICT = "roll"
_PATIENCE_S = 10.0  # how much longer than rank 0 the others wait: it must be the one to say who is missing


@dataclass(frozen=True)
class Entry:
    """What a rank says about itself."""

    rank: int
    host: str
    pid: int
    born: int  # see parents.birth
    device: str
    threads: int
    size: int
    tp: int
    sp: int
    backend: str
    layout: str = "replicated"
    exchange: str = "auto"
    cores: str = ""  # that it was bound to

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    @property
    def grid(self) -> str:
        """What must be the same on every rank."""
        how = f"layout {self.layout}, exchange {self.exchange}"
        return f"tp {self.tp} x sp {self.sp} in a world of {self.size} over {self.backend}, {how}"


def call(store: dist.Store, mine: Entry, timeout_s: float) -> list[Entry]:
    """Every rank's entry, in rank order. ValueError (one line, the same on all ranks) when some are missing or do not fit."""
    store.set(_key(mine.rank), json.dumps(asdict(mine)))
    if mine.rank == 0:
        store.set(_VERDICT, json.dumps(_verdict(store, mine, timeout_s)))
    try:
        store.wait([_VERDICT], timedelta(seconds=timeout_s + _PATIENCE_S))
    except dist.DistError:
        raise ValueError(
            f"start_timeout_s {timeout_s:g}: rank 0 answers, but did not call the roll in that time; look at its messages"
        ) from None
    verdict = json.loads(store.get(_VERDICT))
    if isinstance(verdict, str):
        raise ValueError(verdict)
    return [Entry(**entry) for entry in verdict]


def _verdict(store: dist.Store, mine: Entry, timeout_s: float) -> list[dict] | str:
    missing = _missing(store, mine.size, timeout_s)
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return (
            f"start_timeout_s {timeout_s:g}: not all {mine.size} ranks came up in that time, missing: {shown}; "
            "look at the messages of their hosts, or raise it"
        )
    entries = [Entry(**json.loads(store.get(_key(rank)))) for rank in range(mine.size)]
    for entry in entries:
        if entry.grid != mine.grid:
            return f"{entry.name}: {entry.grid}, but {mine.name}: {mine.grid}; start all ranks with the same command line"
    return [asdict(entry) for entry in entries]


def _missing(store: dist.Store, size: int, timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    for rank in range(size):
        try:
            store.wait([_key(rank)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except dist.DistError:
            return [other for other in range(rank, size) if not store.check([_key(other)])]
    return []


def _key(rank: int) -> str:
    return f"roll/{rank}"


@cache
def versions() -> dict[str, str]:
    """Installed versions of what decides about the numbers; "none" for what is not there."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    return {name: installed(name) for name in SHOWN_VERSIONS}
