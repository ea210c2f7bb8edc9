"""The page layout: scanned planes interleaved for a sequential read, low bits token by token."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8] of 0/1 -> uint8 [...], element j in bit j."""
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


@functools.cache
def bit_table(device: torch.device) -> torch.Tensor:
    """fp32 [256, 8]: row = byte, column j = its bit j."""
    return ((torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1).float()


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [...] -> fp32 [..., 8] of 0/1: the inverse of `pack_bits`."""
    return F.embedding(packed.int(), bit_table(packed.device))


def pack_key_plane(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., P, D] of 0/1 -> int32 words [..., D/4, P/8]: bit 8b + j of word [g][i] is dim 4g + b of token i + (P/8) j."""
    tokens, dim = bits.shape[-2:]
    grid = bits.unflatten(-1, (dim // 4, 4)).unflatten(-3, (8, tokens // 8))  # [.., j, i, g, b]
    return pack_bits(move_last(grid, (2, 1, 3, 0))).view(torch.int32).squeeze(-1)


def unpack_key_plane(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_key_plane`, as fp32 0/1 [..., P, D]."""
    bits = unpack_bits(words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)))  # [.., g, i, b, j]
    return move_last(bits, (3, 1, 0, 2)).flatten(-2).flatten(-3, -2)


def pack_value_plane(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [..., P, D] of 0/1 -> int32 words [..., P/4, D/8]: bit 8b + j of word [u][i] is token 4u + b of dim i + (D/8) j."""
    tokens, dim = bits.shape[-2:]
    grid = bits.unflatten(-1, (8, dim // 8)).unflatten(-3, (tokens // 4, 4))  # [.., u, b, j, i]
    return pack_bits(move_last(grid, (0, 3, 1, 2))).view(torch.int32).squeeze(-1)


def unpack_value_plane(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_value_plane`, as fp32 0/1 [..., P, D]."""
    bits = unpack_bits(words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)))  # [.., u, i, b, j]
    return move_last(bits, (0, 2, 3, 1)).flatten(-2).flatten(-3, -2)


def move_last(x: torch.Tensor, order: tuple[int, int, int, int]) -> torch.Tensor:
    """Permute the last four dims of x and make it contiguous."""
    lead = x.dim() - 4
    return x.permute(*range(lead), *(lead + i for i in order)).contiguous()


def pack_planes(code: torch.Tensor, bits: int, scan_bits: int, side: str) -> torch.Tensor:
    """The S scanned planes, sign plane first: code uint8 [.., P, D] -> int32 [.., S, D/4, P/8] (side K) or [.., S, P/4, D/8]
    (V)."""
    pack = pack_key_plane if side == "K" else pack_value_plane
    return torch.stack([pack((code >> shift) & 1) for shift in range(bits - 1, bits - scan_bits - 1, -1)], dim=-3)


def unpack_planes(planes: torch.Tensor, side: str) -> torch.Tensor:
    """fp32 codes [..., P, D] of the scanned planes: the inverse of `pack_planes`."""
    unpack = unpack_key_plane if side == "K" else unpack_value_plane
    code = unpack(planes[..., 0, :, :])
    for plane in range(1, planes.shape[-3]):
        code = code.mul_(2).add_(unpack(planes[..., plane, :, :]))
    return code


def pack_low(code: torch.Tensor, low_bits: int) -> torch.Tensor:
    """The low bits, token-major: code uint8 [..., P, D] -> uint8 [..., P, low_bits * D/8].

    Most significant plane first, bit d % 8 of byte d / 8.
    """
    rows = [pack_bits(((code >> shift) & 1).unflatten(-1, (-1, 8))) for shift in range(low_bits - 1, -1, -1)]
    return torch.cat(rows, dim=-1) if rows else code.new_empty(*code.shape[:-1], 0)


def unpack_low(low: torch.Tensor, low_bits: int) -> torch.Tensor:
    """fp32 [..., P, D] of the low bits: the inverse of `pack_low`, low_bits >= 1."""
    planes = unpack_bits(low.unflatten(-1, (low_bits, -1))).flatten(-2)  # [.., P, plane, D]
    code = planes[..., 0, :]
    for plane in range(1, low_bits):
        code = code * 2 + planes[..., plane, :]
    return code
