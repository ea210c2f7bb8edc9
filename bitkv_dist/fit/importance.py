"""How much attention a key channel receives: the diagonal of M, the mean over causal pairs of R_p q (R_p q)^T (TaSQ, arXiv
2610.03027), q a query before RoPE and p how far back the key lies. The error e of a key before RoPE costs q's score
(R_p q . e)^2."""

from __future__ import annotations

import torch


def importance(q: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """q fp32 [HK, G, n, D] of positions 0 .. n - 1 -> fp32 [HK, D], the mean of (R_p q_i)^2 over 0 <= p <= i and the group.

    For a pair (x, y) turned by an angle a, (x cos a - y sin a)^2 = (x^2 + y^2) / 2 + (x^2 - y^2) / 2 cos 2a - x y sin 2a, and
    the other channel has the same terms with the last two reversed. Summed over i >= p first (suffix sums), one pass over p is
    left.
    """
    half, n = len(inv_freq), q.shape[2]
    x, y, rest = q.double().split((half, half, q.shape[-1] - 2 * half), -1)
    pairs_of = torch.arange(1, n + 1, device=q.device, dtype=torch.float64)[:, None]  # keys that query i sees
    even = ((x * x + y * y) / 2 * pairs_of).sum((1, 2))  # [HK, r/2]
    angle = 2 * torch.arange(n, device=q.device, dtype=torch.float64)[:, None] * inv_freq.double()
    uneven = (suffix((x * x - y * y) / 2) * torch.cos(angle) - suffix(x * y) * torch.sin(angle)).sum(1)
    found = torch.cat((even + uneven, even - uneven, (rest * rest * pairs_of).sum((1, 2))), -1)
    return (found / (q.shape[1] * n * (n + 1) / 2)).float()


def suffix(x: torch.Tensor) -> torch.Tensor:
    """[HK, G, n, ..] -> [HK, n, ..]: entry p holds the sum over i >= p and the group."""
    return x.sum(1).flip(1).cumsum(1).flip(1)


def weights(diagonal: torch.Tensor) -> torch.Tensor:
    """w = sqrt(diag M / mean diag M), mean over a head's channels, and never 0: fp32 [HK, D]."""
    mean = diagonal.mean(-1, keepdim=True)
    relative = torch.where(mean > 0, diagonal / mean.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    return relative.sqrt().clamp(min=1e-3)
