"""How much energy the top S planes of a B-bit mid-rise code lose on normal data: the table NOISE of bitkv_dist/codec/planes.py.

    python benchmarks/code_noise.py

Prints r^2 / (D a_S^2) for D = 64 and D = 128, its mean and the entry in use; the last line is one JSON object.
"""

from __future__ import annotations

import json

import torch

from bitkv_dist.codec.planes import NOISE
from bitkv_dist.kernels import reference

VECTORS = 50_000


def lost_energy(dim: int, bits: int, scan_bits: int) -> float:
    """Mean of |z - a level|^2 / (D a^2) over normal vectors z of `dim` elements."""
    z = torch.randn(VECTORS, dim, generator=torch.Generator().manual_seed(dim))
    codes = reference.quantize(z, bits, scan_bits)
    scale = codes.scan.float().unsqueeze(-1)
    level = (codes.code >> (bits - scan_bits)).float() * 2 - ((1 << scan_bits) - 1)
    lost = (z - level * scale * reference.level_unit(scan_bits)).square().sum(-1)
    return (lost / (dim * scale.squeeze(-1).square())).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    print("scanned  stored    D=64   D=128    mean  in use")
    for (scan_bits, bits), used in NOISE.items():
        small, large = (lost_energy(dim, bits, scan_bits) for dim in (64, 128))
        rows.append({"scan_bits": scan_bits, "bits": bits, "d64": small, "d128": large, "used": used})
        print(f"{scan_bits:7d} {bits:7d} {small:7.4f} {large:7.4f} {(small + large) / 2:7.4f} {used:7.4f}")
    print(json.dumps({"vectors": VECTORS, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
