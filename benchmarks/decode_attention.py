"""One decode step of attention over a long packed cache, on CPU, against the ways to ask torch for it.

    python benchmarks/decode_attention.py --context 131072 --heads 32 --kv-heads 8 --head-dim 128 --bits 1 --threads 1 --json -
    python benchmarks/decode_attention.py --context 131072 --heads 32 --kv-heads 8 --head-dim 128 --bits 4 --refine 0.05
    --threads 2

Checks the result against the plain-torch reference first, measures the streaming read rate of the machine in the same run,
times everything interleaved over several sets of inputs that exceed the last-level cache together, and prints medians with
spread. `fraction_of_stream` is (bytes of the packed cache / streaming rate) / time: 1 would be memory speed. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig, RefineConfig
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.partial import Partial, tree

PEERS = ("sdpa-bf16", "sdpa-fp32", "sdpa-gqa-bf16", "matmul-bf16", "matmul-fp32")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=131072, help="tokens in the cache, a multiple of 512")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bits", "--stored-bits", dest="bits", type=int, default=1)
    parser.add_argument("--scan-bits", type=int, default=1, help="planes read for every token when --refine is given")
    parser.add_argument("--refine", type=float, default=None, help="share of tokens re-scored with all their planes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", default=",".join(PEERS[:2] + PEERS[3:]), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs, walked in turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", choices=sorted(cpu.ISAS))
    parser.add_argument(
        "--json", help="also write the JSON object to this file; - is the last line of the output, which is always printed"
    )
    args = parser.parse_args()
    if args.context % GRANULE_TOKENS:
        parser.error(
            f"--context {args.context}: must be a multiple of {GRANULE_TOKENS}; take {-(-args.context // GRANULE_TOKENS) * GRANULE_TOKENS}"
        )
    return args


def stream_gb_s(threads: int) -> float:
    """Streaming read rate of this many threads: a sum over a tensor far larger than the cache, best of seven."""
    data = torch.ones(1 << 28, dtype=torch.int8).view(torch.int64)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.numel() * 8 / min(times) / 1e9


class Ours:
    """A filled packed cache of one layer and sequence, as the engine holds it, and one step over it."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        refine = RefineConfig(value=args.refine) if args.refine is not None else None
        self.config = CacheConfig(
            key_bits=args.bits, value_bits=args.bits, scan_bits=args.scan_bits if refine else None, refine=refine
        )
        self.codec = make_codec(self.config, HeadShape(1, 0, args.kv_heads, args.head_dim, torch.float32), 0)
        self.granules = args.context // GRANULE_TOKENS
        generator = torch.Generator().manual_seed(seed)
        distinct = min(self.granules, 8)  # random pages are repeated: their content does not change the work
        pages = GRANULE_TOKENS // self.config.page_tokens
        k, v = (
            torch.randn(distinct * pages, args.kv_heads, self.config.page_tokens, args.head_dim, generator=generator)
            for _ in range(2)
        )
        records = self.codec.encode(k, v).view(distinct, pages, args.kv_heads, -1)
        self.records = records.repeat(-(-self.granules // distinct), 1, 1, 1)[: self.granules].contiguous()
        self.valid = torch.ones(self.granules, pages, dtype=torch.bool)
        self.index = torch.arange(self.granules)

    def step(self, q: torch.Tensor) -> torch.Tensor:
        """q fp32 [HK, 1, G, D] in base 2 -> attention output [HK, 1, G, D]."""
        query = self.codec.prepare(q)
        part, _ = self.codec.attend(query, self.records, self.valid)
        width = 1 << max(0, min(self.granules, 256) - 1).bit_length()
        return self.codec.finish(tree(part, self.index, width, 1).rows(0)).normalised()


def peer(name: str, args: argparse.Namespace, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of the query [HK, 1, G, D] (base 2 is undone) that attends over a cache of its own in the named way."""
    way, dtype = name.rsplit("-", 1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    generator = torch.Generator().manual_seed(seed)
    shape = (1, args.kv_heads, args.context, args.head_dim)
    k, v = (torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))

    def run(q: torch.Tensor) -> torch.Tensor:
        rows = (q * math.log(2)).squeeze(1).unsqueeze(0).to(dtype)  # [1, HK, G, D], the group laid out as query rows
        if way == "sdpa":
            return F.scaled_dot_product_attention(rows, k, v, scale=1.0)
        if way == "sdpa-gqa":
            return F.scaled_dot_product_attention(rows.flatten(1, 2).unsqueeze(2), k, v, scale=1.0, enable_gqa=True)
        return torch.softmax((rows @ k.transpose(-1, -2)).float(), -1).to(dtype) @ v

    return run


def check(ours: Ours, q: torch.Tensor) -> float:
    """Relative difference to the plain-torch reference over (at most) the first 16 granules."""
    few = min(16, ours.granules)
    pages = ours.records[:few], ours.valid[:few]
    fast, _ = ours.codec.attend(ours.codec.prepare(q), *pages)
    with dispatch.forced("reference"):
        codec = make_codec(ours.config, ours.codec.heads, 0)
        slow, _ = codec.attend(codec.prepare(q), *pages)
    a, b = (Partial(*partial).normalised() for partial in (fast, slow))
    difference = ((a - b).norm() / b.norm()).item()
    assert difference < 1e-2, f"the kernels differ from the reference by {difference}"
    return difference


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    shape = (args.kv_heads, 1, args.heads // args.kv_heads, args.head_dim)
    queries = [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)) / math.sqrt(args.head_dim) * math.log2(math.e)
        for i in range(args.sets)
    ]
    ours = [Ours(args, seed) for seed in range(args.sets)]
    difference = check(ours[0], queries[0])
    names = [name for name in args.peers.split(",") if name]
    sets = 1 + (1 << 28) // (args.context * args.kv_heads * args.head_dim * 4)
    peers = {name: [peer(name, args, seed) for seed in range(min(sets, args.sets))] for name in names}
    backend, _ = dispatch.backend(torch.device("cpu"))
    rate = stream_gb_s(args.threads)
    times: dict[str, list[float]] = {name: [] for name in ("ours", *names)}
    with torch.inference_mode():
        for turn in range(args.repeats + 1):
            for name, list_ in times.items():
                run = ours[turn % len(ours)].step if name == "ours" else peers[name][turn % len(peers[name])]
                started = time.perf_counter()
                run(queries[turn % len(queries)])
                if turn:
                    list_.append((time.perf_counter() - started) * 1e3)
    packed_bytes = ours[0].records.numel()
    median = {name: statistics.median(values) for name, values in times.items()}
    ceiling_ms = packed_bytes / rate / 1e6
    print(
        f"{packed_bytes / 1e6:.1f} MB packed, {rate:.1f} GB/s streamed by {args.threads} thread(s): {ceiling_ms:.2f} ms would be memory speed; {backend}"
    )
    print(f"difference to the reference {difference:.1e}")
    for name, values in times.items():
        print(
            f"{name:14s} {median[name]:9.2f} ms   ({min(values):.2f} .. {max(values):.2f})   {median[name] / median['ours']:6.1f} x ours"
        )
    best = min(names, key=median.get) if names else None
    result = {
        "context": args.context, "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "bits": args.bits, "refine": args.refine,
        "ours_ms": median["ours"], "peers_ms": {name: median[name] for name in names}, "best_peer": best,
        "ratio_to_best_peer": median[best] / median["ours"] if best else None, "bytes_read": packed_bytes, "stream_gb_s": rate,
        "fraction_of_stream": ceiling_ms / median["ours"], "isa": backend, "threads": args.threads, "difference": difference,
        "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    line = json.dumps(result)
    if args.json and args.json != "-":
        with open(args.json, "w") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
