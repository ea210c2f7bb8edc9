"""Which layers are worth more bits: raise one at a time, rank them by what it brings, and spend a byte budget on the best.

What raises bring is measured one by one on top of the common cache and taken to add up, which holds as long as each is small;
the schedule that comes out is measured as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import yaml

from bitkv_dist.cache_config import STORED_BITS, CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.rules import listed
from bitkv_dist.schedule import LayerConfig, layer_ranges


@dataclass(frozen=True, order=True)
class Raise:
    """More bits for one layer: `bits` for its keys (side K), its values (V) or both (KV)."""

    layer: int
    side: str
    bits: int

    def __str__(self) -> str:
        what = {"K": "keys", "V": "values", "KV": "keys and values"}[self.side]
        return f"layer {self.layer}, {what} at {self.bits} bits"


def raises(config: CacheConfig, layers: int, sides: Iterable[str], bits: Iterable[int] | None) -> list[Raise]:
    """All raises to try on top of `config`; bits None = the next depth that the codec stores. ValueError when there is none."""
    if config.layers:
        named = layer_ranges(layer for entry in config.layers for layer in entry.layers)
        raise ValueError(f"cache.layers {named}: a schedule is what this task makes; give a config without one")
    return [Raise(layer, side, depth) for layer in range(layers) for side in sides for depth in depths(config, side, bits)]


def depths(config: CacheConfig, side: str, bits: Iterable[int] | None) -> list[int]:
    base = {"K": config.key_bits, "V": config.value_bits, "KV": max(config.key_bits, config.value_bits)}[side]
    deeper = [depth for depth in STORED_BITS[config.codec] if depth > base]
    if not deeper:
        raise ValueError(f"codec {config.codec} at {base} bits: there is nothing to raise; give a config with fewer bits")
    for depth in bits or ():
        if depth not in deeper:
            raise ValueError(f"raise-bits {depth}: must be above {base} and one of {listed(deeper)}; give one of these")
    return deeper[:1] if bits is None else sorted(bits)


def raised(config: CacheConfig, chosen: Iterable[Raise]) -> CacheConfig:
    """`config` with a schedule; of several raises of one side the deepest counts."""
    bits: dict[int, dict[str, int]] = {}
    for step in chosen:
        for side, name in (("K", "key_bits"), ("V", "value_bits")):
            if side in step.side:
                layer = bits.setdefault(step.layer, {})
                layer[name] = max(step.bits, layer.get(name, 0))
    alike: dict[tuple, list[int]] = {}
    for layer in sorted(bits):
        alike.setdefault(tuple(sorted(bits[layer].items())), []).append(layer)
    return replace(config, layers=tuple(LayerConfig(tuple(layers), **dict(depths)) for depths, layers in alike.items()))


def stored_bits(config: CacheConfig, shape: HeadShape) -> float:
    """Bits per key or value element of a sealed page, all metadata counted, mean over layers."""
    record_bytes = sum(_record_bytes(config.for_layer(layer), shape) for layer in range(shape.layers))
    return record_bytes * 8 / (shape.layers * config.page_tokens * shape.head_dim * 2)


@functools.cache
def _record_bytes(config: CacheConfig, shape: HeadShape) -> int:
    return make_codec(config, shape, 0).record_bytes


def check_budget(config: CacheConfig, shape: HeadShape, budget: float) -> None:
    least = stored_bits(config, shape)
    if budget < least:
        raise ValueError(f"budget-bits {budget:g}: the cache takes {least:g} as it is; give more, or a config that takes less")


def spend(config: CacheConfig, shape: HeadShape, gains: dict[Raise, float], budget: float) -> list[Raise]:
    """Greedy by gain per bit: the raises to take so that `stored_bits` stays within `budget`, best first.

    gains: what each raise alone takes off the KL. A deeper raise of a side counts with what it adds to the one already taken.
    """
    taken: list[Raise] = []
    held: dict[tuple[int, str], float] = {}  # gain so far of a layer's side
    while True:
        now = stored_bits(raised(config, taken), shape)
        offers = []
        for step, gain in gains.items():
            added = gain - held.get((step.layer, step.side), 0.0)
            cost = stored_bits(raised(config, [*taken, step]), shape) - now
            if added > 0 and cost > 0 and now + cost <= budget + 1e-9:
                offers.append((added / cost, step))
        if not offers:
            return taken
        best = max(offers, key=lambda offer: (offer[0], -offer[1].layer))[1]
        held[best.layer, best.side] = gains[best]
        taken.append(best)


def described(config: CacheConfig) -> str:
    """The schedule of `config` in one line."""
    entries = (f"{layer_ranges(entry.layers)}: {entry.overrides}" for entry in config.layers)
    return "; ".join(entries) or "of no raises"


def as_yaml(config: CacheConfig, comments: Iterable[str]) -> str:
    """A preset that `generate --config FILE` reads back as `config`: what differs from the defaults, under a comment."""
    cache = {"codec": config.codec, "key_bits": config.key_bits, "value_bits": config.value_bits} | changed(config)
    if config.refine is not None:
        cache["refine"] = asdict(config.refine)
    if config.layers:
        cache["layers"] = [{"layers": layer_ranges(entry.layers)} | entry.overrides for entry in config.layers]
    body = yaml.safe_dump({"cache": cache}, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in comments) + body


def changed(config: CacheConfig) -> dict[str, Any]:
    """Plain fields whose value is not the default."""
    plain = (entry for entry in fields(config) if entry.name not in ("refine", "layers"))
    return {entry.name: getattr(config, entry.name) for entry in plain if getattr(config, entry.name) != entry.default}
