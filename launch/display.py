"""What a person sees: text on stdout as it comes, and on stderr the start-up lines, progress bars and the summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bitkv_dist.calibrated import Origin
from bitkv_dist.parallel.roll import Entry
from bitkv_dist.text import TextStream

MIB = 1 << 20


class Bar:
    """A progress bar on a terminal's stderr, and nothing elsewhere. Call it with (what, done, total); it goes when done."""

    def __init__(self, console: Console, unit: str = "") -> None:
        self._console, self._unit = console, unit
        self._progress: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._console.is_terminal or self._console.quiet:
            return
        if self._progress is None:
            speed = TextColumn(f"{{task.fields[speed_shown]:,.0f}} {self._unit}/s" if self._unit else "")
            columns = (TextColumn("{task.description}"), BarColumn(), speed, TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(what, total=total, speed_shown=0.0)
            self._progress.start()
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=done, speed_shown=task.speed or 0.0)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        """Take the bar away and give the terminal its cursor back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Texts:
    """The texts of a batch while their tokens arrive.

    Live, the first text is written as it comes. The others, whose tokens arrive at the same time, are written whole at the
    end, so that no two texts mix. With several texts each has a header line.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[list[int]], stop: Sequence[str], *, live: bool, visible: bool) -> None:
        self._streams = [TextStream(tokenizer, stop, context=prompt) for prompt in prompts]
        self._live, self._visible = live and visible, visible
        if self._live:
            self._header(0)

    def push(self, sequence: int, token_id: int) -> bool:
        """Take a token of a sequence; True when its text has come to a stop string."""
        stream = self._streams[sequence]
        text = stream.push(token_id)
        if self._live and sequence == 0:
            self._write(text)
        return stream.stopped

    def finish(self) -> list[str]:
        """Write what is left to write and return all texts."""
        for index, stream in enumerate(self._streams):
            rest = stream.finish()
            if self._visible:
                if not (self._live and index == 0):
                    self._header(index)
                    rest = stream.text
                self._write(rest + "\n")
        return [stream.text for stream in self._streams]

    def _header(self, index: int) -> None:
        if len(self._streams) > 1:
            self._write(f"--- {index + 1} of {len(self._streams)} ---\n")

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def start_up_line(entry: Entry) -> str:
    """What one rank runs on."""
    threads = f"{entry.threads} thread" + ("s" if entry.threads != 1 else "")
    cores = f" on cores {entry.cores}" if entry.cores else ""
    return f"bitkv: {entry.name} on {entry.device}, backend {entry.backend}, {threads}{cores}"


def summary(report: dict[str, Any]) -> list[str]:
    """The report of a run, for a person."""
    kv, timing, kernel = report["kv"], report["timing"], report["kernel"]
    prefill, decode = _shown(timing["prefill_tokens_per_s"], " tokens/s"), _shown(timing["decode_tokens_per_s"], " tokens/s")
    tokens = f"{kv['sealed_tokens']:,} sealed and {kv['exact_tokens']:,} exact tokens"
    stored, read = _shown(kv["stored_bits_per_element"]), _shown(kv["read_bits_per_element"])
    rows = (
        ("prefill", f"{report['prefill']}, {prefill}, first token after {timing['first_token_s']:.2f} s"),
        ("decode", decode),
        ("cache", f"{kv['bytes_total'] / MIB:,.2f} MiB for {tokens}; bf16 takes {kv['bf16_bytes'] / MIB:,.2f} MiB"),
        *calibration_rows(kv),
        *eviction_rows(kv),
        ("ratio to bf16", f"{_shown(kv['ratio'], 'x')} sealed, {_shown(kv['ratio_total'], 'x')} in total"),
        ("bits per element", f"{stored} stored, {read} read ({kv['codec']})"),
        ("kernel", f"{kernel['backend']} ({kernel['reason']})"),
        *exchange_rows(report),
    )
    return [f"{name:<17} {value}" for name, value in rows]


def calibration_rows(kv: dict[str, Any]) -> list[tuple[str, str]]:
    """What the codebooks were fitted to."""
    found = kv["calibration"]
    return [] if found is None else [("codebooks", f"{Origin(**found).described()}, digest {found['digest']}")]


def eviction_rows(kv: dict[str, Any]) -> list[tuple[str, str]]:
    """What a bounded cache still holds."""
    found = kv["eviction"]
    if found["rule"] == "none":
        return []
    share = f"{found['kept_share']:.1%} of all tokens kept, {found['evicted_tokens']:,} evicted"
    return [("eviction", f"{found['rule']}, keep {found['keep']:g}: {share}")]


def exchange_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What several ranks exchange, and what holds for their answers."""
    world, exchange, promise = report["world"], report["exchange"], report["promise"]
    if world["size"] == 1:
        return []
    received = exchange["bytes_per_layer"]
    kind = exchange["kind"] if world["sp"] > 1 else "none, one sequence rank"
    shown = f", {received:,.0f} bytes received per layer and step" if received else ""
    copies = f"; each KV head is kept by {report['kv']['copies']} TP ranks" if report["kv"]["copies"] > 1 else ""
    return [
        ("exchange", f"{kind}{shown}; layout {exchange['layout']}{copies}"),
        ("one answer", f"at another sp {promise['other_sp']}; at another tp or layout {promise['other_tp_or_layout']}"),
    ]


def _shown(number: float | None, unit: str = "") -> str:
    """None stands for what does not exist: a speed when one token was generated, bits read when no step was taken."""
    return "none" if number is None else f"{number:,.2f}{unit}"
