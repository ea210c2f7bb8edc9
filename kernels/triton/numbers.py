"""Scalar functions of the kernels that the compiler would otherwise spread over many instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from bitkv_dist.kernels.triton.planes import PTX

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, half to even


@triton.jit
def exp2(x, ASSEMBLY: tl.constexpr):
    """2^x by the hardware's approximation (2 ulp); results below 2^-126 are 0."""
    if ASSEMBLY == PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2(x, ASSEMBLY: tl.constexpr):
    """log2 of a normal positive x by the hardware's approximation."""
    if ASSEMBLY == PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def round_weight(x):
    """int8 of 0 <= x <= 127, half to even."""
    return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def halves(pointer, index, mask=None):
    """fp32 of the fp16 numbers at a byte address, 0 outside `mask`."""
    at = pointer.to(tl.pointer_type(tl.float16)) + index
    return (tl.load(at) if mask is None else tl.load(at, mask=mask, other=0.0)).to(tl.float32)
