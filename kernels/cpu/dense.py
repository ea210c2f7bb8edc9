"""The dense part of decode steps, and the small operations of prompts, behind ctypes.

Weights are read where torch holds them, in float32 or bfloat16, and everything is computed and summed in float32, in an order
that no number of threads or rows and no instruction set changes. The twin of each call is a few lines of torch: a decoder layer
of transformers up to its attention, the rest of it, norm and head.
"""

from __future__ import annotations

import ctypes

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


class Step:
    """What all layers of a step share, fp32. hidden [rows, E], a row per sequence, and for each row, of the layer that runs, kv
    [2, HK, 1, D], queries [HK, 1, G, D] and attended [1, H, D], which whoever attends fills.

    block: any of the model's. cosine, sine [rows, rotary dim]. What is given is contiguous.
    """

    def __init__(self, block: Block, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        rows, heads, kv_heads, dim, threads = len(hidden), block.heads, block.kv_heads, block.dim, torch.get_num_threads()
        q, self.hidden, self._angles = torch.empty(rows, heads, dim), hidden, (cosine, sine)
        kv, attended = torch.empty(2, rows, kv_heads, 1, dim), torch.empty(rows, 1, heads, dim)
        self.kv, self.attended = kv.unbind(1), attended.unbind()
        self.queries = q.view(rows, kv_heads, 1, heads // kv_heads, dim).unbind()
        self.q = q.numpy()  # the same numbers: between two layers torch takes 15 us to multiply them, numpy a few
        self.projected = hidden.data_ptr(), rows, *cpu.addresses(cosine, sine, q, *kv), threads
        self.fed = *cpu.addresses(attended, hidden), rows, threads


def matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """weight [out, in] contiguous float32 or bfloat16, bias fp32 [out]; both must outlive the result."""
    return Matrix(*weight.shape, weight.dtype == torch.bfloat16, weight.data_ptr(), None if bias is None else bias.data_ptr())


def project(block: Block, step: Step, scale: float) -> None:
    """Norm, projections, their norms and rotary positions: fills kv and, times `scale`, queries from hidden."""
    cpu.load().bitkv_project(ctypes.byref(block), *step.projected)
    step.q *= scale


def feed_forward(block: Block, step: Step) -> None:
    """Output projection of what was attended, residual, norm, gated MLP, residual: replaces hidden."""
    cpu.load().bitkv_feed_forward(ctypes.byref(block), *step.fed)


def norm(weight: int, eps: float, x: torch.Tensor) -> torch.Tensor:
    """RMS norm of x [.., width], float32 or bfloat16, contiguous; weight: address of fp32 [width]."""
    y = torch.empty_like(x)
    cpu.load().bitkv_norm(weight, eps, *cpu.addresses(x), _half(x), *_rows(x), *cpu.addresses(y), torch.get_num_threads())
    return y


def place(block: Block, cosine: torch.Tensor, sine: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Norms and rotary positions in place: q [rows, H D], k [rows, HK D], both float32 or bfloat16, cosine, sine fp32
    [rows, rotary dim], contiguous."""
    rows = cosine.numel() // block.rotary_dim
    cpu.load().bitkv_place(ctypes.byref(block), *cpu.addresses(cosine, sine, q, k), _half(q), rows, torch.get_num_threads())


def gate(gates: torch.Tensor, up: torch.Tensor) -> None:
    """gates = silu(gates) * up in place, both [.., width], float32 or bfloat16, contiguous."""
    cpu.load().bitkv_gate(*cpu.addresses(gates, up), _half(up), *_rows(up), torch.get_num_threads())


def head(weight: Matrix, norm: torch.Tensor, eps: float, hidden: torch.Tensor) -> torch.Tensor:
    """Last norm and LM head: hidden fp32 [rows, E] -> logits fp32 [rows, vocabulary]."""
    logits = torch.empty(len(hidden), weight.out)
    cpu.load().bitkv_head(
        ctypes.byref(weight), *cpu.addresses(norm), eps, *cpu.addresses(hidden), len(hidden), *cpu.addresses(logits),
        torch.get_num_threads(),
    )  # fmt: skip
    return logits


def _half(x: torch.Tensor) -> bool:
    """Whether it is bfloat16; float32 otherwise."""
    return x.dtype == torch.bfloat16


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """How many rows, and how wide."""
    return x.numel() // x.shape[-1], x.shape[-1]
