"""The checks that every configuration field goes through, and the wording of their one-line errors."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

_KIND_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    tuple[str, ...]: "a list of texts",
    tuple[int, ...]: "a list of whole numbers",
}


def check_types(config: Any) -> None:
    """Refuse a field whose value is not of its annotated type: no bool for an int, no 3.5 for an int, no "4" for either."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(
                _KIND_NAMES.get(kind, "a list of mappings" if get_origin(kind) else "a mapping of fields") for kind in kinds
            )
            refuse(config, field.name, f"must be {wanted}", f"the default is {field.default!r}")
        if float in kinds and value is not None:
            resolve(config, field.name, float(value))  # 1 and 1.0 are the same setting, and digest alike


def _is_a(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    return isinstance(value, kind)


def one_of(config: Any, name: str, allowed: Iterable[Any], rule: str = "must be one of ") -> None:
    """Refuse a field whose value is not among `allowed`; `rule` introduces the list of them."""
    value = getattr(config, name)
    if value not in allowed:
        if isinstance(value, str):
            close = difflib.get_close_matches(value, list(allowed), n=1)
            suggestion = f"did you mean {close[0]}?" if close else "take one of these"
        else:
            suggestion = f"nearest is {_nearest(value, allowed)}"
        refuse(config, name, f"{rule}{listed(allowed)}", suggestion)


def between(config: Any, name: str, low: int, high: int | None) -> None:
    """Refuse a field below `low` or above `high` (None = no upper limit)."""
    value = getattr(config, name)
    if value < low or (high is not None and value > high):
        rule = f"must be at least {low}" if high is None else f"must be between {low} and {high}"
        refuse(config, name, rule, f"nearest is {low if value < low else high}")


def refuse(config: Any, name: str, rule: str, remedy: str) -> NoReturn:
    """Raise the one-line error of field `name`: section, field, value, rule, remedy."""
    raise ValueError(f"{config.SECTION}.{name} {shown(getattr(config, name))}: {rule}; {remedy}")


def resolve(config: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass while `__post_init__` makes it."""
    object.__setattr__(config, name, value)


def near_miss(word: Any, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the known one it resembles, or all of them."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {listed(known)}"


def _nearest(value: float, allowed: Iterable[float]) -> float:
    return min(allowed, key=lambda option: abs(option - value))


def listed(options: Iterable[Any]) -> str:
    """Options in one line."""
    return ", ".join(str(option) for option in options)


def shown(value: Any) -> str:
    """A value as an error message shows it: its repr, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
