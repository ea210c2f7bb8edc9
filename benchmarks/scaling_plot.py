"""The picture of benchmarks/scaling.py: what was measured above, what was simulated below, drawn differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PARTS = ("compute", "exchange", "wait")
COLOURS = {"compute": "#33658a", "exchange": "#f6ae2d", "wait": "#b0b0b0"}
KINDS = {"strong": "ranks", "weak": "ranks", "batch": "sequences"}


def draw(found: dict[str, list[dict[str, Any]]], path: Path, simulated: str, measured: str) -> None:
    """Stacked milliseconds of a step: solid bars for real ranks; hatched, pale ones on grey for the planner's model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(KINDS), figsize=(13, 7.5), layout="constrained")
    for column, (kind, unit) in enumerate(KINDS.items()):
        for line, source in enumerate(("measured", "simulated")):
            axis, rows = axes[line][column], shown(found[source], kind)
            bars(axis, rows, source == "simulated", "batch" if kind == "batch" else "ranks")
            axis.set_title(f"{source.upper()}: {kind}, {about(rows, kind)}", fontsize=9)
            split = "; left: sequence split, right: heads too; x: does not fit" if line else ""
            axis.set_xlabel(unit + split, fontsize=8)
            axis.set_ylabel("ms per step", fontsize=8)
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8)
    figure.suptitle(f"Above: measured on {measured}. Below: simulated, {simulated}; nothing of it was run.", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shown(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Of one kind; of the measured batches those on the most ranks."""
    rows = [row for row in rows if kind in row["kinds"]]
    most = max(row["ranks"] for row in rows)
    return rows if kind != "batch" else [row for row in rows if row["ranks"] == most]


def bars(axis, rows: list[dict[str, Any]], model: bool, key: str) -> None:
    places = sorted({row[key] for row in rows})
    layouts = sorted({row.get("layout", "sp") for row in rows})
    width = 0.8 / len(layouts)
    for offset, layout in enumerate(layouts):
        mine = [row for row in rows if row.get("layout", "sp") == layout]
        where = [places.index(row[key]) + (offset - (len(layouts) - 1) / 2) * width for row in mine]
        floor = [0.0] * len(mine)
        for part in PARTS:
            heights = [row["ms"][part] or 0.0 for row in mine]
            if not any(heights):
                continue
            style = {"edgecolor": "black"} | ({"hatch": "///", "alpha": 0.45, "linestyle": "--"} if model else {})
            label = f"{part}{' (simulated)' if model else ''}" if offset == 0 else None
            axis.bar(where, heights, width * 0.95, bottom=floor, color=COLOURS[part], linewidth=0.6, label=label, **style)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        for place, top, row in zip(where, floor, mine, strict=True):
            if not row.get("fits", True):
                axis.text(place, top, "x", ha="center", va="bottom")
    axis.set_xticks(range(len(places)), [str(place) for place in places])
    if model:
        axis.set_facecolor("#f0f0f0")


def about(rows: list[dict[str, Any]], kind: str) -> str:
    """What is kept the same in a panel."""
    first = rows[0]
    if kind == "weak":
        return f"{first['tokens'] // first['ranks']:,} tokens per rank"
    return f"{first['tokens']:,} tokens" + (f", {first['ranks']} ranks" if kind == "batch" else "")
