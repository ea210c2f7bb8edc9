"""One failed rank ends the job: it says so in the rendezvous store, and every other rank looks there twice a second.

A peer that is stuck in a collective, or busy for minutes, never looks up by itself; launchers differ in whether they end it.
Nothing here prints: `raise_alarm` says whether *this* rank is the one to report.
"""

from __future__ import annotations

import os
import threading

import torch.distributed as dist

WATCH_S = 0.5  # how often a rank looks
ORPHAN_S = 10.0  # how long a rank lives on when the store has gone without a word
_ALARM = "alarm"  # store key: "<exit code> <message>"
_CLAIM = "claim"  # store counter: the first rank to add to it reports


class Alarm:
    """`store` serves this thread's calls, `watched` (another connection to the same store) those of the watching thread."""

    def __init__(self, store: dist.Store, watched: dist.Store, rank: int):
        self._store, self._watched, self._rank = store, watched, rank
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="bitkv-alarm", daemon=True)
        self._watcher.start()

    def raise_alarm(self, message: str, code: int) -> bool:
        """All other ranks exit with `code` within a second. True for the first rank that calls this: the one that prints."""
        try:
            first = self._store.add(_CLAIM, 1) == 1
            if first:
                self._over.set()  # this rank ends in its own time
                self._store.set(_ALARM, f"{code} {message}")
            return first
        except RuntimeError:  # rank 0 died and took the store along: one of the others must speak
            return self._rank == 1

    def linger(self) -> None:
        """Before a failing rank exits: time for all ranks to look (rank 0 takes the store with it)."""
        threading.Event().wait(3 * WATCH_S)

    def stop(self) -> None:
        """The run went well: nobody looks any more."""
        self._over.set()
        self._watcher.join()  # an interpreter that ends while a thread is inside the store aborts the process

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            try:
                raised = self._watched.check([_ALARM])
                code = int(self._watched.get(_ALARM).split(b" ", 1)[0]) if raised else 0
            except RuntimeError:
                if not self._over.wait(ORPHAN_S):  # the main thread notices earlier unless it is stuck
                    os._exit(1)
                return
            if raised and not self._over.is_set():
                os._exit(code)


def lost_peer(error: BaseException) -> str | None:
    """What happened to the connection, for an error that only says that another rank went away: the echo of a failure."""
    echoes = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "NCCL communicator was aborted",
        "ailed to recv",
    )
    return next((echo for echo in echoes if echo in str(error)), None) if isinstance(error, RuntimeError) else None
