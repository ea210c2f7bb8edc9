"""Attention to sealed pages by the Triton kernels: host side, twin of kernels/cpu `attend`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bitkv_dist.kernels.triton.decode import decode
from bitkv_dist.kernels.triton.layout import KEYS, VALUES, Layout
from bitkv_dist.kernels.triton.query import Query
from bitkv_dist.kernels.triton.tables import Config, config


class Table(NamedTuple):
    """Where the granules of B sequences lie: the device holds all that grows, so one launch (or captured graph) serves any length.

    base: uint8 tensor whose address the offsets count from; offsets int64 [B, slots]: each granule's records [pages, HK,
    record_bytes], multiples of 16, in token order. Lane i of `lanes` takes slots i, i + lanes, ..; bounds int32 [B, lanes, 2]:
    the pages first .. end - 1 that it attends to, counted in its granules.
    """

    base: torch.Tensor
    offsets: torch.Tensor
    bounds: torch.Tensor

    @property
    def lanes(self) -> int:
        return self.bounds.shape[1]


def lane_bounds(span: torch.Tensor, lanes: int, pages: int) -> torch.Tensor:
    """int32 [B, lanes, 2] for `Table`: span int64 [B, 2] on the device = first and last + 1 of the pages to attend to, counted in
    the slots of a sequence. No host synchronisation; once per step for all layers."""
    slot, part = (span // pages).unsqueeze(1), (span % pages).unsqueeze(1)  # [B, 1, 2]
    lane = torch.arange(lanes, device=span.device)[None, :, None]
    whole = (slot - lane + lanes - 1).clamp(min=0) // lanes
    return (whole * pages + torch.where((slot >= lane) & ((slot - lane) % lanes == 0), part, 0)).int()


def group_size(query: Query, chosen: Config) -> int:
    """Heads of a group as the kernels pad them: a power of two of which a tile's columns hold at most eight."""
    heads = query.codes.shape[-2]
    return max(1 << (heads - 1).bit_length(), chosen.columns // 8)


def attend_lanes(layout: Layout, query: Query, table: Table, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of the lanes without refinement, in the rotated space: m, l fp32 [B, lanes, HK, Q, G], o [.., D].

    query: tensors [B, HK, Q, G, ..]; noise = 0.5 ln2 r^2 / (D a^2) of the scanned code.
    """
    return launch_decode(layout, query, table, noise, None)


def launch_decode(
    layout: Layout, query: Query, table: Table, noise: float, dots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = config(query.codes.device)
    batch, heads, queries, group, dim = query.codes.shape
    shape = (batch, table.lanes, heads, queries, group)
    m, l, o = query.scale.new_empty(shape), query.scale.new_empty(shape), query.scale.new_empty(*shape, dim)
    padded = group_size(query, chosen)
    decode[(table.lanes, heads, batch * queries)](
        table.base, table.offsets, table.bounds, query.codes if dots is None else dots, *query, m, l, o,
        table.lanes, table.offsets.shape[1], queries, heads, group, noise,
        D=dim, P=layout.tokens, RECORD=layout.record_bytes, KEY_BITS=layout.scan_bits[KEYS], VALUE_BITS=layout.scan_bits[VALUES],
        KEY_PLANES=layout.planes[KEYS], VALUE_PLANES=layout.planes[VALUES], KEY_SCAN=layout.scan[KEYS], VALUE_SCAN=layout.scan[VALUES],
        KEY_CENTROID=layout.centroid[KEYS], VALUE_CENTROID=layout.centroid[VALUES],
        GROUP=padded, COLS=max(chosen.columns, padded), SCANNED=dots is not None, ASSEMBLY=chosen.assembly,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return m, l, o


def granule_table(records: torch.Tensor, page_valid: torch.Tensor) -> Table:
    """Every granule of records uint8 [n, pages, HK, record_bytes] a lane of its own. page_valid bool [n, pages]: valid pages of a
    granule follow one another, as those between the sink and the end of a sequence do."""
    offsets = torch.arange(len(records), device=records.device) * records.stride(0)
    first = page_valid.int().argmax(1)
    return Table(records, offsets[None], torch.stack((first, first + page_valid.sum(1)), dim=1).int()[None])


def attend(
    layout: Layout, query: Query, records: torch.Tensor, page_valid: torch.Tensor, noise: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l [n, HK, Q, G], o [n, HK, Q, G, D] of one sequence's queries over n granules: records uint8 [n, pages, HK, record_bytes], the
    last three dims contiguous, page_valid bool [n, pages]."""
    if len(records) == 0:
        shape = (0, *query.scale.shape)
        return query.scale.new_empty(shape), query.scale.new_empty(shape), query.scale.new_empty(*shape, layout.dim)
    table = granule_table(records, page_valid)
    m, l, o = attend_lanes(layout, Query(*(part[None] for part in query)), table, noise)
    return m[0], l[0], o[0]
