"""What the C library's allocator keeps of freed tensors."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Give blocks of a megabyte and more back to the system as soon as they are freed, where the C library is glibc.

    Left alone, glibc counts the first freed large block as a sign that more will come and keeps those up to 32 MB in its heap,
    where they leave holes: a chunk's temporaries then took up to three times their bytes. Every such block now costs a system
    call and its pages' first touch, 4 % of a prefill of smollm2 (benchmarks/NOTES.md): worth it where memory is what is short.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
