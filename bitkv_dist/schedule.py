"""Layers that are kept differently from the rest of the cache: the entries of `cache.layers`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from bitkv_dist.rules import between, check_types, refuse, shown


@dataclass(frozen=True)
class LayerConfig:
    """What some layers override; None = as the cache has it."""

    SECTION: ClassVar[str] = "cache.layers"

    layers: tuple[int, ...]  # in YAML also one number, or text such as "0-2" and "0-2, 5"
    key_bits: int | None = None
    value_bits: int | None = None
    scan_bits: int | None = None
    refine_value: float | None = None  # refine.value of these layers

    def __post_init__(self) -> None:
        check_types(self)
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            refuse(self, "layers", "must be different layer numbers from 0 up", 'write "0-2", 5 or [0, 5]')
        if not self.overrides:
            refuse(self, "layers", "these layers differ in nothing", "give key_bits, value_bits, scan_bits or refine_value")
        if self.refine_value is not None:
            between(self, "refine_value", 0, 1)

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that differ, by name."""
        named = {name: getattr(self, name) for name in ("key_bits", "value_bits", "scan_bits", "refine_value")}
        return {name: value for name, value in named.items() if value is not None}


def layer_numbers(given: Any) -> tuple[int, ...]:
    """5, "5", "0-2, 5" or [0, 1, 2, 5] -> (0, 1, 2, 5). ValueError for anything else."""
    if type(given) is int:
        return (given,)
    if isinstance(given, list) and all(type(layer) is int for layer in given):
        return tuple(given)
    if isinstance(given, str):
        numbers: list[int] = []
        for part in given.split(","):
            first, dash, last = (piece.strip() for piece in part.partition("-"))
            if not (first.isdecimal() and (last.isdecimal() if dash else True)):
                break
            numbers += range(int(first), int(last or first) + 1)
        else:
            return tuple(numbers)
    raise ValueError(f'{LayerConfig.SECTION}.layers {shown(given)}: must be layer numbers; write "0-2", 5 or [0, 5]')


def layer_ranges(layers: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5": what `layer_numbers` reads."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
