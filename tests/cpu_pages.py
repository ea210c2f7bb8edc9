"""Page records for the tests of the C++ kernels, and the fixture that runs a test once per instruction set."""

import functools
import math

import pytest
import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.planes import NOISE, page_layout
from bitkv_dist.kernels import cpu, reference
from bitkv_dist.rotation import layer_signs

KV_HEADS = 2
KINDS = {  # of pages: what becomes of normal numbers [.., P, D]
    "normal": lambda x: x,
    "outliers": lambda x: torch.where(torch.rand_like(x) < 0.02, 60 * x, x) + 200 * (torch.arange(x.shape[-1]) % 32 == 3),
    "constant": lambda x: torch.full_like(x, 2.0),
    "rows": lambda x: x[..., :1].expand_as(x),
    "one ulp off": lambda x: torch.full_like(x, 2.0).index_fill_(-1, torch.tensor([5]), 2.0 + 2**-22),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x.sign() * 40_000,
    "overflowing": lambda x: x * 1e20,
    "spread": lambda x: x * torch.logspace(-9, 6, x.shape[-2])[:, None],
    "some rows zero": lambda x: torch.where(torch.arange(x.shape[-2])[:, None] % 3 == 0, 0.0, x),
}


@pytest.fixture(params=[isa for isa in cpu.ISAS if isa != "avx512bf16"], autouse=True)  # whose kernels for pages are avx512's
def isa(request, monkeypatch):
    """Selects the instruction set; what a kernel is given to write into holds NaN."""
    try:
        cpu.choose(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    allocate = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, **kind: (found := allocate(*shape, **kind)).fill_(math.nan if found.is_floating_point() else 99),
    )
    yield request.param
    cpu.choose(None)


@functools.cache
def signs(side: str, dim: int) -> torch.Tensor:
    return layer_signs(7, 3, 0, KV_HEADS, side, dim)


class Pages:
    """One shape of page records: how the kernels are told of it, and how the reference writes and reads it."""

    def __init__(self, dim: int, tokens: int, keys: tuple[int, int], values: tuple[int, int]) -> None:
        self.dim, self.tokens, self.depth = dim, tokens, {"K": keys, "V": values}
        scanned = max(keys[1], values[1])
        self.record = page_layout(
            CacheConfig(key_bits=keys[0], value_bits=values[0], scan_bits=scanned, page_tokens=tokens), dim
        )
        offsets = {name: field.offset for name, field in self.record.fields.items()}
        pairs = {
            name: tuple(offsets.get(side + name, 0) for side in "KV") for name in ("planes", "scan", "full", "low", "centroid")
        }
        bits, scan_bits = zip(keys, values, strict=True)
        self.layout = cpu.Layout(
            tokens, dim, KV_HEADS, 512 // tokens, self.record.bytes, bits=bits, scan_bits=scan_bits, **pairs
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor, unbiased: bool = False) -> torch.Tensor:
        records = torch.zeros(*k.shape[:2], self.record.bytes, dtype=torch.uint8)
        for side, x in (("K", k), ("V", v)):
            plane = reference.encode(x, signs(side, self.dim), *self.depth[side], side, unbiased and side == "K")
            arrays = {side + name: part for name, part in plane._asdict().items() if side + name in self.record.fields}
            self.record.write(records, **arrays)
        return records

    def load(self, records: torch.Tensor, side: str) -> reference.Plane:
        found = {
            name: self.record.view(records, side + name)
            for name in reference.Plane._fields
            if side + name in self.record.fields
        }
        return reference.Plane(**{"low": records[..., None, :0], "full": found["scan"]} | found)

    def random(self, granules: int) -> torch.Tensor:
        """Records of random granules [n, pages, HK, bytes]; keys have a mean, so that centroids count."""
        k = torch.randn(granules * self.layout.pages, KV_HEADS, self.tokens, self.dim) + 2 * torch.randn(
            1, KV_HEADS, 1, self.dim
        )
        v = torch.randn_like(k)
        v[0, 0, 3], k[1, 1, 5] = 0.0, 2.0
        return self.encode(k, v).unflatten(0, (granules, -1)).contiguous()

    def noise(self) -> tuple[float, float]:
        bits, scan_bits = self.depth["K"]
        return 0.5 * math.log(2) * NOISE[scan_bits, bits], 0.5 * math.log(2) * NOISE[bits, bits]


def queries(dim: int, positions: int, group: int) -> torch.Tensor:
    return torch.randn(KV_HEADS, positions, group, dim) * 4.8 / math.sqrt(dim)


def both(pages: Pages, q: torch.Tensor, records: torch.Tensor, valid: torch.Tensor, rule: reference.Selection | None):
    """(reference.Attended, what cpu.attend returns) for the same records; ours finds NaN in pages that are not valid."""
    query = reference.quantize_query(q, signs("K", pages.dim))
    low = [bits - scan_bits for bits, scan_bits in pages.depth.values()]
    wanted = reference.attend(query, pages.load(records, "K"), pages.load(records, "V"), valid, *low, NOISE, rule)
    refinement = cpu.Refinement(
        rule is not None, *((rule.group, rule.min_tokens, rule.value) if rule else (0, 0, 0.0)), *pages.noise()
    )
    poisoned = torch.where(valid[:, :, None, None], records, 255)
    return wanted, cpu.attend(pages.layout, cpu.quantize_query(q, signs("K", pages.dim)), poisoned, valid, refinement)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()
