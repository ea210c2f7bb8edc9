"""Every Triton kernel on this GPU against its plain-torch twin: bytes and merge order exactly, floats within fp32 rounding.

    python benchmarks/gpu_correctness.py [--dry-run]

A line of JSON for each kernel with the number of cases and the worst error; the exit status is 1 when one is out of bounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import gpu_device

ARGS = gpu_device.arguments(__doc__)

import torch  # noqa: E402

from bitkv_dist.codec.interface import HeadShape, make_codec  # noqa: E402
from bitkv_dist.codec.planes import PlanesCodec  # noqa: E402
from bitkv_dist.config import GRANULE_TOKENS, LANES, CacheConfig, RefineConfig  # noqa: E402
from bitkv_dist.kernels import dispatch, reference  # noqa: E402
from bitkv_dist.partial import Partial, fill_lanes, reduce_lanes, tree  # noqa: E402

DEVICE = gpu_device.device_of(ARGS.dry_run)
KV_HEADS = 2
DIMS = (64,) if ARGS.dry_run else (64, 80, 96, 128, 192, 256)
GROUPS = (4,) if ARGS.dry_run else (1, 3, 4, 7, 8, 16)
SCORES = 1e-4  # base 2
OUTPUTS = 2e-3  # relative to the output's norm: integer weights of two backends may differ by one
CODECS = {
    "1": CacheConfig(key_bits=1, value_bits=1),
    "2": CacheConfig(key_bits=2, value_bits=2),
    "3": CacheConfig(key_bits=3, value_bits=3, page_tokens=64),
    "4": CacheConfig(key_bits=4, value_bits=4),
    "4 / 2": CacheConfig(key_bits=4, value_bits=2, page_tokens=64),
    "tiered4": CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=RefineConfig()),
    "tiered4-2": CacheConfig(key_bits=4, value_bits=4, scan_bits=2, refine=RefineConfig()),
    "tiered4 per head": CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=RefineConfig(granularity="head")),
}
if ARGS.dry_run:
    CODECS = {name: CODECS[name] for name in ("1", "tiered4")}


def pages(tokens: int, dim: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Pages [1, HK, P, D] of every kind that has gone wrong somewhere."""
    x = torch.randn(1, KV_HEADS, tokens, dim, device=DEVICE)
    yield "normal", x
    yield "with an offset", x + 200 * (torch.arange(dim, device=DEVICE) % 32 == 3)
    if ARGS.dry_run:
        return
    yield "constant", torch.full_like(x, 2.0)
    yield "zeros", torch.where(x > 0, 0.0, -0.0)
    yield "tiny", x * 1e-30
    yield "subnormal", x * 1e-40
    yield "huge", x.sign() * 40_000
    yield "overflowing", x * 1e20
    yield "outliers", torch.where(torch.rand_like(x) < 0.02, 60 * x, x)


def codecs(config: CacheConfig, dim: int, group: int) -> tuple[PlanesCodec, PlanesCodec]:
    """The codec of the kernels and that of the reference."""
    heads = HeadShape(1, 0, KV_HEADS, dim, torch.float32, DEVICE, group)
    with dispatch.forced(dispatch.REFERENCE):
        plain = make_codec(config, heads, 0)
    found = make_codec(config, heads, 0)
    assert type(found) is not type(plain) and found.unserved is None, f"not served by the kernels: {found.unserved}"
    return found, plain


def check_encode() -> bool:
    """Bytes; bfloat16 and float32 pages."""
    wrong, cases = [], 0
    for dim in DIMS:
        for name, config in CODECS.items():
            found, plain = codecs(config, dim, 4)
            kinds, x = zip(*pages(config.page_tokens, dim), strict=True)
            for dtype in (torch.float32, torch.bfloat16):
                k = torch.cat(x).to(dtype)
                v = k.flip(2)
                same = (found.encode(k, v) == plain.encode(k, v)).flatten(1).all(1)
                wrong += [f"{name} bits, D {dim}, {kind}, {dtype}" for kind, ok in zip(kinds, same.tolist(), strict=True) if not ok]
                cases += len(kinds)
    gpu_device.emit("correctness", kernel="encode", cases=cases, wrong=wrong[:20], wrong_cases=len(wrong), ok=not wrong)
    return not wrong


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def check_attend() -> bool:
    """Partials of granules that are full, empty and partly sealed, by their log-sum-exp and normalised output."""
    good = True
    for name, config in CODECS.items():
        scores, outputs, cases, refined = 0.0, 0.0, 0, True
        for case, dim in enumerate(DIMS):
            group = GROUPS[case % len(GROUPS)]
            found, plain = codecs(config, dim, group)
            per_granule = GRANULE_TOKENS // config.page_tokens
            shape = (3 * per_granule, KV_HEADS, config.page_tokens, dim)
            k, v = (torch.randn(shape, device=DEVICE) + torch.randn(1, KV_HEADS, 1, dim, device=DEVICE) for _ in range(2))
            records = plain.encode(k, v).unflatten(0, (3, per_granule)).contiguous()
            valid = torch.ones(3, per_granule, dtype=torch.bool, device=DEVICE)
            valid[0, 0], valid[1], valid[2, per_granule // 2 :] = False, False, False
            poisoned = torch.where(valid[:, :, None, None], records, 255)
            q = torch.randn(KV_HEADS, 1, group, dim, device=DEVICE) * 4.8 / math.sqrt(dim)
            mine, reads = found.attend(found.prepare(q), poisoned, valid)
            theirs, wanted_reads = plain.attend(plain.prepare(q), records, valid)
            refined = refined and int(reads.refined) == int(wanted_reads.refined)
            good = good and bool(torch.isneginf(mine.m[1]).all()) and not mine.l[1].any() and not mine.o[1].any()
            for granule in (0, 2):
                a, b = mine.rows(granule), theirs.rows(granule)
                scores = max(scores, (a.log_sum_exp() - b.log_sum_exp()).abs().max().item())
                outputs = max(outputs, relative(a.normalised(), b.normalised()))
                cases += 1
        ok = scores < SCORES and outputs < OUTPUTS and refined
        gpu_device.emit("correctness", kernel="attend", bits=name, cases=cases, log_sum_exp=scores, output=outputs,
                        refined_equal=refined, ok=ok)  # fmt: skip
        good = good and ok
    return good


def check_tree() -> bool:
    """Values against the plain tree, bits against itself split among ranks."""
    worst, bits = 0.0, True
    for count in (1, 31) if ARGS.dry_run else (1, 31, 257, 2048):
        part = Partial(8 * torch.randn(count, 2, 1, 3), torch.rand(count, 2, 1, 3) + 0.5, torch.randn(count, 2, 1, 3, 80))
        hole = torch.arange(part.m.numel()).view_as(part.m) % 7 == 3
        part = Partial(part.m.masked_fill(hole, -math.inf), part.l.masked_fill(hole, math.nan), part.o)
        part, index = Partial(*(t.to(DEVICE) for t in part)), torch.arange(count, device=DEVICE)
        width = 32 if ARGS.dry_run else LANES
        mine, wanted = tree(part, index, width, 1), reduce_lanes(fill_lanes(part, index, width), 1)
        worst = max(worst, relative(mine.normalised().nan_to_num(), wanted.normalised().nan_to_num()))
        for nodes in (2, 8):
            again = tree(tree(part, index, width, nodes), torch.arange(nodes, device=DEVICE), nodes, 1)
            bits = bits and all(torch.equal(a, b) for a, b in zip(again, mine, strict=True))
    gpu_device.emit("correctness", kernel="tree", output=worst, same_bits=bits, ok=bits and worst < 1e-5)
    return bits and worst < 1e-5


def check_exact() -> bool:
    """The exact window, in the types of models, as long as it gets and empty."""
    worst = 0.0
    kernels = dispatch.native(DEVICE)
    for dim in DIMS:
        for count in (1, 129, 384):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                if ARGS.dry_run and (dtype == torch.bfloat16 or count == 384):
                    continue
                rows = torch.randn(2, KV_HEADS, 400, dim, device=DEVICE).to(dtype)[:, :, :count]
                q = torch.randn(KV_HEADS, 1, 5, dim, device=DEVICE) / math.sqrt(dim)
                mine = Partial(*kernels.attend_exact(q, rows))
                wanted = Partial(*reference.attend_dense(q, *rows.float().unsqueeze(1), None)).rows(0)
                worst = max(worst, relative(mine.normalised(), wanted.normalised()))
                worst = max(worst, (mine.log_sum_exp() - wanted.log_sum_exp()).abs().max().item())
    gpu_device.emit("correctness", kernel="exact", error=worst, ok=worst < SCORES)
    return worst < SCORES


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode(), gpu_device.kernels_of(ARGS.dry_run):
        checks = [check() for check in (check_encode, check_attend, check_tree, check_exact)]
    sys.exit(0 if all(checks) else "a kernel differs from the reference")
