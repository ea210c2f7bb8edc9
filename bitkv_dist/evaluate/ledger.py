"""Finished cells of an evaluation in a JSON file, written after each, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = 1


class Ledger:
    """Rows {"codec": .., "text": .., ..}, one per cell: a cell is the values of `key` fields.

    settings: what the numbers depend on besides the cell, by name; a file may know other names (further codecs and texts),
    but not other values for these.
    """

    def __init__(self, path: Path | None, key: tuple[str, ...], settings: dict[str, Any]) -> None:
        """path None keeps the rows in memory only. ValueError when the file is not ours or holds results of other settings."""
        self.path, self.key = path, key
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._read(path)
        for name, value in json.loads(json.dumps(settings)).items():
            if self.settings.setdefault(name, value) != value:
                held = f"{name} {json.dumps(self.settings[name])}, not {json.dumps(value)}"
                raise ValueError(f"json {str(path)!r}: holds results of {held}; give another file or the same settings")

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            schema, self.settings, self.rows = found["schema"], found["settings"], found["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            schema = None
        if schema != SCHEMA:
            raise ValueError(f"json {str(path)!r}: is not a file of results of this version; give another file")

    def find(self, *cell: Any) -> dict[str, Any] | None:
        """The row of a cell, if it is finished."""
        return next((row for row in self.rows if tuple(row[name] for name in self.key) == cell), None)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Keep finished rows; the file holds the old or the new ones whole, whenever the process ends."""
        self.rows += rows
        if self.path is None:
            return
        whole = {"schema": SCHEMA, "settings": self.settings, "rows": self.rows}
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
