"""One decode step of attention over pages of words, on CPU, beside tiered4 and one bit in planes.

    python benchmarks/decode_words.py --context 131072 --heads 32 --kv-heads 8 --head-dim 128 --threads 1
    python benchmarks/decode_words.py --context 7168 --heads 9 --kv-heads 3 --head-dim 64 --layers 30 --threads 1

The books are made up, of the size that a calibration makes: what is looked up does not change what a look-up costs. Checks the
kernels against plain torch first, then times all codecs interleaved, a step through `--layers` layers of books and pages of
their own, and prints medians with spread and, per layer, the bytes read. `fraction` is (bytes read / streaming rate) / time: 1
would be memory speed; books (which a short context reads more of than of codes) are not among the bytes. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import random_books
import torch
from decode_attention import REST_S, packed_cache, query, timed
from streaming import stream_gb_s

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import lane_width

DISTINCT = 4  # granules that are encoded; the cache repeats them
CHECKED = 2  # granules


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=131072, help=f"tokens in the cache, a multiple of {GRANULE_TOKENS}")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2, help="walked in turn, so that none is still in a cache of the machine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", choices=sorted(cpu.ISAS))
    args = parser.parse_args()
    if args.context % GRANULE_TOKENS:
        parser.error(f"--context {args.context}: must be a multiple of {GRANULE_TOKENS}")
    return args


class Layers:
    """Filled caches of some layers of one sequence, and a step through them."""

    def __init__(self, config: CacheConfig, args: argparse.Namespace) -> None:
        self.config, granules, pages = config, args.context // GRANULE_TOKENS, GRANULE_TOKENS // config.page_tokens
        self.shape = HeadShape(args.layers, 0, args.kv_heads, args.head_dim, torch.float32)
        self.codecs = [make_codec(config, self.shape, layer) for layer in range(args.layers)]
        assert all(codec.fused for codec in self.codecs), "not served by the kernels"
        distinct = min(granules, DISTINCT)
        size = (2, distinct * pages, args.kv_heads, config.page_tokens, args.head_dim)
        self.records = []
        for layer, codec in enumerate(self.codecs):
            k, v = torch.randn(size, generator=torch.Generator().manual_seed(layer))
            numbers = [list(range(len(k)))] if codec.positional else []
            few = codec.encode(k, v, *numbers).view(distinct, pages, args.kv_heads, -1)
            self.records.append(packed_cache(few, granules))
        self.valid = torch.ones(granules, pages, dtype=torch.bool)
        shape = (args.kv_heads, args.heads // args.kv_heads, args.head_dim)
        self.view = View([granules], list(range(granules)), self.valid, lane_width(granules, 1), 1, shape)
        self.exact, self.out = torch.empty(2, args.kv_heads, 0, args.head_dim), torch.empty(1, args.heads, args.head_dim)

    def step(self, q: torch.Tensor) -> None:
        """q fp32 [HK, 1, G, D] in base 2, the same for all layers."""
        for codec, records in zip(self.codecs, self.records, strict=True):
            exact, nodes, self.reads = codec.see(self.view, q, self.exact, [records])
            assert codec.conclude(nodes.rows(0), exact, self.out)

    def difference(self, q: torch.Tensor) -> float:
        """Relative difference to plain torch over the first granules."""
        pages = self.records[0][:CHECKED], self.valid[:CHECKED]
        with dispatch.forced("reference"):
            plain = make_codec(self.config, self.shape, 0)
            slow = plain.attend(plain.prepare(q), *pages)[0].normalised()
        fast = self.codecs[0].attend(self.codecs[0].prepare(q), *pages)[0].normalised()
        return ((fast - slow).norm() / slow.norm()).item()


def compare(args: argparse.Namespace, file: str) -> dict:
    words = {"codec": "tailored", "calibration": file}
    configs = {
        "1bit": CacheConfig(key_bits=1, value_bits=1),
        "tiered4": CacheConfig(key_bits=4, value_bits=4, scan_bits=1, refine=RefineConfig(value=0.05)),
        "words": CacheConfig(**words, key_bits=1, value_bits=1),
        "words + 3 planes": CacheConfig(**words, key_bits=4, value_bits=4, refine=RefineConfig(value=0.05)),
    }
    held = {name: Layers(config, args) for name, config in configs.items()}
    q = [query(args, seed) for seed in range(args.repeats + 1)]
    differences = {name: layers.difference(q[0]) for name, layers in held.items()}
    assert max(differences.values()) < 1e-2, f"the kernels differ from plain torch: {differences}"
    rate = stream_gb_s()
    times: dict[str, list[float]] = {name: [] for name in held}
    for turn in q:
        for name, layers in held.items():
            time.sleep(REST_S)
            times[name].append(timed(layers.step, turn) / args.layers)
    print(f"{rate:.1f} GB/s streamed by {args.threads} thread(s); ms a layer")
    found = {}
    for name, layers in held.items():
        ms, read = statistics.median(times[name][1:]), layers.reads.bits / 8
        fraction = read / rate / 1e6 / ms
        spread = f"({min(times[name][1:]):.3f} .. {max(times[name][1:]):.3f})"
        print(f"{name:18s}{ms:9.3f} ms {spread:22s} {read / 1e6:8.2f} MB read, {fraction:.2f} of streaming, "
              f"books {layers.codecs[0].book_bytes / 1e6:.2f} MB, difference {differences[name]:.1e}")  # fmt: skip
        found[name] = {"ms": ms, "bytes_read": read, "fraction_of_stream": fraction, "difference": differences[name]}
    return {"stream_gb_s": rate, "codecs": found}


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    dispatch.use(args.isa or "auto")
    name, _ = dispatch.backend(torch.device("cpu"))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        found = compare(args, random_books.write(Path(folder, "books.safetensors"), args.kv_heads, args.head_dim, args.layers))
    print(json.dumps(vars(args) | {"kernels": name, "torch": torch.__version__} | found))


if __name__ == "__main__":
    main()
