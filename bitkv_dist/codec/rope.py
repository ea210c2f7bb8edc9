"""Rotary positions taken out of keys and put back, page by page, so that a codec sees keys as they were before RoPE.

Channel j < r/2 of a head and channel j + r/2 are a pair that position p turns by p * inv_freq[j] (the convention of all served
architectures); channels from r on are not turned. The angle of a token is that of its page's first token plus that of its place
in the page, so two small tables serve any context, and their entries do not depend on what else is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

PAGES = 1 << 14  # pages whose angles are tabulated: a million tokens in pages of 64


class Rope:
    """inv_freq fp32 [r/2]; scaling: the factor that the model puts on cosine and sine (1 but for YaRN); P page tokens."""

    def __init__(self, inv_freq: torch.Tensor, scaling: float, page_tokens: int, device: torch.device) -> None:
        self.inv_freq, self.scaling, self.page_tokens = inv_freq, scaling, page_tokens
        self.half = len(inv_freq)
        self.pages, self.places = tables(tuple(inv_freq.tolist()), page_tokens, device)

    def angles(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the tokens of some pages: pages int64 [...] -> fp32 [..., 1, P, r/2] each, for any head."""
        (c, s), (cos, sin) = (table[pages, None, None] for table in self.pages), self.places
        return c * cos - s * sin, s * cos + c * sin

    def undo(self, k: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Keys fp32 [..., HK, P, D] of the pages int64 [...] as they were before RoPE."""
        cos, sin = self.angles(pages)
        return self.turned(k, cos, -sin) / torch.full((), self.scaling, device=k.device)

    def apply(self, k: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The inverse of `undo`."""
        cos, sin = self.angles(pages)
        return self.turned(k, cos, sin) * self.scaling

    def turned(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, y, rest = k.split((self.half, self.half, k.shape[-1] - 2 * self.half), -1)
        return torch.cat((x * cos - y * sin, y * cos + x * sin, rest), -1)


def page_numbers(pages: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n]; ValueError beyond the tabulated ones."""
    if pages and max(pages) >= PAGES:
        rule = f"keys before RoPE are served in pages below {PAGES}"
        raise ValueError(f"page {max(pages)}: {rule}; use larger pages or codec planes")
    return torch.tensor(list(pages), dtype=torch.int64, device=device)


@functools.cache
def tables(inv_freq: tuple[float, ...], page_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine) of whole pages fp32 [2, PAGES, r/2] and of the places in one, fp32 [2, P, r/2]. Shared by all layers."""
    return tuple(
        torch.from_numpy(np.stack((np.cos(angle), np.sin(angle))).astype(np.float32)).to(device)
        for angle in (np.arange(PAGES)[:, None] * page_tokens * np.array(inv_freq), np.outer(np.arange(page_tokens), inv_freq))
    )


def channel_pairs(half: int, dim: int) -> torch.Tensor:
    """int64 [D/2, 2]: the pairs that RoPE turns, then those of the channels that it leaves alone."""
    turned = torch.arange(half)
    rest = torch.arange(2 * half, dim).view(-1, 2)
    return torch.cat((torch.stack((turned, turned + half), 1), rest))
