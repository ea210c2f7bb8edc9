"""Signs of life, outside gloo and nccl: each rank writes into the rendezvous store how far it has come, once a second.

Nobody needs a clock that is right, nor another rank's: a rank is silent when its count has not changed during several looks of
the one that watches, so that a job which was suspended as a whole simply goes on. Each rank watches the next one only; whoever
has a reason to reads all of them, and can then say who is missing, since when and where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from bitkv_dist.parallel.digest import odd_ones
from bitkv_dist.parallel.roll import Entry

BEAT_S = 1.0


@dataclass
class Pulse:
    """How far this rank's main thread has come; it writes, the watching thread reads."""

    where: str = "start-up"  # start-up | prefill | step 7
    exchanges: int = 0  # collectives that it has entered
    history: int = 0  # digest of the tokens it has fed to the model


@dataclass(frozen=True)
class Beat:
    """One sign of life, as read from the store."""

    count: int
    idle_s: int  # how long `exchanges` has not changed
    exchanges: int
    history: int
    where: str

    @staticmethod
    def read(words: bytes) -> Beat:
        count, idle_s, exchanges, history, where = words.decode().split(" ", 4)
        return Beat(int(count), int(idle_s), int(exchanges), int(history), where)


class Heart:
    """This rank's beats, and its view of the others. The methods take the store: each thread has its own connection.

    Every rank beats once before the roll is called, so that there is something to read.
    """

    def __init__(self, pulse: Pulse, rank: int) -> None:
        self.pulse, self.rank = pulse, rank
        self.roll: list[Entry] = []  # filled in once all ranks have answered
        self.given_up: list[int] = []  # ranks that who_is_missing found silent
        self._count, self._moved = 0, (pulse.exchanges, time.monotonic())
        self._seen = (-1, 0)  # the next rank's count, and how many looks ago it was new

    def beat(self, store: dist.Store) -> None:
        """Write this rank's state; call it once per BEAT_S."""
        self._count += 1
        if self.pulse.exchanges != self._moved[0]:
            self._moved = (self.pulse.exchanges, time.monotonic())
        pulse = self.pulse
        words = (self._count, round(self.idle_s), pulse.exchanges, pulse.history, pulse.where)
        store.set(_key(self.rank), " ".join(map(str, words)))

    @property
    def idle_s(self) -> float:
        """How long this rank's main thread has entered no collective."""
        return time.monotonic() - self._moved[1]

    def next_is_silent(self, store: dist.Store, patience_s: float) -> bool:
        """Whether the next rank's heart has stood still for so long; call it once per BEAT_S."""
        count = Beat.read(store.get(_key((self.rank + 1) % len(self.roll)))).count
        self._seen = (count, self._seen[1] + 1 if count == self._seen[0] else 0)
        return self._seen[1] * BEAT_S >= patience_s

    def who_is_missing(self, store: dist.Store, wait: Callable[[float], object] = time.sleep) -> str | None:
        """Watch all ranks for three beats, then name those without a sign of life, or those that are behind this one."""
        before = self._read_all(store)
        wait(3 * BEAT_S)
        after = self._read_all(store)
        silent = [rank for rank in range(len(self.roll)) if after[rank] == before[rank] and rank != self.rank]
        if silent:
            self.given_up = silent
            return f"{self._named(silent, after, 'last in ')}: no sign of life; killed, stopped, out of memory or cut off"
        behind = [rank for rank, beat in enumerate(after) if beat.exchanges < self.pulse.exchanges]
        if behind and after[behind[0]].idle_s >= BEAT_S:
            first = min(behind, key=lambda rank: after[rank].exchanges)
            missed = f"for {after[first].idle_s} s not in exchange {after[first].exchanges + 1}, where others wait"
            return f"{self._named([first], after)}: {missed}; it hangs, or is far slower than they are"
        return None

    def who_differs(self, store: dist.Store, wait: Callable[[float], object] = time.sleep) -> str | None:
        """The ranks whose tokens are not those of most ranks, by what they said last. Takes two beats."""
        wait(2 * BEAT_S)
        beats = self._read_all(store)
        odd = [rank for rank, _ in odd_ones([{0: beat.history} for beat in beats])]
        return self._named(odd, beats) if odd else None

    def name(self, rank: int) -> str:
        return self.roll[rank].name

    def _named(self, ranks: list[int], beats: list[Beat], when: str = "") -> str:
        named = [f"rank {rank} (host {self.roll[rank].host}, {when}{beats[rank].where})" for rank in ranks[:4]]
        return ", ".join(named) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")

    def _read_all(self, store: dist.Store) -> list[Beat]:
        return [Beat.read(words) for words in store.multi_get([_key(rank) for rank in range(len(self.roll))])]


def _key(rank: int) -> str:
    return f"beat/{rank}"
