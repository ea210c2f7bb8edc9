"""Records, queries and tables for the tests of the Triton attention kernels, and what their outputs are compared with."""

import torch
from cpu_pages import Pages, signs

from bitkv_dist.codec.planes import NOISE
from bitkv_dist.kernels import reference, triton


def layout(pages: Pages) -> triton.Layout:
    told = pages.layout
    pairs = (tuple(getattr(told, name)) for name in ("bits", "scan_bits", "planes", "scan", "full", "low", "centroid"))
    return triton.Layout(told.tokens, told.dim, told.kv_heads, told.pages, told.record_bytes, *pairs)


def refinement(pages: Pages, rule: reference.Selection | None) -> triton.Refinement:
    if rule is None:
        return triton.Refinement(False, False, 0, 0.0, *pages.noise())
    return triton.Refinement(True, rule.group, rule.min_tokens, rule.value, *pages.noise())


def wanted(
    pages: Pages, q: torch.Tensor, records: torch.Tensor, valid: torch.Tensor, rule: reference.Selection | None
) -> reference.Attended:
    query = reference.quantize_query(q, signs("K", pages.dim))
    low = [bits - scan_bits for bits, scan_bits in pages.depth.values()]
    return reference.attend(query, pages.load(records, "K"), pages.load(records, "V"), valid, *low, NOISE, rule)


def poison(records: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """What is not a valid page holds NaN scales and all-ones words."""
    return torch.where(valid[:, :, None, None], records, 255)


def assert_same_attention(found, expected, output: float = 2e-4) -> None:
    """Partials (m, l, o) say the same; the base m of ours is not the largest score. Empty ones are (-inf, 0, 0)."""
    m, l, o = found
    empty = torch.isinf(expected[0])
    assert torch.equal(torch.isinf(m), empty) and not l[empty].any() and not o[empty].any()
    torch.testing.assert_close((m + l.log2())[~empty], (expected[0] + expected[1].log2())[~empty], atol=3e-5, rtol=0)
    mine, theirs = o[~empty] / l[~empty].unsqueeze(-1), expected[2][~empty] / expected[1][~empty].unsqueeze(-1)
    assert torch.isfinite(mine).all()
    assert ((mine - theirs).norm() / theirs.norm().clamp(min=1e-30)).item() < output
