"""What of a cache a rank has on disk already, so that the next snapshot in the same folder takes it over with a hard link.

A file is taken over when nothing can have changed on either side: the cache counts how often pages were written in each
granule, and the file is the very one (inode, size, time) that was written, or read, then. Nothing is read to find that out.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bitkv_dist.snapshot.manifest import Manifest, TensorFile
from bitkv_dist.snapshot.pieces import Piece

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache
    from bitkv_dist.engine import Engine


@dataclass(frozen=True)
class Entry:
    """A file of sealed pages. identity: see `identity_of`; writes: see Piece.writes."""

    file: TensorFile
    identity: tuple[int, int, int]
    writes: list[list[int]]


class Saved:
    """A snapshot of a cache. bytes: of all its files; new_bytes: of those that were written for it, on all ranks; 0 of one
    that was loaded."""

    def __init__(self, cache: PackedCache) -> None:
        self._cache = weakref.ref(cache)
        self._entries: dict[str, Entry] = {}
        self.bytes = self.new_bytes = 0

    def add(self, piece: Piece, file: TensorFile, path: Path) -> None:
        """Note a file that holds a range of the cache's granules as they are now."""
        self._entries[file.name] = Entry(file, identity_of(path), piece.writes(self._cache()))

    def held(self, cache: PackedCache, piece: Piece, name: str, folder: Path) -> TensorFile | None:
        """The file of that name in `folder`, where it still holds this piece of the cache."""
        entry = self._entries.get(name)
        if entry is None or self._cache() is not cache or entry.writes != piece.writes(cache):
            return None
        try:
            return entry.file if identity_of(folder / name) == entry.identity else None
        except OSError:
            return None


def saved_of(engine: Engine, folder: Path, manifest: Manifest, sources: list[int]) -> Saved:
    """What the engine's cache has in `folder`, out of which it was just loaded: files of this rank, if the grid is the same.

    sources: of which saved sequence each one of the cache is a copy.
    """
    saved, mesh, heads = Saved(engine.cache), engine.mesh, engine.heads
    same_grid = (manifest.computed["tp"], manifest.computed["sp"]) == (mesh.tp, mesh.sp)
    if not same_grid or sources != list(range(len(manifest.sequences))):
        return saved
    own = (heads.first_kv_head, heads.first_kv_head + heads.kv_heads)
    for file in manifest.files:
        if file.granules is None or file.kv_heads != own:
            continue
        piece = Piece(range(*file.layers), file.sequence, range(*file.granules))
        if file.name == piece.name(mesh.world.rank):
            with contextlib.suppress(OSError):  # it has gone since; then it is written again
                saved.add(piece, file, folder / file.name)
    return saved


def identity_of(path: Path) -> tuple[int, int, int]:
    """What tells a file from another one, or from itself after a change."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
