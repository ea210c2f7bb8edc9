"""One layer's decode attention on this GPU, of the shape of Llama-3.1-8B (32 query heads, 8 KV heads, D = 128), and encoding.

    python benchmarks/gpu_decode.py --kind 1|2|4|tiered4|tailored|sdpa|flashinfer|encode [--dry-run]

Caches are walked in turn, more of them than the last cache before memory holds. Each step runs as a CUDA graph where it can be
captured, so that launches are not what is timed; `timed` says how. `tailored` takes random codebooks, whose words are all as
frequent: the worst for caches. `bytes` is what a step reads of the cache, `share` the rate
against a copy measured in the same process. A line of JSON for each context.
"""

from __future__ import annotations

import functools
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gpu_device

KINDS = ("1", "2", "4", "tiered4", "tailored", "sdpa", "flashinfer", "encode")
ARGS = gpu_device.arguments(__doc__, kind={"choices": KINDS, "required": True})

import random_books  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from bitkv_dist.cache_config import GRANULE_TOKENS, LANES, CacheConfig, RefineConfig  # noqa: E402
from bitkv_dist.codec.interface import Codec, HeadShape, make_codec  # noqa: E402
from bitkv_dist.partial import empty  # noqa: E402

DEVICE = gpu_device.device_of(ARGS.dry_run)
HEADS, KV_HEADS, DIM = (4, 2, 64) if ARGS.dry_run else (32, 8, 128)
CONTEXTS = (1024,) if ARGS.dry_run else (4096, 32768, 131072, 524288, 1048576)
TYPE = torch.float16 if ARGS.dry_run else torch.bfloat16  # the interpreter's bfloat16 product is wrong
CODECS = {
    **{str(bits): CacheConfig(key_bits=bits, value_bits=bits) for bits in (1, 2, 4)},
    "tiered4": CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=RefineConfig()),
}
Step = Callable[[], object]


def codec_of(kind: str) -> tuple[Codec, CacheConfig]:
    heads = HeadShape(1, 0, KV_HEADS, DIM, TYPE, DEVICE, HEADS // KV_HEADS)
    if kind in CODECS:
        return make_codec(CODECS[kind], heads, 0), CODECS[kind]
    with tempfile.TemporaryDirectory() as folder:  # the file is read when the codec is made
        path = random_books.write(Path(folder, "books"), KV_HEADS, DIM)
        config = CacheConfig("tailored", 1, 1, calibration=path)
        return make_codec(config, heads, 0), config


def packed_steps(kind: str, context: int) -> tuple[list[Step], int]:
    """Steps over caches of their own, and the bytes that one reads."""
    codec, config = codec_of(kind)
    assert codec.unserved is None, f"not served by the kernels: {codec.unserved}"
    per_granule, granules = GRANULE_TOKENS // config.page_tokens, context // GRANULE_TOKENS
    distinct = min(granules, 8)  # random pages are repeated: their content does not change the work
    k, v = (torch.randn(distinct * per_granule, KV_HEADS, config.page_tokens, DIM, device=DEVICE) for _ in range(2))
    numbers = [range(len(k))] if codec.positional else []
    some = codec.encode(k.to(TYPE), v.to(TYPE), *numbers).unflatten(0, (distinct, per_granule))
    count = gpu_device.sets_beyond_cache(granules * some[0].numel(), DEVICE)
    caches = [some.repeat(-(-granules // distinct), 1, 1, 1)[:granules].contiguous() for _ in range(count)]
    bounds = codec.bounds(torch.tensor([[0, granules * per_granule]], device=DEVICE), LANES)
    offsets = torch.arange(granules, device=DEVICE)[None] * some[0].numel()
    read = codec.count_reads(granules * per_granule, 1, KV_HEADS * codec.refined_of(context) if config.refines else 0)
    q = torch.randn(1, KV_HEADS, 1, HEADS // KV_HEADS, DIM, device=DEVICE) / math.sqrt(DIM)

    nothing = empty(tuple(q.shape[1:-1]), DIM, DEVICE)  # of exact tokens

    def step(records: torch.Tensor) -> Step:
        table = codec.table(records, offsets, bounds)

        def run() -> torch.Tensor:
            (nodes,), _ = codec.attend_table(codec.prepare(q), table, 1)
            return codec.conclude_table(nodes.rows(0), nothing)

        return run

    return [step(records) for records in caches], read.bits // 8


def sdpa_steps(context: int) -> tuple[list[Step], int]:
    """Flash attention of torch, the group laid out as query rows, so that each key is read once."""
    each = 2 * KV_HEADS * context * DIM * TYPE.itemsize
    count = gpu_device.sets_beyond_cache(each, DEVICE)
    caches = [torch.randn(2, 1, KV_HEADS, context, DIM, device=DEVICE, dtype=TYPE) for _ in range(count)]
    q = torch.randn(1, KV_HEADS, HEADS // KV_HEADS, DIM, device=DEVICE, dtype=TYPE)

    def step(kv: torch.Tensor) -> Step:
        def run() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if DEVICE.type == "cuda" else SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, kv[0], kv[1])

        return run

    return [step(kv) for kv in caches], each


def flashinfer_steps(context: int, dtype: torch.dtype) -> tuple[list[Step], int]:
    """FlashInfer's decode of one request, keys and values [T, HK, D] in `dtype`."""
    import flashinfer

    each = 2 * KV_HEADS * context * DIM * dtype.itemsize
    count = gpu_device.sets_beyond_cache(each, DEVICE)
    caches = [torch.randn(2, context, KV_HEADS, DIM, device=DEVICE, dtype=TYPE).to(dtype) for _ in range(count)]
    q = torch.randn(HEADS, DIM, device=DEVICE, dtype=TYPE)

    def step(kv: torch.Tensor) -> Step:
        return lambda: flashinfer.single_decode_with_kv_cache(q, kv[0], kv[1], kv_layout="NHD", use_tensor_cores=True)

    return [step(kv) for kv in caches], each


def report(kind: str, context: int, steps: list[Step], read_bytes: int, rate_gb_s: float) -> None:
    calls, ways = zip(*(gpu_device.graphed(step) for step in steps), strict=True)
    median, least, most = gpu_device.time_ms(calls)
    eager, _, _ = gpu_device.time_ms(steps)
    achieved = read_bytes / median / 1e6
    gpu_device.emit(
        "decode", kind=kind, context=context, ms=median, least_ms=least, most_ms=most, eager_ms=eager, timed=ways[0],
        sets=len(steps), bytes=read_bytes, gb_s=achieved, copy_gb_s=rate_gb_s, share=achieved / rate_gb_s,
    )  # fmt: skip


def time_decode(kind: str) -> None:
    rate = gpu_device.copy_gb_s(DEVICE)
    for context in CONTEXTS:
        if kind == "sdpa":
            report("sdpa bf16", context, *sdpa_steps(context), rate)
        elif kind != "flashinfer":
            report(kind, context, *packed_steps(kind, context), rate)
        else:
            for name, dtype in (("flashinfer bf16", TYPE), ("flashinfer fp8", torch.float8_e4m3fn)):
                report(name, context, *flashinfer_steps(context, dtype), rate)


def time_encode() -> None:
    """Pages as a prompt seals them: 4,096 tokens of all KV heads at once."""
    rate = gpu_device.copy_gb_s(DEVICE)
    for name in CODECS:
        codec, config = codec_of(name)
        pages = 1 if ARGS.dry_run else 4096 // config.page_tokens
        k, v = (torch.randn(pages, KV_HEADS, config.page_tokens, DIM, device=DEVICE).to(TYPE) for _ in range(2))
        encode = functools.partial(codec.encode, k, v)
        median, least, most = gpu_device.time_ms([encode])
        tokens, moved = pages * config.page_tokens, 2 * k.numel() * k.element_size() + pages * KV_HEADS * codec.record_bytes
        gpu_device.emit(
            "encode", kind=name, tokens=tokens, ms=median, least_ms=least, most_ms=most, tokens_per_s=tokens / median * 1e3,
            gb_s=moved / median / 1e6, copy_gb_s=rate,
        )  # fmt: skip


if __name__ == "__main__":
    if ARGS.kind == "flashinfer":
        try:
            import flashinfer  # noqa: F401
        except ImportError:
            gpu_device.emit("decode", kind="flashinfer", skipped="not installed")
            sys.exit()
    with torch.inference_mode(), gpu_device.kernels_of(ARGS.dry_run):
        time_encode() if ARGS.kind == "encode" else time_decode(ARGS.kind)
