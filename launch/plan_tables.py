"""What `plan` shows: the grids, the chosen grid with other caches, what follows from them in words, and a plot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bitkv_dist.plan.grids import Plan, grid
from bitkv_dist.plan.latency import step_ms

GB = 10**9
PLOTTED_FROM, PLOTTED_TO = 1 << 12, 1 << 24  # tokens
ESTIMATES = (
    "Bytes are what the run allocates; only the workspace within the prefill peak is estimated. Times are estimates, for "
    "kernels that stream at the rates of benchmarks/plan_validation.py and launches that are captured; plain torch is slower."
)


def show_plan(found: Plan, config: str, warnings: list[str]) -> None:
    """Tables and sentences on stdout."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False, markup=False)
    console.print(grids_table(found, config), others_table(found, config), *sentences(found), sep="\n")
    for warning in warnings:
        console.print(f"warning: {warning}")


def grids_table(found: Plan, config: str) -> Table:
    """One line per grid; * marks the best."""
    job, machine = found.job, found.machine
    gpu = f"{machine.gpus} x {machine.gpu.name} ({machine.gpu.memory_gb:g} GB, {machine.gpu.bandwidth_gb_s:,g} GB/s)"
    layout = "" if job.layout == "replicated" else f", layout {job.layout}"
    table = Table(title=f"{job.shape.name}, {job.batch} x {job.context:,} tokens, {config}{layout}, {gpu}")
    memory = ("weights", "cache", "slack", "exact", "prefill", "total GB")
    times = ("weights", "cache", "exchange", "fixed", "ms/token")
    for heading in ("tp x sp", *memory, "free GB", "most tokens", *times, "SP pays above"):
        table.add_column(heading, justify="right")
    for row in found.grids:
        mark = "* " if row == found.best else ""
        parts = row.bytes
        sizes = (parts.weights, parts.cache, parts.slack, parts.exact, parts.prefill_peak, parts.total, row.headroom_bytes)
        spent = (row.ms.weights, row.ms.cache, row.ms.collectives, row.ms.fixed, row.ms.total)
        shown = (*map(gigabytes, sizes), f"{row.max_context:,}", *map(milliseconds, spent))
        table.add_row(f"{mark}{row.tp} x {row.sp}", *shown, tokens(row.sharding_pays_above_tokens))
    return table


def others_table(found: Plan, config: str) -> Table:
    """The chosen grid with this cache, and with caches that keep every element in 16 or 8 bits."""
    chosen = found.chosen
    table = Table(title=f"tp {chosen.tp} x sp {chosen.sp} with other caches")
    for heading in ("cache", "cache GB", "total GB", "fits", "most tokens", "cache ms", "ms/token"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for name, row in {config: chosen, **found.baselines}.items():
        fits = "yes" if row.fits else "no"
        sizes = gigabytes(row.bytes.cache), gigabytes(row.bytes.total), fits, f"{row.max_context:,}"
        table.add_row(name, *sizes, milliseconds(row.ms.cache), milliseconds(row.ms.total))
    return table


def sentences(found: Plan) -> list[str]:
    """Whether it fits and by how much, which grid is best, and from where more sequence ranks help."""
    chosen, best = found.chosen, found.best
    return [
        f"tp {chosen.tp} x sp {chosen.sp} {verdict(found)}",
        f"Best grid: tp {best.tp} x sp {best.sp}" + ("." if best.fits else ": none fits, it comes nearest."),
        sharding(found),
        ESTIMATES,
    ]


def verdict(found: Plan) -> str:
    chosen = found.chosen
    room = f"{gigabytes(abs(chosen.headroom_bytes))} GB per rank"
    most = f"the most that fits is {chosen.max_context:,} tokens per sequence"
    if chosen.fits:
        return f"fits, {room} to spare, with prefill {chosen.prefill}; {most}."
    remedy = ""
    if found.job.prefill == "exact":
        packed = grid(replace(found.job, prefill="packed"), found.machine, chosen.tp, chosen.sp)
        remedy = " It fits with --prefill packed." if packed.fits else ""
    return f"does not fit, {room} are missing, with prefill {chosen.prefill}; {most}.{remedy}"


def sharding(found: Plan) -> str:
    chosen, job = found.chosen, found.job
    ranks, above = max(2, chosen.sp), chosen.sharding_pays_above_tokens
    span = max(job.context, job.shape.positions)
    what = f"Splitting the sequence over {ranks} ranks at tp {chosen.tp}"
    if above is None:
        return f"{what} never saves time: use more ranks for capacity only."
    if above > span:
        return f"{what} saves time above {above:,} tokens: in the whole range up to {span:,} more ranks help only capacity."
    return f"{what} saves time above {above:,} tokens; below, more ranks help only capacity."


def plot(found: Plan, path: Path) -> None:
    """Estimated milliseconds per token over the context: each grid, and the chosen one with other caches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="context, tokens", ylabel="ms per token (estimate)", xscale="log", yscale="log")
    lines = {f"tp {row.tp} x sp {row.sp}": (found.job, row) for row in found.grids}
    for name, row in found.baselines.items():
        lines[f"tp {row.tp} x sp {row.sp}, {name} cache"] = (found.others[name], row)
    contexts = [PLOTTED_FROM << step for step in range((PLOTTED_TO // PLOTTED_FROM).bit_length())]
    for name, (job, row) in lines.items():
        times = [step_ms(replace(job, context=context), found.machine, row.tp, row.sp).total for context in contexts]
        (line,) = axes.plot(contexts, times, ":", linewidth=1)
        fitting = [(context, time) for context, time in zip(contexts, times, strict=True) if context <= row.max_context]
        style = "--" if row in found.baselines.values() else "-"
        axes.plot(*zip(*fitting, strict=True) if fitting else ([], []), style, color=line.get_color(), label=name)
    axes.axvline(found.job.context, color="grey", linewidth=0.8)
    title = f"{found.job.shape.name}, {found.machine.gpus} x {found.machine.gpu.name}; dotted: does not fit"
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def gigabytes(size: int) -> str:
    return f"{size / GB:,.2f}"


def milliseconds(time: float) -> str:
    return f"{time:.3f}"


def tokens(count: int | None) -> str:
    return "never" if count is None else f"{count:,}"
