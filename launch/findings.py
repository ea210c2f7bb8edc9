"""The tables of `diagnose`, for a person."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

GIB = 1 << 30
SHOWN_ROWS = 20


def show(report: dict) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    _show_ranks(console, report)
    rotation = report["rotation"]
    _show_mismatches(console, "rotation", rotation["mismatches"], f"{rotation['layers']} layers, digest {rotation['digest']}")
    if cache := report.get("cache"):
        _show_mismatches(console, "cache", cache["mismatches"], f"{cache['pages']} sealed pages, digest {cache['digest']}")
    if network := report.get("network"):
        _show_network(console, network)
    if run := report.get("dry_run"):
        odd = ", ".join(str(row["rank"]) for row in run["mismatches"])
        verdict = f"[red]others on rank {odd}[/]" if odd else "the same everywhere"
        times = f"{run['prefill_ms']:.0f} ms before the first, {run['step_ms']:.1f} ms each"
        console.print(f"dry run: {len(run['token_ids'])} tokens, {verdict}; {times}")
    for warning in report["warnings"]:
        console.print(f"[yellow]warning: {warning}")


def _show_ranks(console: Console, report: dict) -> None:
    world, rotation = report["world"], report["rotation"]
    grid = f"tp {world['tp']} x sp {world['sp']}, layout {world['layout']}"
    table = Table(title=f"{world['size']} ranks, {grid}, {world['launcher']}, {world['backend']}")
    for heading in ("rank", "sp", "tp", "host", "device", "threads", "GiB free", "clock ms", "config", "rotation"):
        table.add_column(heading)
    odd_ranks = {mismatch["rank"] for mismatch in rotation["mismatches"]}
    for row in world["ranks"]:
        verdict = "[red]differs" if row["rank"] in odd_ranks else "agrees"
        place = [str(row[key]) for key in ("rank", "sp_rank", "tp_rank", "host", "device", "threads")]
        free = "?" if row["available_bytes"] is None else f"{row['available_bytes'] / GIB:,.1f}"
        table.add_row(*place, free, f"{row['clock_skew_ms']:+.1f}", row["config"][:8], verdict)
    console.print(table)
    versions = world["ranks"][0]["versions"]
    console.print("versions of rank 0: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if report["versions"]["mismatches"]:
        _show_mismatches(console, "versions", report["versions"]["mismatches"], "")


def _show_network(console: Console, network: dict) -> None:
    pairs = network["pairs"]
    if not pairs:
        return
    shown = f"the slowest {SHOWN_ROWS} of {len(pairs)}" if len(pairs) > SHOWN_ROWS else "the slowest first"
    console.print(f"links: microseconds one way for the {network['exchange_bytes']:,} bytes of a layer's exchange; {shown}")
    table = Table()
    for heading in ("ranks", "latency us", "GB/s"):
        table.add_column(heading)
    for row in sorted(pairs, key=lambda row: -row["latency_us"])[:SHOWN_ROWS]:
        table.add_row(f"{row['a']} - {row['b']}", f"{row['latency_us']:,.0f}", f"{row['gb_s']:,.2f}")
    console.print(table)
    reduced = "" if network["all_reduce_us"] is None else f", all-reduce {network['all_reduce_us']:,.0f} us"
    exchange = f"exchange of a layer ({network['exchange']}) {network['exchange_us']:,.0f} us"
    collectives = f"{exchange}, token broadcast {network['broadcast_us']:,.0f} us"
    console.print(f"network: {collectives}{reduced}; {network['step_ms']:,.2f} ms of each decode step")


def _show_mismatches(console: Console, title: str, mismatches: list[dict], agreed: str) -> None:
    if not mismatches:
        console.print(f"{title}: all ranks agree ({agreed})")
        return
    table = Table(title=f"{title}: {len(mismatches)} mismatches")
    for heading in mismatches[0]:
        table.add_column(heading)
    for mismatch in mismatches[:SHOWN_ROWS]:
        table.add_row(*map(str, mismatch.values()))
    console.print(table)
    if len(mismatches) > SHOWN_ROWS:
        console.print(f"and {len(mismatches) - SHOWN_ROWS} more; --json FILE has them all")
