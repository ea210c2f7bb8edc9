"""The dense part of decode steps, and the small operations of prompts, behind ctypes.

Weights are read where torch holds them, in float32 or bfloat16, and everything is computed and summed in float32, in an order
that no number of threads or rows and no instruction set changes. The twin of each call is a few lines of torch: a decoder layer
of transformers up to its attention, the rest of it, norm and head.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from bitkv_dist.kernels import cpu


class Matrix(ctypes.Structure):
    """nn.Linear's weight [out, in], contiguous, float32 or bfloat16, and its bias fp32 [out] or null (see interface.hpp)."""

    _fields_ = [(name, ctypes.c_int64) for name in ("out", "in", "bfloat16")] + [
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Block(ctypes.Structure):
    """A decoder layer (see decoder.cpp). It holds addresses only: whoever makes one keeps the tensors."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "rotary_dim")]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")]
        + [(name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")]
    )


@dataclass(frozen=True)
class Step:
    """What all layers of a step share: rows (sequences), cosine and sine fp32 [rows, rotary dim], contiguous."""

    rows: int
    cosine: torch.Tensor
    sine: torch.Tensor


def matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """weight [out, in] contiguous float32 or bfloat16, bias fp32 [out]; both must outlive the result."""
    return Matrix(*weight.shape, weight.dtype == torch.bfloat16, weight.data_ptr(), None if bias is None else bias.data_ptr())


def project(block: Block, hidden: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, projections, their norms and rotary positions: hidden fp32 [rows, E] -> q [rows, H, D], k and v [rows, HK, D]."""
    q = torch.empty(step.rows, block.heads, block.dim)
    k, v = torch.empty(2, step.rows, block.kv_heads, block.dim)
    cpu.load().bitkv_project(
        ctypes.byref(block),
        *_pointers(hidden),
        ctypes.c_int64(step.rows),
        *_pointers(step.cosine, step.sine, q, k, v),
        _threads(),
    )
    return q, k, v


def feed_forward(block: Block, attended: torch.Tensor, hidden: torch.Tensor, step: Step) -> None:
    """Output projection, residual, norm, gated MLP, residual: attended fp32 [rows, H D]; hidden fp32 [rows, E] is replaced."""
    cpu.load().bitkv_feed_forward(ctypes.byref(block), *_pointers(attended, hidden), ctypes.c_int64(step.rows), _threads())


def norm(weight: int, eps: float, x: torch.Tensor) -> torch.Tensor:
    """RMS norm of x [.., width], float32 or bfloat16, contiguous; weight: address of fp32 [width]."""
    y = torch.empty_like(x)
    cpu.load().bitkv_norm(
        ctypes.c_void_p(weight), ctypes.c_float(eps), *_pointers(x), _half(x), *_rows(x), *_pointers(y), _threads()
    )
    return y


def place(block: Block, cosine: torch.Tensor, sine: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Norms and rotary positions in place: q [rows, H D], k [rows, HK D], both float32 or bfloat16, cosine, sine fp32
    [rows, rotary dim], contiguous."""
    rows = ctypes.c_int64(cosine.numel() // block.rotary_dim)
    cpu.load().bitkv_place(ctypes.byref(block), *_pointers(cosine, sine, q, k), _half(q), rows, _threads())


def gate(gates: torch.Tensor, up: torch.Tensor) -> None:
    """gates = silu(gates) * up in place, both [.., width], float32 or bfloat16, contiguous."""
    cpu.load().bitkv_gate(*_pointers(gates, up), _half(up), *_rows(up), _threads())


def head(weight: Matrix, norm: torch.Tensor, eps: float, hidden: torch.Tensor) -> torch.Tensor:
    """Last norm and LM head: hidden fp32 [rows, E] -> logits fp32 [rows, vocabulary]."""
    logits = torch.empty(len(hidden), weight.out)
    cpu.load().bitkv_head(
        ctypes.byref(weight),
        *_pointers(norm),
        ctypes.c_float(eps),
        *_pointers(hidden),
        ctypes.c_int64(len(hidden)),
        *_pointers(logits),
        _threads(),
    )
    return logits


def _pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _half(x: torch.Tensor) -> ctypes.c_int64:
    """Whether it is bfloat16; float32 otherwise."""
    return ctypes.c_int64(x.dtype == torch.bfloat16)


def _rows(x: torch.Tensor) -> list[ctypes.c_int64]:
    """How many rows, and how wide."""
    return [ctypes.c_int64(x.numel() // x.shape[-1]), ctypes.c_int64(x.shape[-1])]


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())
