"""CPU kernels in C++ behind ctypes: twins of kernels/reference that read the packed pages in place.

The library is built by setup.py when there is a compiler; instruction sets (portable, AVX2, AVX-VNNI, AVX-512 with VNNI and
VBMI, the same with BF16 for prompts) are compiled side by side and chosen at run time. `load()` returns None, and `reason()`
says why, where there is no library, or one that was built from other sources.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import torch

HUGE_BYTES = 4 << 20  # smaller tensors gain nothing from huge pages and would round up to one

INTERFACE = 4  # of the functions and structs that cross; see interface.hpp
NOT_BUILT = "the C++ extension is not built: install with a C++ compiler (g++ 12 or newer), pip install -e ."
REBUILD = "rebuild: pip install -e . --no-deps --no-build-isolation"
ISAS = {"portable": 0, "avx2": 1, "avxvnni": 2, "avx512": 3, "avx512bf16": 4}

# What each function takes and, behind >, gives: p an address, i int64, f float, s text.
SIGNATURES = {
    "interface": ">i",
    "choose": "i>s",
    "supports": "i>i",
    "encode": "pippppipi",
    "quantize_query": "iiipppppp",
    "attend": "ppppipppppi>i",
    "tree": "ipiipppiipppi",
    "attend_exact": "iiipppiipppi",
    "rotate_back": "iiipp",
    "see": "pppippppppppi>i",
    "finish": "iiipppppppp>i",
    "attend_prompt": "iiiiifpppipi>i",
    "attend_prompt_bfloat16": "iiiiifpppipi>i",
    "attend_words": "ppippipppppi>i",
    "see_words": "pppipppppppi>i",
    "project": "ppipppppi",
    "feed_forward": "pppii",
    "norm": "pfpiiipi",
    "place": "pppppiii",
    "gate": "ppiiii",
    "head": "ppfpipi",
    "level_dot": "piiipiipi",
    "select": "iipiip",
}
KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "s": ctypes.c_char_p}


class Layout(ctypes.Structure):
    """The page record: sizes, bits and scanned bits of keys and values, byte offsets of the fields (see interface.hpp)."""

    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "dim", "kv_heads", "pages", "record_bytes")] + [
        (name, ctypes.c_int64 * 2) for name in ("bits", "scan_bits", "planes", "scan", "full", "low", "centroid")
    ]


class _Queries(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int64), ("group", ctypes.c_int64)] + [
        (name, ctypes.c_void_p) for name in ("codes", "scale", "norm2", "rotated")
    ]


class Refinement(ctypes.Structure):
    """How tokens are chosen for refinement; noise factors 0.5 ln2 r^2 / (D a^2) of the scanned and the full key code."""

    _fields_ = [(name, ctypes.c_int64) for name in ("enabled", "group", "min_tokens")] + [
        ("share", ctypes.c_double), ("scan_noise", ctypes.c_float), ("full_noise", ctypes.c_float)
    ]  # fmt: skip


class Query(NamedTuple):
    """codes int8 and rotated fp32 [HK, Q, G, D]; scale, norm2 fp32 [HK, Q, G]; base 2."""

    codes: torch.Tensor
    scale: torch.Tensor
    norm2: torch.Tensor
    rotated: torch.Tensor


def load() -> ctypes.CDLL | None:
    """The library, or None when it was not built, or not from these sources. BITKV_CPU_LIBRARY names another build of it (`make
    sanitize`)."""
    return _found()[0]


def reason() -> str:
    """Why `load` found nothing."""
    return _found()[1]


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    """What `load` and `reason` return."""
    files = sorted(Path(__file__).parent.glob("_bitkv_cpu*.so"))
    file = os.environ.get("BITKV_CPU_LIBRARY") or (str(files[0]) if files else None)
    if file is None:
        return None, NOT_BUILT
    try:
        library = ctypes.CDLL(file)
    except OSError as error:
        return None, f"the C++ extension cannot be loaded ({error}); {REBUILD}"
    if not hasattr(library, "bitkv_interface"):
        return None, f"{file} is older than this program (it does not name its interface); {REBUILD}"
    _declare(library, "interface")
    if (there := library.bitkv_interface()) != INTERFACE:
        return None, f"{file} was built from other sources (interface {there}, this program calls {INTERFACE}); {REBUILD}"
    for name in SIGNATURES:
        _declare(library, name)
    return library, ""


def _declare(library: ctypes.CDLL, name: str) -> None:
    """So that plain numbers are what it is called with."""
    function = getattr(library, f"bitkv_{name}")
    taken, _, given = SIGNATURES[name].partition(">")
    function.argtypes, function.restype = [KINDS[letter] for letter in taken], KINDS.get(given)


def choose(isa: str | None = None) -> str:
    """Select an instruction set by name (None = the best of this machine), return its name; ValueError if it is not there."""
    name = load().bitkv_choose(-1 if isa is None else ISAS[isa])
    if name is None:
        there = ", ".join(name for name in ISAS if load().bitkv_supports(ISAS[name]))
        raise ValueError(f"cpu_isa {isa}: this machine does not have it; take one of auto, {there}")
    return name.decode()


def advise_huge_pages(t: torch.Tensor) -> torch.Tensor:
    """t, contiguous and not yet written to, held in pages of 2 MB if it is large and the system offers them: one pass over a
    long cache touches each small page once, and looking up where it lies costs more than reading it."""
    bytes_, advice = t.numel() * t.element_size(), getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and t.device.type == "cpu" and bytes_ >= HUGE_BYTES:
        first = -(-t.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (t.data_ptr() + bytes_) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice))
    return t


def addresses(*tensors: torch.Tensor) -> list[int]:
    """Of their first elements. Whoever passes them on keeps the tensors."""
    return [t.data_ptr() for t in tensors]


def encode(
    layout: Layout, k: torch.Tensor, v: torch.Tensor, key_signs: torch.Tensor, value_signs: torch.Tensor, unbiased: bool
) -> torch.Tensor:
    """k, v fp32 [pages, HK, P, D] -> records uint8 [pages, HK, record_bytes], the bytes of the reference."""
    k, v = k.float().contiguous(), v.float().contiguous()
    records = torch.zeros(*k.shape[:2], layout.record_bytes, dtype=torch.uint8)
    load().bitkv_encode(
        ctypes.byref(layout), len(k), *addresses(k, v, key_signs, value_signs), unbiased, *addresses(records),
        torch.get_num_threads(),
    )  # fmt: skip
    return records


def quantize_query(q: torch.Tensor, signs: torch.Tensor) -> Query:
    """q fp32 [HK, Q, G, D] in base 2, signs [HK, D]."""
    q = q.contiguous()
    query = Query(
        torch.empty(q.shape, dtype=torch.int8), torch.empty(q.shape[:-1]), torch.empty(q.shape[:-1]), torch.empty(q.shape)
    )
    load().bitkv_quantize_query(len(q), q.shape[1] * q.shape[2], q.shape[3], *addresses(q, signs, *query))
    return query


def attend(
    layout: Layout, query: Query, records: torch.Tensor, page_valid: torch.Tensor, refinement: Refinement,
    page_mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """records uint8 [n, pages, HK, record_bytes], page_valid bool [n, pages] -> m, l [n, HK, Q, G], o [n, HK, Q, G, D] and the
    number of refined tokens, counted once per KV head and query. page_mass fp32 [n, HK, Q, G, pages], contiguous: to fill with
    what each page has of l."""
    shape = (len(records), *query.scale.shape)
    m, l, o = torch.empty(shape), torch.empty(shape), torch.empty(*shape, query.codes.shape[-1])
    records, page_valid = records.contiguous(), page_valid.contiguous()
    queries = _Queries(*query.codes.shape[1:3], *addresses(*query))
    refined = load().bitkv_attend(
        *map(ctypes.byref, (layout, queries, refinement)), *addresses(records), len(records),
        *addresses(page_valid, m, l, o), None if page_mass is None else page_mass.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return m, l, o, refined


def tree(
    m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, index: torch.Tensor, width: int, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partials of granules m, l [n, ...], o [n, ..., D], ascending int64 indices -> those of the first `nodes` tree nodes."""
    m, l, o, index = (t.contiguous() for t in (m, l, o, index))
    rows, dim = math.prod(m.shape[1:]), o.shape[-1]
    lanes = torch.empty(width, *m.shape[1:]), torch.empty(width, *m.shape[1:]), torch.empty(width, *o.shape[1:])
    load().bitkv_tree(
        len(index), *addresses(index), rows, dim, *addresses(m, l, o), width, nodes, *addresses(*lanes), torch.get_num_threads()
    )
    return lanes[0][:nodes], lanes[1][:nodes], lanes[2][:nodes]


def attend_exact(q: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial m, l [HK, 1, G], o [HK, 1, G, D] of one position's queries fp32 [HK, 1, G, D] (base 2) over exact rows [2, HK,
    count, D]."""
    kv_heads, _, group, dim = q.shape
    q, k, v = q.contiguous(), *(rows if rows.dtype == torch.float32 else rows.float())
    if k.stride()[1:] != (dim, 1):
        k, v = k.contiguous(), v.contiguous()
    m, l, o = torch.empty(q.shape[:-1]), torch.empty(q.shape[:-1]), torch.empty(q.shape)
    load().bitkv_attend_exact(
        kv_heads, group, dim, *addresses(q, k, v), k.shape[1], k.stride(0), *addresses(m, l, o), torch.get_num_threads()
    )
    return m, l, o


def rotate_back(z: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R^T z for z fp32 [HK, Q, G, D], signs [HK, D]."""
    z = z.clone(memory_format=torch.contiguous_format)
    load().bitkv_rotate_back(len(z), z.shape[1] * z.shape[2], z.shape[3], *addresses(z, signs))
    return z
