"""The end of a decode step in one kernel: back from the rotated space, merged with the exact tokens, normalised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitkv_dist.kernels.triton.merge import Three, merge
from bitkv_dist.kernels.triton.rotate import FACTORS, constants, rotate_rows_back, rotation_of

ROWS = 4  # queries of a program
WARPS = 4


@triton.jit(do_not_specialize=["count"])
def conclude_rows(m, l, o, m2, l2, o2, signs, table, out, count, DIM: tl.constexpr, WIDE: tl.constexpr,
                  SIZE: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Program (head, block of rows): out [HK, count, D] = the attention to both sets; o is still in the rotated space."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    at = head * count + row[:, None]
    d = tl.arange(0, WIDE)[None, :]
    real = row[:, None] < count
    inside = real & (d < DIM)
    z = rotate_rows_back(tl.load(o + at * DIM + d, mask=inside, other=0.0), signs + head * DIM, table + FACTORS, DIM, WIDE,
                         SIZE, STEPS, ROOT)  # fmt: skip
    sealed_m, sealed_l = tl.load(m + at, mask=real, other=0.0), tl.load(l + at, mask=real, other=0.0)
    exact_m, exact_l = tl.load(m2 + at, mask=real, other=0.0), tl.load(l2 + at, mask=real, other=0.0)
    _, l_all, o_all = merge(sealed_m, sealed_l, z, exact_m, exact_l, tl.load(o2 + at * DIM + d, mask=inside, other=0.0))
    l_all = tl.broadcast_to(tl.where(l_all == 0, 1.0, l_all), o_all.shape)
    tl.store(out + at * DIM + d, tl.div_rn(o_all, l_all), mask=inside)


def conclude(sealed: Three, exact: Three, signs: torch.Tensor) -> torch.Tensor:
    """Attention output fp32 [HK, Q, G, D] over two sets, 0 where both are empty.

    Both come as partials m, l [HK, Q, G], o [HK, Q, G, D]; the sealed one's o is still in the rotated space of signs [HK, D].
    """
    (m, l, o), (m2, l2, o2) = ((part.contiguous() for part in parts) for parts in (sealed, exact))
    heads, queries, members, dim = o.shape
    out = torch.empty_like(o)
    conclude_rows[heads, triton.cdiv(queries * members, ROWS)](
        m, l, o, m2, l2, o2, signs, constants(dim, o.device), out, queries * members, **rotation_of(dim)._asdict(),
        ROWS=ROWS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
