"""The page record as the kernels are told of it."""

from __future__ import annotations

from dataclasses import dataclass

GRANULE_TOKENS = 512
ALIGNMENT = 16  # bytes: records, and the fields inside them, are read 128 bits at a time
KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class Layout:
    """Sizes, and per side (keys, values) bits, scanned bits and byte offsets of the fields of a page record.

    The record of one page and KV head has `record_bytes`; `pages` of them make a granule. Where all planes are scanned there is
    neither `full` nor `low` and their offsets are not looked at.
    """

    tokens: int
    dim: int
    kv_heads: int
    pages: int
    record_bytes: int
    bits: tuple[int, int]
    scan_bits: tuple[int, int]
    planes: tuple[int, int]
    scan: tuple[int, int]
    full: tuple[int, int]
    low: tuple[int, int]
    centroid: tuple[int, int]

    def __post_init__(self) -> None:
        if self.tokens not in (64, 128) or self.pages * self.tokens != GRANULE_TOKENS:
            raise ValueError(f"page_tokens {self.tokens}: the Triton kernels read pages of 64 or 128 tokens; use one of these")
        if self.dim % 8 or not 16 <= self.dim <= 256:
            raise ValueError(f"head_dim {self.dim}: the Triton kernels read multiples of 8 from 16 to 256; use the reference")
        for side, name in enumerate(("key_bits", "value_bits")):
            if self.bits[side] > 8 or self.scan_bits[side] > 4 or self.bits[side] - self.scan_bits[side] > 4:
                raise ValueError(
                    f"{name} {self.bits[side]}: the Triton kernels scan 1 to 4 planes and refine by 1 to 4; use the reference"
                )
        offsets = (self.record_bytes, *self.planes, *self.scan, *self.centroid)
        if any(offset % ALIGNMENT for offset in offsets):
            raise ValueError(f"record {self.record_bytes} bytes: fields begin at multiples of {ALIGNMENT}; align them")
