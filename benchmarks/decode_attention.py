"""One decode step of attention over a long packed cache, on CPU, against the ways to ask torch for it.

    python benchmarks/decode_attention.py --context 131072 --heads 32 --kv-heads 8 --head-dim 128 --bits 1 --threads 1 --json -
    python benchmarks/decode_attention.py --context 131072 --heads 32 --kv-heads 8 --head-dim 128 --bits 4 --refine 0.05
    --threads 2
    python benchmarks/decode_attention.py --bits 1 --contexts 16384,65536,262144,1048576
    python benchmarks/decode_attention.py --encode --heads 9 --kv-heads 3 --head-dim 64 --bits 4 --refine 0.05

Checks the result against the plain-torch reference first, measures the streaming read rate of the machine in the same run,
times everything interleaved over several sets of inputs that exceed the last-level cache together, and prints medians with
spread. Before each timed call the same work is done for some milliseconds on other sets of inputs, so that the caller's own
threads are awake and the clock is not the one that another's work left behind, as in the middle of a decode step. With several
threads the machine rests before that, until the threads of the one before no longer spin.
`bytes_read` are those of the packed cache that a step reads: scanned fields of all tokens, the rest of the refined ones.
`fraction_of_stream` is (`bytes_read` / streaming rate) / time: 1 would be memory speed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import decode_peers
import torch
import torch.nn.functional as F
from streaming import stream_gb_s

from bitkv_dist.cache_config import GRANULE_TOKENS, STORED_BITS, CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount, make_codec
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import Partial, lane_width
from bitkv_dist.sealed import SealedStore

REST_S = 0.02  # torch's OpenMP threads spin for milliseconds after their work, on the cores that the next call's threads need
WARM_S = 0.01  # of untimed work before a timed call
SETS_BYTES = 1 << 26  # of our sets together, at least: more than the last-level cache of a core


def peers(names: str) -> list[str]:
    chosen = [name for name in names.split(",") if name]
    if unknown := set(chosen) - set(decode_peers.PEERS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(decode_peers.PEERS)}")
    return list(dict.fromkeys((decode_peers.GQA_ROWS, *chosen)))


def numbers(text: str) -> list[int]:
    return [-(-int(number) // GRANULE_TOKENS) * GRANULE_TOKENS for number in text.split(",")]


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
    parser.add_argument("--contexts", type=numbers, help="instead: our time and memory at each, and a line")
    parser.add_argument("--encode", action="store_true", help="instead: encoding a page against projecting its q, k and v")
    parser.add_argument("--peers", type=peers, default=peers("sdpa-fp32,matmul-bf16,matmul-fp32"), metavar="NAMES",
                        help=f"of {', '.join(decode_peers.PEERS)}; {decode_peers.GQA_ROWS} is always among them")  # fmt: skip
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs, walked in turn; more of ours if small")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", choices=sorted(cpu.ISAS))
    parser.add_argument(
        "--json", help="also write the JSON object to this file; - is the last line of the output, which is always printed"
    )
    args = parser.parse_args()
    for name in ("context", "heads", "kv_heads", "head_dim", "threads", "repeats", "sets"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads}: must be a multiple of --kv-heads {args.kv_heads}")
    stored = STORED_BITS["planes"]
    if args.bits not in stored:
        parser.error(f"--bits {args.bits}: must be one of {', '.join(map(str, stored))}")
    if args.refine is not None and not 0 <= args.refine <= 1:
        parser.error(f"--refine {args.refine}: must be a share of the tokens, 0 to 1")
    if args.contexts and (len(args.contexts) < 2 or min(args.contexts) < 1):
        parser.error("--contexts: a line takes at least two numbers of tokens")
    if args.context % GRANULE_TOKENS:
        whole = -(-args.context // GRANULE_TOKENS) * GRANULE_TOKENS
        parser.error(f"--context {args.context}: must be a multiple of {GRANULE_TOKENS}; take {whole}")
    return args


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
        distinct = min(self.granules, 8)
        pages = GRANULE_TOKENS // self.config.page_tokens
        k, v = (
            torch.randn(distinct * pages, args.kv_heads, self.config.page_tokens, args.head_dim, generator=generator)
            for _ in range(2)
        )
        self.records = packed_cache(self.codec.encode(k, v).view(distinct, pages, args.kv_heads, -1), self.granules)
        self.valid = torch.ones(self.granules, pages, dtype=torch.bool)
        shape = (args.kv_heads, args.heads // args.kv_heads, args.head_dim)
        self.view = View([self.granules], list(range(self.granules)), self.valid, lane_width(self.granules, 1), 1, shape)
        self.exact = torch.empty(2, args.kv_heads, 0, args.head_dim)
        self.out = torch.empty(1, args.heads, args.head_dim)
        self.reads = ReadCount()

    def step(self, q: torch.Tensor) -> torch.Tensor:
        """q fp32 [HK, 1, G, D] in base 2 -> attention output [1, H, D], by the two calls of a decode step."""
        exact, nodes, self.reads = self.codec.see(self.view, q, self.exact, [self.records])
        finite = self.codec.conclude(nodes.rows(0), exact, self.out)
        assert finite
        return self.out


def packed_cache(records: torch.Tensor, granules: int) -> torch.Tensor:
    """`granules` granules of a few distinct ones [n, ...], in the engine's store.

    What is read does not depend on their content. The work of the AVX-512 kernel does a little: blocks of 16 tokens whose
    weights are all 0 are skipped, and blocks in which four weights exceed 254 together take a second lookup. The latter are
    .7 % for scores of standard deviation 1 nat, as here, and 93 % for .25 nats; for 8 nats they are none, and 57 % are skipped.
    """
    store = SealedStore(*records.shape[1:], records.device)
    store.reserve(granules)
    cache = store.slabs[0]
    for first in range(0, granules, len(records)):
        cache[first : first + len(records)] = records[: granules - first]
    return cache


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


def grow(args: argparse.Namespace) -> dict:
    """Time and memory of a step at several contexts, and the least-squares line through the times."""
    page_bytes = resource.getpagesize()

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes

    rows = []
    q = query(args, 0)
    Ours(argparse.Namespace(**vars(args) | {"context": GRANULE_TOKENS}), 0).step(q)  # what is made once is not a context's
    for context in args.contexts:
        before = resident_bytes()
        ours = Ours(argparse.Namespace(**vars(args) | {"context": context}), 0)
        times = [timed(ours.step, q) for _ in range(args.repeats + 1)][1:]
        rows.append((context, statistics.median(times), ours.records.numel(), resident_bytes() - before))
        _, ms, packed, resident = rows[-1]
        print(f"{context:9d} tokens {ms:9.3f} ms   {packed / 1e6:8.1f} MB packed   {resident / 1e6:8.1f} MB resident")
        del ours
    contexts, times, packed, resident = zip(*rows, strict=True)
    slope, offset = statistics.linear_regression(contexts, times)
    r2 = statistics.correlation(contexts, times) ** 2
    print(f"{offset:.3f} ms + {slope * 1024:.5f} ms per 1,024 tokens, R^2 = {r2:.5f}")
    return {"contexts": contexts, "ours_ms": times, "packed_bytes": packed, "resident_bytes": resident,
            "fit_offset_ms": offset, "fit_ms_per_1024_tokens": slope * 1024, "r2": r2}  # fmt: skip


def encode(args: argparse.Namespace) -> dict:
    """Encoding a page (all KV heads, keys and values) against projecting its tokens to q, k, v; hidden = heads * head_dim."""
    ours = Ours(args, 0)
    tokens, hidden = ours.config.page_tokens, args.heads * args.head_dim
    k, v = torch.randn(2, 1, args.kv_heads, tokens, args.head_dim)
    work = {"encode": lambda: ours.codec.encode(k, v)}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, hidden).to(dtype)
        widths = [heads * args.head_dim for heads in (args.heads, args.kv_heads, args.kv_heads)]
        weights = [torch.randn(width, hidden).to(dtype) for width in widths]
        work[f"qkv-{str(dtype)[6:]}"] = lambda x=x, weights=weights: [F.linear(x, weight) for weight in weights]
    times = {name: [] for name in work}
    for _ in range(20 * args.repeats + 1):
        for name, run in work.items():
            times[name].append(timed(lambda _, run=run: run(), None))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:14s} {median[name]:9.3f} ms   ({min(values[1:]):.3f} .. {max(values[1:]):.3f})")
    return {"page_tokens": tokens, "hidden": hidden, "bits": args.bits, "encode_ms": median["encode"],
            "projections_ms": {name: median[name] for name in work if name != "encode"}}  # fmt: skip


def query(args: argparse.Namespace, seed: int) -> torch.Tensor:
    shape = (args.kv_heads, 1, args.heads // args.kv_heads, args.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(args.head_dim) * math.log2(math.e)


def timed(run, q: torch.Tensor | None) -> float:
    """Milliseconds of run(q)."""
    started = time.perf_counter()
    run(q)
    return (time.perf_counter() - started) * 1e3


def warm_up(runs: list[decode_peers.Attend], turn: int, queries: list[torch.Tensor]) -> None:
    """Runs over the sets of inputs that follow the turn's own, if there are others, for at least WARM_S."""
    started, after = time.perf_counter(), 0
    while after == 0 or time.perf_counter() - started < WARM_S:
        after = after + 1 if len(runs) == 1 else after % (len(runs) - 1) + 1
        runs[(turn + after) % len(runs)](queries[(turn + after) % len(queries)])


def compare(args: argparse.Namespace) -> dict:
    """Our step against the peers', interleaved."""
    ours = [Ours(args, 0)]
    ours += [Ours(args, seed) for seed in range(1, max(args.sets, 1 + SETS_BYTES // ours[0].records.numel()))]
    queries = [query(args, seed) for seed in range(len(ours))]
    difference = check(ours[0], queries[0])
    shape = (args.kv_heads, args.context, args.head_dim)
    sets = min(args.sets, 1 + (1 << 28) // (math.prod(shape) * 4))
    runs: dict[str, list[decode_peers.Attend]] = {"ours": [one.step for one in ours]}
    runs |= {name: [decode_peers.make(name, shape, args.bits, seed) for seed in range(sets)] for name in args.peers}
    rate = stream_gb_s()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.repeats + 1):
        for name, list_ in times.items():
            if args.threads > 1:
                time.sleep(REST_S)
            warm_up(runs[name], turn, queries)
            took = timed(runs[name][turn % len(runs[name])], queries[turn % len(queries)])
            if turn:
                list_.append(took)
    packed_bytes, bytes_read = ours[0].records.numel(), ours[0].reads.bits // 8
    median = {name: statistics.median(values) for name, values in times.items()}
    ceiling_ms = bytes_read / rate / 1e6
    streamed = f"{rate:.1f} GB/s streamed by {args.threads} thread(s)"
    megabytes = f"{packed_bytes / 1e6:.1f} MB packed, {bytes_read / 1e6:.1f} MB read"
    print(f"{megabytes}, {streamed}: {ceiling_ms:.2f} ms would be memory speed")
    print(f"difference to the reference {difference:.1e}")
    for name, values in times.items():
        spread = f"({min(values):.2f} .. {max(values):.2f})"
        print(f"{name:14s} {median[name]:9.2f} ms   {spread}   {median[name] / median['ours']:6.1f} x ours")
    best = min(args.peers, key=median.get)
    return {
        "context": args.context, "bits": args.bits, "refine": args.refine, "ours_ms": median["ours"],
        "peers_ms": {name: median[name] for name in args.peers}, "best_peer": best,
        "ratio_to_best_peer": median[best] / median["ours"], "packed_bytes": packed_bytes, "bytes_read": bytes_read,
        "stream_gb_s": rate, "fraction_of_stream": ceiling_ms / median["ours"], "difference": difference,
    }  # fmt: skip


def main() -> None:
    args = parse()
    if cpu.load() is None:
        raise SystemExit(cpu.reason())
    if args.isa and not cpu.load().bitkv_supports(cpu.ISAS[args.isa]):
        raise SystemExit(f"--isa {args.isa}: this machine does not have it")
    torch.set_num_threads(args.threads)
    with dispatch.forced(args.isa) if args.isa else nullcontext(), torch.inference_mode():
        backend, _ = dispatch.backend(torch.device("cpu"))
        print(backend)
        result = grow(args) if args.contexts else encode(args) if args.encode else compare(args)
    result |= {
        "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "isa": backend, "threads": args.threads,
        "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    line = json.dumps(result)
    if args.json and args.json != "-":
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
