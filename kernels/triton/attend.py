"""Attention to sealed pages by the Triton kernels: host side, twin of kernels/cpu `attend`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from bitkv_dist.kernels.triton.decode import decode
from bitkv_dist.kernels.triton.layout import GRANULE_TOKENS, KEYS, VALUES, Layout
from bitkv_dist.kernels.triton.merge import lanes
from bitkv_dist.kernels.triton.query import Query
from bitkv_dist.kernels.triton.refine import refine as refine_kernel
from bitkv_dist.kernels.triton.scan import scan as scan_kernel
from bitkv_dist.kernels.triton.select import select as select_kernel
from bitkv_dist.kernels.triton.tables import Config, config


class Table(NamedTuple):
    """Where the granules of B sequences lie: the device holds all that grows, so one launch (or captured graph) serves any
    length.

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


@dataclass(frozen=True)
class Refinement:
    """How tokens are chosen for refinement (one list for a `group`, or one per head), and the noise factors 0.5 ln2 r^2 / (D
    a^2) of the scanned and the full key code. Twin of kernels/cpu `Refinement`."""

    enabled: bool
    group: bool
    min_tokens: int
    share: float
    scan_noise: float
    full_noise: float


def lane_bounds(span: torch.Tensor, lanes: int, pages: int) -> torch.Tensor:
    """int32 [B, lanes, 2] for `Table`: span int64 [B, 2] on the device = first and last + 1 of the pages to attend to, counted
    in the slots of a sequence. No host synchronisation; once per step for all layers."""
    slot, part = (span // pages).unsqueeze(1), (span % pages).unsqueeze(1)  # [B, 1, 2]
    lane = torch.arange(lanes, device=span.device)[None, :, None]
    whole = (slot - lane + lanes - 1).clamp(min=0) // lanes
    return (whole * pages + torch.where((slot >= lane) & ((slot - lane) % lanes == 0), part, 0)).int()


def group_size(query: Query, chosen: Config) -> int:
    """Heads of a group as the kernels pad them: a power of two of which a tile's columns hold at most eight."""
    heads = query.codes.shape[-2]
    return max(1 << (heads - 1).bit_length(), chosen.columns // 8)


def attend_lanes(
    layout: Layout, query: Query, table: Table, refinement: Refinement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of the lanes in the rotated space: m, l fp32 [B, lanes, HK, Q, G], o [.., D], and how many tokens were refined,
    counted once per KV head and query, int64 []. query: tensors [B, HK, Q, G, ..]."""
    if not refinement.enabled:
        part = launch_decode(layout, query, table, refinement.scan_noise, None)
        return *part, torch.zeros((), dtype=torch.int64, device=query.codes.device)
    slots = table.offsets.shape[1]
    every_slot = table if slots == table.lanes else table._replace(bounds=slot_bounds(table, layout.pages))
    part, tokens = attend_tiered(layout, query, every_slot, refinement)
    if slots != table.lanes:
        index = torch.arange(slots, device=query.codes.device)
        sequences = (lanes(*sequence, index, table.lanes) for sequence in zip(*part, strict=True))
        part = tuple(torch.stack(tensors) for tensors in zip(*sequences, strict=True))
    return *part, count_refined(tokens)


def slot_bounds(table: Table, pages: int) -> torch.Tensor:
    """int32 [B, slots, 2]: a lane's pages first .. end - 1 as those of each of its granules, counted in the granule."""
    slot = torch.arange(table.offsets.shape[1], device=table.bounds.device)
    before = (slot // table.lanes * pages)[:, None]
    return (table.bounds[:, slot % table.lanes] - before).clamp(0, pages).int()


def launch_decode(
    layout: Layout, query: Query, table: Table, noise: float, scanned: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = config(query.codes.device)
    batch, heads, queries, group, dim = query.codes.shape
    shape = (batch, table.lanes, heads, queries, group)
    m, l, o = query.scale.new_empty(shape), query.scale.new_empty(shape), query.scale.new_empty(*shape, dim)
    padded = group_size(query, chosen)
    at_once = min(padded, chosen.heads_at_once(dim))
    decode[(table.lanes * padded // at_once, heads, batch * queries)](
        table.base, table.offsets, table.bounds, *(scanned or (query.codes, query.scale)), *query, m, l, o,
        table.lanes, table.offsets.shape[1], queries, heads, group, noise,
        D=dim, P=layout.tokens, RECORD=layout.record_bytes,
        KEY_BITS=layout.scan_bits[KEYS], VALUE_BITS=layout.scan_bits[VALUES],
        KEY_PLANES=layout.planes[KEYS], VALUE_PLANES=layout.planes[VALUES],
        KEY_SCAN=layout.scan[KEYS], VALUE_SCAN=layout.scan[VALUES],
        KEY_CENTROID=layout.centroid[KEYS], VALUE_CENTROID=layout.centroid[VALUES],
        GROUP=at_once, PARTS=padded // at_once, COLS=max(chosen.columns, at_once), SCANNED=scanned is not None,
        ASSEMBLY=chosen.assembly, num_warps=1, num_stages=chosen.stages, **chosen.registers(),
    )  # fmt: skip
    return m, l, o


def attend_tiered(
    layout: Layout, query: Query, table: Table, refinement: Refinement
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Scan, select, tail, refine: partials like `attend_lanes`, each granule a lane, and the refined tokens int32
    [B, slots, HK, Q, R, LIST]: positions in the granule, -1 after the last; R = 1 list for a group, else one per head."""
    chosen = config(query.codes.device)
    batch, heads, queries, group, dim = query.codes.shape
    slots, padded = table.lanes, group_size(query, chosen)
    lists, lists_padded = (1, 1) if refinement.group else (group, padded)
    counts = refined_counts(layout.tokens, refinement.share, refinement.min_tokens, query.codes.device)
    room = max(32, triton.next_power_of_2(refined_count(GRANULE_TOKENS, refinement.share, refinement.min_tokens)))
    lead = (batch, slots, heads, queries)
    one_plane = layout.scan_bits[KEYS] == 1
    dots = query.codes.new_empty(*lead, group, GRANULE_TOKENS, dtype=torch.int16 if one_plane else torch.int32)
    bases = query.scale.new_empty(*lead, group, layout.pages)
    tokens = query.codes.new_empty(*lead, lists, room, dtype=torch.int32)
    tops = query.codes.new_empty(*lead, group, room, dtype=torch.int32)
    sizes = (slots, queries, heads, group)
    grid = (slots, heads, batch * queries)
    record = {"P": layout.tokens, "RECORD": layout.record_bytes, "ASSEMBLY": chosen.assembly}
    at_once = min(padded, chosen.scan_heads_at_once(dim))
    scan_kernel[slots, heads, batch * queries * (padded // at_once)](
        table.base, table.offsets, table.bounds, dots, bases, query.codes, query.rotated, *sizes, **record,
        D=dim, KEY_BITS=layout.scan_bits[KEYS], KEY_PLANES=layout.planes[KEYS], KEY_CENTROID=layout.centroid[KEYS],
        GROUP=at_once, PARTS=padded // at_once, COLS=max(chosen.columns, at_once), num_warps=1, num_stages=chosen.stages,
    )  # fmt: skip
    select_kernel[grid](
        table.base, table.offsets, table.bounds, dots, bases, query.scale, query.norm2, counts, tokens, tops, *sizes,
        refinement.scan_noise, **record, KEY_BITS=layout.scan_bits[KEYS], KEY_SCAN=layout.scan[KEYS],
        GROUP=padded, LISTS=lists_padded, LIST=room, num_warps=chosen.select_warps(padded, lists_padded),
    )  # fmt: skip
    m, l, o = launch_decode(layout, query, table, refinement.scan_noise, (dots, bases))
    low = [layout.bits[side] - layout.scan_bits[side] for side in (KEYS, VALUES)]
    at_once = min(padded, chosen.refine_heads_at_once(dim)) if refinement.group else 1
    parts = padded // at_once if refinement.group else group
    refine_kernel[slots, heads, batch * queries * parts](
        table.base, table.offsets, bases, query.codes, query.scale, query.norm2, tokens, tops, m, l, o, *sizes,
        refinement.full_noise if low[KEYS] else refinement.scan_noise, **record, D=dim,
        KEY_SCAN_BITS=layout.scan_bits[KEYS], VALUE_SCAN_BITS=layout.scan_bits[VALUES],
        KEY_LOW_BITS=low[KEYS], VALUE_LOW_BITS=low[VALUES],
        KEY_SCALE=(layout.full if low[KEYS] else layout.scan)[KEYS],
        VALUE_SCALE=(layout.full if low[VALUES] else layout.scan)[VALUES],
        KEY_LOW=layout.low[KEYS], VALUE_LOW=layout.low[VALUES], VALUE_PLANES=layout.planes[VALUES],
        VALUE_CENTROID=layout.centroid[VALUES], GROUP=at_once, PARTS=parts, COLS=chosen.columns,
        BY_HEAD=not refinement.group, LIST=room, num_warps=chosen.refine_warps(room, dim, at_once),
    )  # fmt: skip
    return (m, l, o), tokens


def refined_count(tokens: int, share: float, min_tokens: int) -> int:
    """How many of a granule's `tokens` sealed tokens are refined."""
    return min(tokens, max(min_tokens, math.ceil(tokens * share)))


@functools.cache
def refined_counts(page_tokens: int, share: float, min_tokens: int, device: torch.device) -> torch.Tensor:
    """int32 [pages + 1]: how many tokens of a granule with so many sealed pages are refined."""
    counts = [refined_count(tokens, share, min_tokens) for tokens in range(0, GRANULE_TOKENS + 1, page_tokens)]
    return torch.tensor(counts, dtype=torch.int32, device=device)


def count_refined(tokens: torch.Tensor) -> torch.Tensor:
    """int64 []: tokens [B, slots, HK, Q, R, LIST] of `attend_tiered`, each counted once although several heads may list it."""
    if tokens.shape[-2] == 1:
        return (tokens >= 0).sum()
    listed = tokens.flatten(-2).sort(-1).values
    again = (listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] >= 0)
    return (listed >= 0).sum() - again.sum()


def granule_table(records: torch.Tensor, page_valid: torch.Tensor) -> Table:
    """Every granule of records uint8 [n, pages, HK, record_bytes] a lane of its own. page_valid bool [n, pages]: valid pages
    of a granule follow one another, as those between the sink and the end of a sequence do."""
    offsets = torch.arange(len(records), device=records.device) * records.stride(0)
    first = page_valid.int().argmax(1)
    return Table(records, offsets[None], torch.stack((first, first + page_valid.sum(1)), dim=1).int()[None])


def attend(
    layout: Layout, query: Query, records: torch.Tensor, page_valid: torch.Tensor, refinement: Refinement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l [n, HK, Q, G], o [n, HK, Q, G, D] of one sequence's queries over n granules, and how many tokens were refined,
    counted once per KV head and query, int64 [].

    records uint8 [n, pages, HK, record_bytes], the last three dims contiguous; page_valid bool [n, pages] (see
    `granule_table`).
    """
    if len(records) == 0:
        shape = (0, *query.scale.shape)
        empty = query.scale.new_empty
        return empty(shape), empty(shape), empty(*shape, layout.dim), torch.zeros((), dtype=torch.int64, device=records.device)
    batched = Query(*(part[None] for part in query))
    *part, refined = attend_lanes(layout, batched, granule_table(records, page_valid), refinement)
    return *(tensor[0] for tensor in part), refined
