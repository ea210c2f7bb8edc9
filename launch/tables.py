"""What `evaluate` shows: one table on stdout, the window policy below it, and a plot."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.evaluate.sensitivity import Raise

Row = dict[str, Any]


def show_ppl(rows: list[Row], positions: tuple[int, int], window: CacheConfig, notes: Iterable[str] = ()) -> None:
    """One line per text and codec; notes: further lines below the table."""
    first, last = positions
    table = Table(title=f"teacher-forced, positions {first}:{last}")
    names = ("text", "codec", "perplexity", "to exact", "KL", "top-1", "stored bits", "read bits", "ratio", "refined", "kept")
    for heading in names:
        table.add_column(heading, justify="left" if heading in ("text", "codec") else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before["text"] != row["text"]:
            table.add_section()
        quality = (f"{row['ppl']:.3f}", f"x{row['ppl_ratio']:.4f}", f"{row['kl']:.4f}", f"{row['top1']:.1%}")
        bits = (f"{row['stored_bits']:.3f}", f"{row['read_bits']:.3f}", f"{row['ratio']:.2f}", f"{row['refined_share']:.1%}")
        kept = f"{row.get('kept_share', 1.0):.0%}"
        table.add_row(row["text"], row["codec"], *quality, *bits, kept)
    show(table, window_policy(window, first), *notes)


def window_policy(window: CacheConfig, first: int = 0) -> str:
    page, recent, sink = window.page_tokens, window.recent_tokens, window.sink_rounded
    said = f"exact: the first {sink} tokens and the last {recent} to {recent + page - 1}; sealed in pages of {page}: all others"
    sealing = sink + recent + page
    return said if first == 0 or first >= sealing else f"{said} (none is for positions before {sealing})"


def show_retrieval(rows: list[Row], depths: list[float], window: CacheConfig) -> None:
    """One line per codec, context and kind of question; one column per depth."""
    table = Table(title="share of right answers by depth (0 = start of the context)")
    for heading in ("codec", "context", "task", *(f"{depth:g}" for depth in depths), "mean"):
        table.add_column(heading, justify="left" if heading in ("codec", "task") else "right")
    lines: dict[tuple, dict[float, float]] = {}
    for row in rows:
        lines.setdefault((row["codec"], row["context"], row["task"]), {})[row["depth"]] = row["score"]
    for (codec, context, task), scores in lines.items():
        shown = (f"{scores[depth]:.2f}" for depth in depths)
        table.add_row(codec, str(context), task, *shown, f"{sum(scores.values()) / len(scores):.2f}")
    show(table, window_policy(window))


def show_drift(rows: list[Row], what: str, cache: CacheConfig) -> None:
    """One line per layer; heads that are off are named with their cause."""
    table = Table(title=f"drift of {what}")
    for heading in ("layer", "bias", "noise", "predicted", "KL", "worst KL", "output error", "refined mass", "noisy", "off"):
        table.add_column(heading, justify="left" if heading == "off" else "right")
    for layer in dict.fromkeys(row["layer"] for row in rows):
        heads = [row for row in rows if row["layer"] == layer]
        bias = max((row["bias"] for row in heads), key=abs)
        numbers = [mean(heads, name) for name in ("noise", "predicted_noise", "kl")]
        worst = max(heads, key=lambda row: row["kl"])
        rest = [mean(heads, name) for name in ("output_error", "refined_mass")]
        noisy = sum(row["verdict"] == "noisy" for row in heads)
        causes: dict[str, list[int]] = {}
        for row in heads:
            if row["verdict"] == "off":
                causes.setdefault(row["cause"], []).append(row["head"])
        off = "; ".join(f"head {', '.join(map(str, numbers))}: {cause}" for cause, numbers in causes.items())
        shown = (f"{bias:+.3f}", *map(three, numbers), f"{worst['kl']:.3f} (head {worst['head']})", *map(three, rest))
        table.add_row(str(layer), *shown, str(noisy), off)
    show(table, window_policy(cache), *drift_summary(rows))


def drift_summary(rows: list[Row]) -> list[str]:
    """Verdicts, and the mass that refinement covers in the mean and in the worst head."""
    verdicts = Counter(row["verdict"] for row in rows)
    said = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("ok", "noisy", "off"))
    lines = [f"heads: {said} (noisy: as its codec predicts; off: a fault); nats, means over a layer's heads, its largest bias"]
    if rows[0]["refined_mass"] is not None:
        worst = min(rows, key=lambda row: row["refined_mass"])
        where = f"{worst['refined_mass']:.3f} in the worst head (layer {worst['layer']}, head {worst['head']})"
        lines.append(f"refined tokens carry {mean(rows, 'refined_mass'):.3f} of the sealed mass, {where}")
    return lines


def show_sensitivity(gains: dict[Raise, float], chosen: list[Raise], whole: list[Row]) -> None:
    """Raises by what each alone takes off the KL; `whole`: the cache before, and with the schedule if there is one."""
    labels = ("before", "with the schedule")
    said = [f"KL {row['kl']:.4f}, {row['stored_bits']:.3f} bits stored" for row in whole]
    table = Table(title="what more bits for one layer bring")
    for heading in ("layer", "raised", "to bits", "KL drop", "in the schedule"):
        table.add_column(heading, justify="right")
    side = {"K": "keys", "V": "values", "KV": "both"}
    for step, gain in sorted(gains.items(), key=lambda item: -item[1]):
        table.add_row(str(step.layer), side[step.side], str(step.bits), f"{gain:+.5f}", "yes" if step in chosen else "")
    show(table, "; ".join(f"{label}: {numbers}" for label, numbers in zip(labels, said, strict=False)))


def mean(rows: list[Row], name: str) -> float | None:
    """None where the codec has no such number."""
    return None if rows[0][name] is None else sum(row[name] for row in rows) / len(rows)


def three(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def show(table: Table, *notes: str) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    console.print(table, *notes, sep="\n")


def plot_ppl(rows: list[Row], path: Path) -> None:
    """Perplexity relative to exact against bits read, a colour per text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="bits read per key or value element", ylabel="perplexity relative to exact")
    for text in dict.fromkeys(row["text"] for row in rows):
        cells = [row for row in rows if row["text"] == text and row["codec"] != "exact"]
        axes.plot([row["read_bits"] for row in cells], [row["ppl_ratio"] for row in cells], "o", label=text)
    lowest: dict[str, Row] = {}
    for row in rows:
        if row["codec"] != "exact" and row["ppl_ratio"] <= lowest.get(row["codec"], row)["ppl_ratio"]:
            lowest[row["codec"]] = row
    for codec, row in lowest.items():
        place = row["read_bits"], row["ppl_ratio"]
        axes.annotate(codec, place, (0, -12), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
