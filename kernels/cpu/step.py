"""Attention of one decode query in two calls: what it sees in one layer, and, once the ranks' partials are merged, its output.
Attention of prompts."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from bitkv_dist.kernels import cpu

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # m, l [..], o [.., D]


class _Seen(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "head_stride", "bfloat16", "slabs", "granules", "width", "nodes")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "records", "slab_granules", "index", "page_valid")),
    ]


class View:
    """Which tokens of a sequence a decode query sees on this rank, with room for a layer's partials.

    The same in all layers, so made once per step.

    slab_granules: granules in use of each slab. index: their ascending global indices. page_valid bool [granules, pages].
    width, nodes: of the merge tree (bitkv_dist/partial.py). shape: HK, G, D.
    """

    def __init__(
        self,
        slab_granules: Sequence[int],
        index: Sequence[int],
        page_valid: torch.Tensor,
        width: int,
        nodes: int,
        shape: tuple[int, int, int],
    ) -> None:
        heads, group, dim = shape
        self.pages, self.group = int(page_valid.sum()), group
        self._page_valid, self._index = page_valid.contiguous(), torch.tensor(index, dtype=torch.int64)
        self._counts = (ctypes.c_int64 * len(slab_granules))(*slab_granules)
        self._records = (ctypes.c_void_p * len(slab_granules))()
        self._seen = _Seen(
            slabs=len(slab_granules), granules=len(index), width=width, nodes=nodes, records=ctypes.addressof(self._records),
            slab_granules=ctypes.addressof(self._counts), index=self._index.data_ptr(), page_valid=self._page_valid.data_ptr(),
        )  # fmt: skip
        self._exact, lanes = (
            (torch.empty(n, heads, 1, group), torch.empty(n, heads, 1, group), torch.empty(n, heads, 1, group, dim))
            for n in (1, width)
        )
        self._addresses = cpu.addresses(*self._exact, *lanes)
        self._exact, self._nodes = tuple(t[0] for t in self._exact), tuple(t[:nodes] for t in lanes)

    def see(self, layout: cpu.Layout, refinement: cpu.Refinement, signs: torch.Tensor, query: torch.Tensor, rows: torch.Tensor,
            slabs: Sequence[torch.Tensor], count: int | None = None) -> tuple[Part, Part, int]:  # fmt: skip
        """query fp32 [HK, 1, G, D] in base 2, signs [HK, D], exact rows [2, HK, .., D], of which the first `count` are seen
        (None: all), slabs of records uint8 [n, pages, HK, record_bytes].

        Returns the partials of the exact rows [HK, 1, G] and of the tree nodes [nodes, HK, 1, G] in rotated space, and the
        number of refined tokens, counted once per KV head. The next layer's call replaces both partials.
        """
        query = query.contiguous()
        how = ctypes.byref(layout), ctypes.byref(refinement)
        return self.call(cpu.load().bitkv_see, how, cpu.addresses(query, signs), rows, slabs, count)

    def call(self, function: Callable[..., int], how: Sequence, of_query: Sequence, rows: torch.Tensor,
             slabs: Sequence[torch.Tensor], count: int | None) -> tuple[Part, Part, int]:  # fmt: skip
        """One of the library's functions that take what is seen, between their first arguments and those of the query."""
        if rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows[:, :, :count].float()
        side, head_stride, *inner = rows.stride()
        if inner != [rows.shape[3], 1]:
            rows = rows.contiguous()
            side, head_stride, *_ = rows.stride()
        seen, k = self._seen, rows.data_ptr()
        seen.k, seen.v, seen.head_stride = k, k + side * rows.itemsize, head_stride
        seen.rows, seen.bfloat16 = rows.shape[2] if count is None else count, rows.dtype == torch.bfloat16
        for number in range(seen.slabs):
            self._records[number] = slabs[number].data_ptr()
        refined = function(*how, ctypes.byref(seen), self.group, *of_query, *self._addresses, torch.get_num_threads())
        return self._exact, self._nodes, refined


def attend_prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """Causal attention: q fp32 [HK, G, n, D], queries of the last n of T tokens; k, v fp32 [HK, T, D] -> fp32 [HK, G, n, D].
    None where the instruction set has no kernel for it."""
    heads, group, n, dim = q.shape
    q, k, v = (
        q.contiguous(),
        *((k, v) if k.stride() == v.stride() and k.stride()[1:] == (dim, 1) else (k.contiguous(), v.contiguous())),
    )
    out = torch.empty(q.shape)
    ran = cpu.load().bitkv_attend_prompt(
        heads, group, n, dim, k.shape[1], scaling * math.log2(math.e), *cpu.addresses(q, k, v), k.stride(0),
        *cpu.addresses(out), torch.get_num_threads(),
    )  # fmt: skip
    return out if ran else None


def finish(root: Part, exact: Part, signs: torch.Tensor | None, out: torch.Tensor) -> bool:
    """Fills out fp32 [1, H, D], contiguous, the attention output, from the root of the tree, or its only node, and the exact
    rows' partial, both [HK, 1, G]. signs [HK, D]: the root is in rotated space. Returns whether all of it is finite."""
    heads, _, group, dim = exact[2].shape
    parts = [t.contiguous() for t in (*root, *exact)]
    turned = None if signs is None else signs.data_ptr()
    return bool(cpu.load().bitkv_finish(heads, group, dim, turned, *cpu.addresses(*parts, out)))
