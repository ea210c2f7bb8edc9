"""Attention of one position's queries to rows kept exactly: the sink page and the recent window. Twin of `attend_dense`.

One program per tile of rows and KV head, so that a few hundred rows of a few heads fill a GPU; the tiles' partials are merged
by the tree. A kernel of its own, not a tile of `decode`: these rows are neither packed nor rotated, and their partial is
merged after the sealed ones have been rotated back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.triton.merge import halve
from bitkv_dist.kernels.triton.numbers import exp2
from bitkv_dist.kernels.triton.tables import config

TILE_ROWS = 32
DIMS_AT_ONCE = 64  # of queries of fp32, in two parts each: 256 would fill the registers of four warps


@triton.jit
def exact(
    k, v, count, q, m_out, l_out, o_out, heads, group, head_stride, row_stride,
    D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Partials m, l fp32 [tiles, HK, G], o [tiles, HK, G, D] of q fp32 [HK, G, D] in base 2 over the first `count` rows.

    k, v: [HK, rows, D] in any float type with these strides in elements, D contiguous. count int64 []: on the device.
    DIMS dims are taken at once.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < tl.load(count)
    member, place = tl.arange(0, GROUP), tl.arange(0, DIMS)
    real = member < group
    at = head.to(tl.int64) * head_stride + row.to(tl.int64)[:, None] * row_stride
    own = (head * group + member[:, None]) * D
    scores = tl.zeros((GROUP, ROWS), tl.float32)
    for start in tl.static_range(0, D, DIMS):
        dim = start + place[None, :]
        keys = tl.load(k + at + dim, mask=inside[:, None] & (dim < D), other=0.0).to(tl.float32)
        queries = tl.load(q + own + dim, mask=real[:, None] & (dim < D), other=0.0)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    m = tl.max(scores, 1)
    weights = exp2(scores - tl.where(m == float("-inf"), 0.0, m)[:, None], ASSEMBLY)
    target = (tile * heads + head) * group
    tl.store(m_out + target + member, m, mask=real)
    tl.store(l_out + target + member, tl.sum(weights, 1), mask=real)
    for start in tl.static_range(0, D, DIMS):
        dim = start + place[None, :]
        values = tl.load(v + at + dim, mask=inside[:, None] & (dim < D), other=0.0).to(tl.float32)
        o = tl.dot(weights, values, input_precision=PRECISION)
        tl.store(o_out + (target + member[:, None]) * D + dim, o, mask=real[:, None] & (dim < D))


def attend_exact(
    q: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial m, l [HK, 1, G], o [HK, 1, G, D] of one position's queries fp32 [HK, 1, G, D] (base 2) over exact rows
    [2, HK, capacity, D], the last dim contiguous. count int64 []: only the first so many rows, a number on the device."""
    kv_heads, _, group, dim = q.shape
    if count is None:
        count = torch.full((), rows.shape[2], dtype=torch.int64, device=q.device)
    chosen = config(q.device)
    tiles = triton.next_power_of_2(max(1, triton.cdiv(rows.shape[2], TILE_ROWS)))
    shape = (tiles, kv_heads, 1, group)
    m, l, o = q.new_empty(shape), q.new_empty(shape), q.new_empty(*shape, dim)
    exact[(tiles, kv_heads)](
        rows[0], rows[1], count, q.contiguous(), m, l, o, kv_heads, group, rows.stride(1), rows.stride(2),
        D=dim, DIMS=min(DIMS_AT_ONCE, triton.next_power_of_2(dim)), ROWS=TILE_ROWS,
        GROUP=max(16, triton.next_power_of_2(group)), PRECISION=chosen.precision,
        ASSEMBLY=chosen.assembly, num_warps=chosen.exact_warps,
    )  # fmt: skip
    return tuple(part[0] for part in halve(m, l, o, 1))
