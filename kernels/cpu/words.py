"""Decode attention over pages of words (bitkv_dist/codec/tailored.py, worded.py) by the C++ kernels, behind ctypes."""

from __future__ import annotations

import ctypes

import torch

from bitkv_dist.kernels import cpu
from bitkv_dist.kernels.cpu.step import Part, View


class Words(ctypes.Structure):
    """The record and the books of a layer (see interface.hpp). It holds addresses only: whoever makes one keeps the tensors."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("tokens", "dim", "kv_heads", "pages", "record_bytes")]
        + [(name, ctypes.c_int64) for name in ("half", "page", "scale", "share", "left_at")]
        + [(name, ctypes.c_int64 * 2) for name in ("bits", "codes")]
        + [(name, ctypes.c_void_p * 2) for name in ("words", "factor", "center", "channels")]
        + [(name, ctypes.c_void_p) for name in ("places", "page_cosine", "page_sine", "correction")]
        + [("signs", ctypes.c_void_p * 2), ("left", cpu.Layout), ("scaling", ctypes.c_float)]
    )


def attend(
    words: Words, refinement: cpu.Refinement, query: torch.Tensor, records: torch.Tensor, page_valid: torch.Tensor,
    page_mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """A decode query fp32 [HK, 1, G, D] in base 2, records uint8 [n, pages, HK, record_bytes], page_valid bool [n, pages] ->
    m, l [n, HK, 1, G], o [n, HK, 1, G, D] and the number of refined tokens, counted once per KV head. page_mass fp32
    [n, HK, 1, G, pages], contiguous: to fill with what each page has of l."""
    shape = (len(records), *query.shape[:-1])
    m, l, o = torch.empty(shape), torch.empty(shape), torch.empty(*shape, query.shape[-1])
    query, records, page_valid = query.contiguous(), records.contiguous(), page_valid.contiguous()
    refined = cpu.load().bitkv_attend_words(
        ctypes.byref(words), ctypes.byref(refinement), query.shape[2], *cpu.addresses(query, records), len(records),
        *cpu.addresses(page_valid, m, l, o), None if page_mass is None else page_mass.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return m, l, o, refined


def see(view: View, words: Words, refinement: cpu.Refinement, query: torch.Tensor, rows: torch.Tensor,
        slabs: list[torch.Tensor], count: int | None = None) -> tuple[Part, Part, int]:  # fmt: skip
    """As `View.see`, of pages of words; partials of the tree nodes are in the model's space."""
    query, how = query.contiguous(), (ctypes.byref(words), ctypes.byref(refinement))
    return view.call(cpu.load().bitkv_see_words, how, cpu.addresses(query), rows, slabs, count)
