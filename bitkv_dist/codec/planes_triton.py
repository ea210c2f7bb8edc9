"""The planes codec on a GPU: the same records, encoded and attended to by the Triton kernels.

A decode step finds its pages by tables on the device (interface.TableCodec), so that nothing of it depends on a length that the
host knows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.planes_cpu import PlanesCodecCpu, unserved_rule
from bitkv_dist.kernels import triton
from bitkv_dist.partial import Partial

MOST_PLANES = 4  # scanned, and below the scanned ones
MOST_HEADS = 16  # query heads of a KV head: the columns of a tensor-core tile


class PlanesCodecTriton(PlanesCodecCpu):
    """What the attention kernels do not know is left to the reference, by name; encoding knows everything."""

    fused = False

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.unserved = unserved_rule(config) or unserved_shape(config, heads)
        if config.eviction == "heavy":
            self.unserved = "eviction: heavy"
        self.takes_tables = self.unserved is None
        if self.takes_tables:
            self.native_layout = triton.Layout(**plain(self.native_layout))
            self.refinement = triton.Refinement(**plain(self.refinement))

    def valid_pages(self, page_valid: torch.Tensor) -> torch.Tensor:
        """Counts stay on the device: nobody waits for them here."""
        return page_valid.sum()

    def table(self, base: torch.Tensor, offsets: torch.Tensor, bounds: torch.Tensor) -> triton.Table:
        return triton.Table(base, offsets, bounds)

    def bounds(self, spans: torch.Tensor, lanes: int) -> torch.Tensor:
        return triton.lane_bounds(spans, lanes, GRANULE_TOKENS // self.config.page_tokens)

    def attend_table(self, query: triton.Query, table: triton.Table, nodes: int) -> tuple[list[Partial], torch.Tensor]:
        *lanes, refined = triton.attend_lanes(self.native_layout, query, table, self.refinement)
        return [Partial(*triton.halve(*sequence, nodes)) for sequence in zip(*lanes, strict=True)], refined

    def conclude_table(self, root: Partial, exact: Partial) -> torch.Tensor:
        return triton.conclude(root, exact, self.signs["V"])


def plain(fields: ctypes.Structure) -> dict[str, Any]:
    """The fields as Python numbers and tuples of them."""
    found = {name: getattr(fields, name) for name, *_ in fields._fields_}
    return {name: tuple(value) if isinstance(value, ctypes.Array) else value for name, value in found.items()}


def unserved_shape(config: CacheConfig, heads: HeadShape) -> str | None:
    """The depth or head count that the attention kernels do not know, or None."""
    for side, bits, scan_bits in (
        ("key", config.key_bits, config.key_scan_bits),
        ("value", config.value_bits, config.value_scan_bits),
    ):
        if scan_bits > MOST_PLANES:
            return f"{scan_bits} scanned {side} bits"
        if bits - scan_bits > MOST_PLANES:
            return f"{side}_bits {bits} with {scan_bits} scanned"
    if heads.group is not None and heads.group > MOST_HEADS:
        return f"{heads.group} query heads to a KV head"
    return None
