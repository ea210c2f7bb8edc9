"""One failed rank ends the job: it says so in the rendezvous store, where a thread of every other rank looks twice a second.

A peer that is stuck in a collective, or busy for minutes, never looks up by itself; launchers differ in whether they end it.
The same thread keeps this rank's heart beating, watches the next rank's, and acts when the main thread cannot: on a signal, on
a launcher that is gone. Nothing here prints: `claim` says whether *this* rank is the one to report, and `say` does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from bitkv_dist.parallel.heartbeat import BEAT_S, Heart
from bitkv_dist.parallel.parents import Parents, end

WATCH_S = 0.5  # how often a rank looks
SILENT_S, LOADING_SILENT_S = 20.0, 60.0  # without a beat for so long a rank is given up
ORPHAN_S = 10.0  # how long a rank lives on when the store does not answer
SIGNAL_S = 3.0  # what the main thread gets to react to a signal before the watching thread does
LAST_S = 15.0  # what it gets to leave once it has raised the alarm
LINGER_S = 3.0  # how long a failing rank waits for the others to have seen the alarm
_ALARM = "alarm"  # store key: "<exit code> <the ranks that were given up>"
_CLAIM = "claim"  # store counter: the first rank to add to it reports
_GONE = "no answer from it; killed, stopped, out of memory or cut off"
_SEEN = "seen"  # store counter: ranks that have seen the alarm
ENDING = {signal.SIGINT: "interrupted (SIGINT)", signal.SIGTERM: "terminated (SIGTERM)"}

Say = Callable[[str, bool | None], None]  # (message, whether this rank is the one to report; None: nobody can know)


class Alarm:
    """`store` serves this thread's calls, `watched` (another connection to the same store) those of the watching thread."""

    def __init__(self, store: dist.Store, watched: dist.Store, heart: Heart, agent: str | None, say: Say):
        """agent: who keeps the store, if not rank 0."""
        self.heart, self.step_timeout_s = heart, None  # set once loading is over
        self._store, self._watched, self._say = store, watched, say
        self._serves, self._server = agent is None, agent or heart.name(0)
        self._over = threading.Event()
        self._leave_by: float | None = None
        self._looks, self._acknowledged = 0, False
        self._parents, self._signals = Parents(), Signals()
        self._threads = [
            threading.Thread(target=self._watch, name="bitkv-alarm", daemon=True),
            threading.Thread(target=self._guard, name="bitkv-guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def claim(self) -> bool | None:
        """Whether this rank, which fails, is the first to: the one that prints, then calls `leave`.

        None when the store is gone, so that the ranks cannot agree on one.
        """
        self._leave_by = time.monotonic() + LAST_S
        return self._claim(self._store)

    def leave(self, code: int, mine: bool | None) -> None:
        """Before a failing rank exits: the rank that reports ends all others, which exit with `code`, and waits for them.

        The others must not go before that rank has found out who is missing.
        """
        self._leave(self._store, code, mine)

    def who_is_missing(self) -> str:
        """The ranks that went away or hang, as far as the others can tell; empty when they cannot."""
        return self._explained(self._store, time.sleep)

    def who_differs(self) -> str | None:
        with contextlib.suppress(RuntimeError):
            return self.heart.who_differs(self._store)
        return None

    def stop(self) -> None:
        """The run went well: nobody looks any more."""
        self._over.set()
        for thread in self._threads:
            thread.join()  # an interpreter that ends while a thread is inside the store aborts the process
        self._signals.close()

    # -- the watching thread

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self._looks += 1
            try:
                trouble = self._look(self._looks % round(BEAT_S / WATCH_S) == 0)
            except RuntimeError:  # the store is gone; the main thread notices earlier unless it is stuck
                return
            if trouble and not (self._leave_by or self._over.is_set()):
                self._end(*trouble)

    def _look(self, beat: bool) -> tuple[str, int] | None:
        """(what is wrong, exit status) when this rank has to end the job. Exits when another has ended it."""
        if self._watched.check([_ALARM]):
            code, *given_up = map(int, self._watched.get(_ALARM).split())
            if not self._acknowledged:
                self._end_stopped(given_up)
                self._watched.add(_SEEN, 1)
            self._acknowledged = True
            self._await_all(self._watched)
            if not (self._leave_by or self._over.is_set()):
                os._exit(code)
            return None
        if beat:
            self.heart.beat(self._watched)
        if number := self._signals.unanswered(SIGNAL_S):
            return ENDING[number], 128 + number
        if self._parents.gone():
            return "its launcher is gone", 128 + signal.SIGTERM
        if not beat:
            return None
        loading = self.step_timeout_s is None
        if self.heart.next_is_silent(self._watched, LOADING_SILENT_S if loading else SILENT_S):
            return "lost another rank", 1
        # A collective that knows its own timeout tells the main thread; one that does not leaves it to two of the ranks.
        if not loading and self.heart.rank < 2 and self.heart.idle_s > self.step_timeout_s + SIGNAL_S:
            return ("waits in vain", 1) if self._explained(self._watched, self._wait) else None
        return None

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._over.wait(WATCH_S):
            self._looks += 1
            self.heart.beat(self._watched)

    def _end(self, what: str, code: int) -> None:
        mine = self._claim(self._watched)
        message = f"{self._name}: {what}"
        if mine is not False and code != 128 + signal.SIGINT and (why := self._explained(self._watched, self._wait)):
            message = f"{message}: {why}"
        with contextlib.suppress(OSError, ValueError):
            self._say(f"bitkv: {message}", mine)
        self._leave(self._watched, code, mine)
        os._exit(code)

    # -- the guard, which touches no store: a call into one that is out of reach returns after minutes

    def _guard(self) -> None:
        seen = ticks = 0
        while not self._over.wait(WATCH_S):
            ticks = ticks + 1 if self._looks == seen else 0
            seen = self._looks
            if self._leave_by and time.monotonic() > self._leave_by:
                os._exit(1)
            if ticks * WATCH_S > ORPHAN_S and not self._leave_by:
                with contextlib.suppress(OSError, ValueError):
                    self._say(f"bitkv: {self._name}: lost {self._server}, which keeps the rendezvous store: {_GONE}", None)
                os._exit(1)

    @property
    def _name(self) -> str:
        return self.heart.name(self.heart.rank)

    # -- both threads, each with its own connection

    def _claim(self, store: dist.Store) -> bool | None:
        try:
            return store.add(_CLAIM, 1) == 1
        except RuntimeError:
            return None

    def _leave(self, store: dist.Store, code: int, mine: bool | None) -> None:
        with contextlib.suppress(RuntimeError):
            if mine:
                self._acknowledged = True  # the others are counted
                self._end_stopped(self.heart.given_up)
                store.set(_ALARM, " ".join(map(str, (code, *self.heart.given_up))))
            _until(lambda: self._is_over(store), LAST_S)
            self._await_all(store, mine)

    def _is_over(self, store: dist.Store) -> bool:
        """Whether the rank that reports has found out who is missing; this one, which waits for it, is not."""
        self.heart.beat(store)
        return store.check([_ALARM])

    def _end_stopped(self, given_up: list[int]) -> None:
        """A rank of this host that does not even beat would not see the alarm either."""
        here = self.heart.roll[self.heart.rank].host
        for entry in (self.heart.roll[rank] for rank in given_up):
            if entry.host == here:
                with contextlib.suppress(OSError):
                    end(entry.pid, entry.born)

    def _await_all(self, store: dist.Store, mine: bool | None = False) -> None:
        """The rank that reports, and the one that keeps the store, leave last: others would take the loss for the cause."""
        if mine or (self._serves and self.heart.rank == 0):
            _until(lambda: store.add(_SEEN, 0) >= len(self.heart.roll) - 1, LINGER_S)

    def _explained(self, store: dist.Store, wait: Callable[[float], object]) -> str:
        try:
            return self.heart.who_is_missing(store, wait) or ""
        except RuntimeError:
            return f"{self._server}, which keeps the rendezvous store: {_GONE}"


def _until(reached: Callable[[], bool], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not reached() and time.monotonic() < end:
        time.sleep(0.1)


class Terminated(BaseException):
    """SIGTERM, raised in the main thread: a launcher ends its ranks with it when one of them has died."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


class Signals:
    """SIGINT and SIGTERM as they arrive, also while the main thread is inside a collective and runs no Python handler.

    From here on SIGTERM raises Terminated, so that this rank may say whom it lost before it goes.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._read = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _terminate)
            self._read, self._write = socket.socketpair()
            for end in (self._read, self._write):
                end.setblocking(False)
            signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def unanswered(self, patience_s: float) -> int | None:
        """The number of a signal that came so long ago."""
        if self._read is not None:
            with contextlib.suppress(BlockingIOError):
                for number in self._read.recv(64):
                    if number in ENDING and self._first is None:
                        self._first = (time.monotonic(), number)
        if self._first and time.monotonic() - self._first[0] > patience_s:
            return self._first[1]
        return None

    def close(self) -> None:
        if self._read is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(-1)
            self._read.close()
            self._write.close()


def lost_peer(error: BaseException) -> str | None:
    """What happened to the connection, for an error that only says that another rank went away: the echo of a failure."""
    echoes = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "NCCL communicator was aborted",
        "ailed to recv",
        "Timed out waiting",
    )
    return next((echo for echo in echoes if echo in str(error)), None) if isinstance(error, RuntimeError) else None
