"""Turns of an interactive run: typed on rank 0, taken by every rank."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from bitkv_dist.launch.shell import say
from bitkv_dist.parallel.mesh import Mesh


class Keyboard:
    """Lines of a text stream, without blocking: a thread reads, so that rank 0 can tell the others that it is still there."""

    def __init__(self, source: TextIO, patience_s: float) -> None:
        self._source, self._patience_s = source, patience_s
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="bitkv-keyboard", daemon=True).start()

    def line(self) -> str | None:
        """The next line; "" for none within the patience or an empty one; None at the end of the input."""
        try:
            line = self._lines.get(timeout=self._patience_s)
        except queue.Empty:
            return ""
        return line.rstrip("\r\n") if line else None

    def _read(self) -> None:
        try:
            if hasattr(self._source, "reconfigure"):
                self._source.reconfigure(encoding="utf-8", errors="replace")
            for line in self._source:
                self._lines.put(line)
        finally:
            self._lines.put("")  # the end, also of a source that cannot be read any further


def turns(
    mesh: Mesh, encode: Callable[[str], list[int]], patience_s: float, source: TextIO | None = None
) -> Iterator[list[int]]:
    """The token ids of one turn after another, the same on every rank, until the input ends.

    encode: text -> ids, called on rank 0; its ValueError is shown and the turn dropped. Rank 0 speaks up every
    `patience_s` while nothing is typed, so that the others' wait never reaches the timeout of a collective.
    """
    leads = mesh.world.rank == 0
    source = source or sys.stdin
    keyboard = Keyboard(source, patience_s) if leads else None
    asked = False
    while True:
        if leads and source.isatty() and not asked:
            sys.stderr.write("> ")
            sys.stderr.flush()
        ids = mesh.broadcast(_read_turn(keyboard, encode) if leads else None)
        if ids is None:
            return
        asked = not ids
        if ids:
            yield ids


def _read_turn(keyboard: Keyboard, encode: Callable[[str], list[int]]) -> list[int] | None:
    line = keyboard.line()
    if not line:
        return None if line is None else []
    try:
        return encode(line)
    except ValueError as error:
        say(f"bitkv generate: {error}")
        return []
