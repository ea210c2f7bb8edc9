"""The folder of a snapshot, replaced as a whole: a crash at any moment leaves the old snapshot or the new one.

The new content is written and flushed in `DIR.writing`. Then, in this order: DIR is renamed to `DIR.old`, `DIR.writing` to
DIR, and `DIR.old` is removed. Between the two renames there is no DIR, but a complete `DIR.old`: a reader who finds only that
uses it, and the next save puts it back first. `DIR.old` is never removed while there is no DIR. This holds for a process that
dies at any moment; after a power failure, as far as the file system keeps renames of one folder in order.

Refusals are a ValueError of one line that goes on where "save-cache DIR: " or "load-cache DIR: " ends.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from filelock import FileLock, Timeout

FORMAT = "bitkv snapshot"
MANIFEST = "manifest.json"
LOCK = "lock"
_PART = re.compile(r"rank\d+-[a-z0-9-]+\.safetensors|logits\.safetensors|manifest\.json|lock")


def beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def exists(folder: Path) -> bool:
    """Whether there is a snapshot of that name, or something else in its place."""
    folder = folder.expanduser().resolve()
    return any(place.is_dir() and any(place.iterdir()) for place in (folder, beside(folder, ".old")))


def holds_snapshot(place: Path) -> bool:
    """Whether a folder's manifest is one of ours, damaged or not: many programs have a manifest.json."""
    try:
        with open(place / MANIFEST, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False


def strange(place: Path) -> str | None:
    """The name of something in a folder that no save has put there."""
    return next((entry.name for entry in sorted(place.iterdir()) if entry.is_dir() or not _PART.fullmatch(entry.name)), None)


def find(folder: Path) -> Path:
    """Where the snapshot of that name is: the folder, or the copy that an interrupted save has put aside."""
    folder = folder.expanduser().absolute()
    aside = beside(folder.resolve(), ".old")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"has no {MANIFEST}; give a folder that --save-cache has made")
        return folder
    if (aside / MANIFEST).is_file():
        return aside
    raise ValueError("no such snapshot; give a folder that --save-cache has made")


class Replacement:
    """The next content of a folder. Only one process at a time may begin; `writing` is where the files go."""

    def __init__(self, folder: Path) -> None:
        self.target = folder.expanduser().resolve()
        self.writing, self.aside = beside(self.target, ".writing"), beside(self.target, ".old")
        self._lock = FileLock(self.writing / LOCK)

    def check(self) -> None:
        """ValueError where nothing may be written: what is not a snapshot is never replaced."""
        if not self.target.parent.is_dir():
            raise ValueError(f"its folder {self.target.parent} does not exist; make it, or save elsewhere")
        if not os.access(self.target.parent, os.W_OK | os.X_OK):
            raise ValueError(f"its folder {self.target.parent} cannot be written to; save elsewhere")
        for place in (self.target, self.aside, self.writing):
            if place.exists() and not place.is_dir():
                raise ValueError(f"{place} is a file; remove it, or save elsewhere")
        for place in (self.target, self.aside):
            if place.is_dir() and any(place.iterdir()) and not holds_snapshot(place):
                raise ValueError(f"{place} is not empty and holds no snapshot; save elsewhere")
        for place in (self.target, self.aside, self.writing):
            if place.is_dir() and (name := strange(place)):
                raise ValueError(f"{place} holds {name}, which is no part of a snapshot; move that, or save elsewhere")

    def begin(self) -> None:
        """An empty `writing`; what interrupted saves have left is put back (the only copy of the old snapshot) or removed."""
        self.check()
        self.writing.mkdir(exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError("another run is saving there; wait for it, or save elsewhere") from None
        for entry in self.writing.iterdir():
            if entry.name != LOCK:
                remove(entry)
        if self.aside.is_dir() and not self.target.is_dir():
            os.rename(self.aside, self.target)

    def commit(self) -> None:
        """Make `writing`, whose files are flushed, the folder."""
        flush(self.writing)
        if self.target.is_dir():
            if self.aside.is_dir():
                remove(self.aside)
            os.rename(self.target, self.aside)
        try:
            os.rename(self.writing, self.target)
        except OSError:
            if self.aside.is_dir():
                os.rename(self.aside, self.target)
            raise
        flush(self.target.parent)
        remove(self.target / LOCK)
        self._lock.release()
        if self.aside.is_dir():
            remove(self.aside)

    def abandon(self) -> None:
        """Remove what was written, unless it has been committed."""
        if self._lock.is_locked:
            if self.writing.is_dir():
                with contextlib.suppress(OSError):
                    remove(self.writing)
            self._lock.release()


def remove(path: Path) -> None:
    """A file, or the folder of a snapshot, whose manifest goes last: what is left of a removal that was cut short can still be
    told apart from a folder of somebody else. What is no part of a snapshot stays."""
    if not path.is_dir():
        path.unlink()
        return
    for entry in path.iterdir():
        if entry.name != MANIFEST and not entry.is_dir() and _PART.fullmatch(entry.name):
            entry.unlink()
    (path / MANIFEST).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def discard(folder: Path) -> None:
    """Remove a snapshot."""
    folder = folder.expanduser().resolve()
    for place in (folder, beside(folder, ".old")):
        if holds_snapshot(place):
            remove(place)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
