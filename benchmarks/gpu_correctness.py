"""Every Triton kernel on this GPU against its plain-torch twin: bytes and merge order exactly, floats within fp32 rounding.

    python benchmarks/gpu_correctness.py [--dry-run]

A process for each head dim, side by side: most of the time goes into compiling. A line of JSON for each kernel and dim with the
number of cases and the worst error; the exit status is 1 when one is out of bounds.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gpu_device

ARGS = gpu_device.arguments(__doc__, dim={"type": int, "help": "this head dim alone, in this process"})

import random_books  # noqa: E402
import torch  # noqa: E402

from bitkv_dist.cache_config import GRANULE_TOKENS, LANES, CacheConfig, RefineConfig  # noqa: E402
from bitkv_dist.codec.interface import HeadShape, make_codec  # noqa: E402
from bitkv_dist.codec.planes import PlanesCodec  # noqa: E402
from bitkv_dist.codec.tailored_triton import MOST_DIM  # noqa: E402
from bitkv_dist.kernels import dispatch, prefill, reference  # noqa: E402
from bitkv_dist.partial import Partial, fill_lanes, merge, reduce_lanes, tree  # noqa: E402
from bitkv_dist.rotation import layer_signs  # noqa: E402

DEVICE = gpu_device.device_of(ARGS.dry_run)
KV_HEADS = 2
DIMS = {64: 1, 80: 3, 96: 7, 128: 4, 192: 8, 256: 16}  # head dim -> query heads of a group
if ARGS.dry_run:
    DIMS = {64: 4}
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


def check_encode(dim: int) -> bool:
    """Bytes against the reference on the CPU. Half of the codecs for each dim; D = 128 takes those that are timed later."""
    wrong, cases, place = [], 0, sorted(DIMS).index(dim)
    chosen = list(CODECS)[place % 2 :: 2] if dim != 128 else ["1", "2", "4", "tiered4"]
    for name in chosen:
        config = CODECS[name]
        found, _ = codecs(config, dim, 4)
        with dispatch.forced(dispatch.REFERENCE):
            plain = make_codec(config, HeadShape(1, 0, KV_HEADS, dim, torch.float32), 0)
        kinds, x = zip(*pages(config.page_tokens, dim), strict=True)
        k = torch.cat(x).to(torch.float16 if ARGS.dry_run else torch.bfloat16)
        v = k.flip(2) if len(chosen) % 2 else k.flip(2).float()
        same = (found.encode(k, v).cpu() == plain.encode(k.cpu(), v.cpu())).flatten(1).all(1)
        differ = [kind for kind, ok in zip(kinds, same.tolist(), strict=True) if not ok]
        wrong += [f"{name} bits, D {dim}, {kind}" for kind in differ]
        cases += len(kinds)
    gpu_device.emit("correctness", kernel="encode", dim=dim, codecs=chosen, cases=cases, wrong=wrong, ok=not wrong)
    return not wrong


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def check_attend(dim: int) -> bool:
    """Partials of granules that are full, empty and partly sealed, by their log-sum-exp and normalised output."""
    good = True
    for name, config in CODECS.items():
        found, plain = codecs(config, dim, DIMS[dim])
        per_granule = GRANULE_TOKENS // config.page_tokens
        shape = (3 * per_granule, KV_HEADS, config.page_tokens, dim)
        k, v = (torch.randn(shape, device=DEVICE) + torch.randn(1, KV_HEADS, 1, dim, device=DEVICE) for _ in range(2))
        records = plain.encode(k, v).unflatten(0, (3, per_granule)).contiguous()
        valid = torch.ones(3, per_granule, dtype=torch.bool, device=DEVICE)
        valid[0, 0], valid[1], valid[2, per_granule // 2 :] = False, False, False
        poisoned = torch.where(valid[:, :, None, None], records, 255)
        q = torch.randn(KV_HEADS, 1, DIMS[dim], dim, device=DEVICE) * 4.8 / math.sqrt(dim)
        mine, reads = found.attend(found.prepare(q), poisoned, valid)
        theirs, wanted_reads = plain.attend(plain.prepare(q), records, valid)
        refined = int(reads.refined) == int(wanted_reads.refined)
        empty = bool(torch.isneginf(mine.m[1]).all()) and not mine.l[1].any() and not mine.o[1].any()
        scores, outputs = 0.0, 0.0
        for granule in (0, 2):
            a, b = mine.rows(granule), theirs.rows(granule)
            scores = max(scores, (a.log_sum_exp() - b.log_sum_exp()).abs().max().item())
            outputs = max(outputs, relative(a.normalised(), b.normalised()))
        ok = scores < SCORES and outputs < OUTPUTS and refined and empty
        gpu_device.emit("correctness", kernel="attend", dim=dim, group=DIMS[dim], bits=name, log_sum_exp=scores, output=outputs,
                        refined_equal=refined, empty_is_empty=empty, ok=ok)  # fmt: skip
        good = good and ok
    return good


def check_words(dim: int) -> bool:
    """Codec tailored with random books: records against the reference's, partials of granules as in `check_attend`, and as many
    granules by a table of two lanes."""
    if dim > MOST_DIM:
        return True
    with tempfile.TemporaryDirectory() as folder:
        path = random_books.write(Path(folder, "books"), KV_HEADS, dim)
        config = CacheConfig("tailored", 1, 1, page_tokens=128 if dim == 128 else 64, calibration=path)
        found, plain = codecs(config, dim, DIMS[dim])
    per_granule = GRANULE_TOKENS // config.page_tokens
    k, v = torch.randn(2, 3 * per_granule, KV_HEADS, config.page_tokens, dim, device=DEVICE)
    numbers = range(1, 1 + len(k))
    records = plain.encode(k, v, numbers)
    same = torch.equal(records, found.encode(k, v, numbers))
    records = records.unflatten(0, (3, per_granule)).contiguous()
    valid = torch.zeros(3, per_granule, dtype=torch.bool, device=DEVICE)
    valid[0, 1:], valid[2, : per_granule // 2] = True, True
    q = torch.randn(KV_HEADS, 1, DIMS[dim], dim, device=DEVICE) * 4.8 / math.sqrt(dim)
    mine, _ = found.attend(found.prepare(q), torch.where(valid[:, :, None, None], records, 255), valid)
    wanted, _ = plain.attend(plain.prepare(q), records, valid)
    empty = bool(torch.isneginf(mine.m[1]).all()) and not mine.l[1].any() and not mine.o[1].any()
    spans = torch.tensor([[1, 3 * per_granule - 1]], device=DEVICE)
    offsets = torch.arange(3, device=DEVICE)[None] * records[0].numel()
    (root,), _ = found.attend_table(q[None], found.table(records, offsets, found.bounds(spans, 2)), 1)
    valid.fill_(True).view(-1)[[0, -1]] = False
    whole, _ = plain.attend(q, records, valid)
    pairs = [(mine.rows(0), wanted.rows(0)), (mine.rows(2), wanted.rows(2))]
    pairs.append((root.rows(0), reduce_lanes(fill_lanes(whole, torch.arange(3, device=DEVICE), 2), 1).rows(0)))
    scores = max((a.log_sum_exp() - b.log_sum_exp()).abs().max().item() for a, b in pairs)
    outputs = max(relative(a.normalised(), b.normalised()) for a, b in pairs)
    ok = same and empty and scores < SCORES and outputs < SCORES
    gpu_device.emit("correctness", kernel="words", dim=dim, group=DIMS[dim], bytes_equal=same, log_sum_exp=scores,
                    output=outputs, empty_is_empty=empty, ok=ok)  # fmt: skip
    return ok


def check_tree(dim: int) -> bool:
    """Values against the plain tree, bits against itself split among ranks."""
    worst, bits = 0.0, True
    for count in (1, 31) if ARGS.dry_run else (1, 31, 257, 2048):
        part = Partial(8 * torch.randn(count, 2, 1, 3), torch.rand(count, 2, 1, 3) + 0.5, torch.randn(count, 2, 1, 3, dim))
        hole = torch.arange(part.m.numel()).view_as(part.m) % 7 == 3
        part = Partial(part.m.masked_fill(hole, -math.inf), part.l.masked_fill(hole, math.nan), part.o)
        part, index = Partial(*(t.to(DEVICE) for t in part)), torch.arange(count, device=DEVICE)
        width = 32 if ARGS.dry_run else LANES
        mine, wanted = tree(part, index, width, 1), reduce_lanes(fill_lanes(part, index, width), 1)
        worst = max(worst, relative(mine.normalised().nan_to_num(), wanted.normalised().nan_to_num()))
        for nodes in (2, 8):
            again = tree(tree(part, index, width, nodes), torch.arange(nodes, device=DEVICE), nodes, 1)
            bits = bits and all(torch.equal(a, b) for a, b in zip(again, mine, strict=True))
    gpu_device.emit("correctness", kernel="tree", dim=dim, output=worst, same_bits=bits, ok=bits and worst < 1e-5)
    return bits and worst < 1e-5


def check_exact(dim: int) -> bool:
    """The exact window, in the types of models, as long as it gets, by a count on the device too."""
    worst, kernels = 0.0, dispatch.native(DEVICE)
    for count in (1, 129, 384):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if ARGS.dry_run and (dtype == torch.bfloat16 or count == 384):
                continue
            rows = torch.randn(2, KV_HEADS, 400, dim, device=DEVICE).to(dtype)
            q = torch.randn(KV_HEADS, 1, DIMS[dim], dim, device=DEVICE) / math.sqrt(dim)
            wanted = Partial(*reference.attend_dense(q, *rows[:, :, :count].float().unsqueeze(1), None)).rows(0)
            for mine in (
                Partial(*kernels.attend_exact(q, rows[:, :, :count])),
                Partial(*kernels.attend_exact(q, rows, torch.tensor(count, device=DEVICE))),
            ):
                worst = max(worst, relative(mine.normalised(), wanted.normalised()))
                worst = max(worst, (mine.log_sum_exp() - wanted.log_sum_exp()).abs().max().item())
    gpu_device.emit("correctness", kernel="exact", dim=dim, error=worst, ok=worst < SCORES)
    return worst < SCORES


def check_ends(dim: int) -> bool:
    """Query codes exactly, and the concluded output of a step."""
    kernels = dispatch.native(DEVICE)
    signs = layer_signs(7, 3, 0, KV_HEADS, "K", dim).to(DEVICE)
    q = torch.randn(2, KV_HEADS, 1, DIMS[dim], dim, device=DEVICE)
    mine, wanted = kernels.quantize_query(q, signs), reference.quantize_query(q, signs)
    codes = torch.equal(mine.codes.float(), wanted.codes) and torch.equal(mine.rotated, wanted.rotated)
    shape = (KV_HEADS, 1, DIMS[dim])
    a, b = (Partial(torch.randn(shape), torch.rand(shape) + 1, torch.randn(*shape, dim)) for _ in range(2))
    a, b = (Partial(*(t.to(DEVICE) for t in part)) for part in (a, b))
    back = a._replace(o=reference.rotate_back(a.o, signs[:, None, None, :]))
    error = relative(kernels.conclude(a, b, signs), merge(back, b).normalised())
    gpu_device.emit("correctness", kernel="ends", dim=dim, codes_equal=codes, output=error, ok=codes and error < 1e-5)
    return codes and error < 1e-5


def check_prompt(dim: int) -> bool:
    """Causal attention of a prompt's chunks by torch's fused kernels, in the types of models: values, and that nothing of the
    size of chunk x tokens lies in memory."""
    good, group = True, DIMS[dim]
    shapes = ((1, 9), (64, 64), (40, 129)) if ARGS.dry_run else ((1, 513), (512, 512), (129, 2048), (512, 8192))
    for dtype, bound in ((torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        worst, peak_bytes = 0.0, None
        for chunk, tokens in shapes:
            q = torch.randn(KV_HEADS, group, chunk, dim, device=DEVICE).to(dtype)
            k, v = (torch.randn(KV_HEADS, tokens, dim, device=DEVICE).to(dtype) for _ in range(2))
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            mine = prefill.masked_sdpa(q, k, v, dim**-0.5)
            if DEVICE.type == "cuda":
                peak_bytes = torch.cuda.max_memory_allocated() - held  # of the last shape, the largest
            worst = max(worst, relative(mine.float(), prefill.dense(q.float(), k.float(), v.float(), dim**-0.5)))
        scores_bytes = KV_HEADS * group * chunk * tokens * q.element_size()
        # In fp32 the keys are repeated for every query head, in half precision nothing is.
        lean = peak_bytes is None or dtype == torch.float32 or peak_bytes < scores_bytes / 2
        gpu_device.emit("correctness", kernel="prompt", dim=dim, group=group, type=str(dtype), error=worst,
                        peak_bytes=peak_bytes, scores_bytes=scores_bytes, ok=worst < bound and lean)  # fmt: skip
        good = good and worst < bound and lean
    return good


def each_dim() -> bool:
    """A process for each head dim; what they print is passed on when they end."""
    flags = ["--dry-run"] if ARGS.dry_run else []
    commands = [[sys.executable, __file__, "--dim", str(dim), *flags] for dim in DIMS]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        print(process.communicate()[0], end="", flush=True)
    return not any(process.returncode for process in processes)


CHECKS = check_encode, check_attend, check_words, check_tree, check_exact, check_ends, check_prompt


def one_dim(dim: int) -> bool:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode(), gpu_device.kernels_of(ARGS.dry_run):
        return all([check(dim) for check in CHECKS])


if __name__ == "__main__":
    sys.exit(0 if (one_dim(ARGS.dim) if ARGS.dim else each_dim()) else "a kernel differs from the reference")
