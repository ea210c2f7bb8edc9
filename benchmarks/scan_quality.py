"""Which code of keys finds the tokens that carry the attention: planes as they are scanned, or the words of a calibration?

    python benchmarks/scan_quality.py --calibration tailored.safetensors threshold.safetensors --text tests/data/handbook.txt

Exact queries, keys and values of a model; the queries of the last positions of each text meet all its sealed keys by code. Of
every granule, KV head and query the best 5 % of tokens are taken by the scanned scores of a group, as refinement takes them,
and by the true ones. *Found*: the share that both took. *Mass*: true attention of the tokens taken, over that of the best
choice. *Error*: root mean square of score errors in nats, less their mean in a granule, which the softmax does not see where
it is the same in all. With `--positions A:B` also KL and perplexity of caches that scan so and refine 5 %: words in place of
the sign plane, and below them a 4-bit code of keys and values, or rotated planes of what the words leave over. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from bitkv_dist import checkpoint, text
from bitkv_dist import model as models
from bitkv_dist.calibrated import read_origin
from bitkv_dist.codec.interface import Codec, HeadShape, ReadCount, make_codec
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig, build
from bitkv_dist.evaluate.perplexity import compare, head_shape
from bitkv_dist.evaluate.trace import Trace, trace
from bitkv_dist.kernels import reference
from bitkv_dist.layer import base2
from bitkv_dist.partial import Partial

SHARE = 0.05
RULE = reference.Selection(SHARE, 1, group=True)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    model = models.load(args.model, dtype=None, device=torch.device("cpu"))
    tokenizer = checkpoint.read_tokenizer(checkpoint.localise(args.model, lambda *progress: None))
    texts = {Path(path).name: text.encode_prompt(tokenizer, text.read_prompt_file(path)) for path in args.text}
    shape = head_shape(model)
    scans = {name: scans_of(config, shape) for name, config in configs(args.calibration).items()}
    rows = []
    for name, ids in texts.items():
        found: dict[str, list[torch.Tensor]] = {scan: [] for scan in scans}

        def visit(seen: Trace, found: dict[str, list[torch.Tensor]] = found) -> None:
            if seen.layer.index % args.every == 0:
                for scan, of_layer in scans.items():
                    found[scan].append(measured(seen, *of_layer(seen.layer.index)))

        with torch.inference_mode():
            trace(model, build("exact", {}).cache, ids[: args.tokens], visit)
        rows += [row(scan, name, layers) for scan, layers in found.items()]
        show(rows[-len(scans) :])
    ends = []
    if args.positions:
        first, last = map(int, args.positions.split(":"))
        for name, ids in texts.items():
            ends += end_to_end(model, args.calibration[0], name, ids, first, last)
    how = {name: getattr(args, name) for name in ("model", "tokens", "every", "positions")} | {"torch": torch.__version__}
    digests = [read_origin(path).digest for path in args.calibration]
    print(json.dumps(how | {"calibrations": digests, "scans": rows, "caches": ends}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--calibration", nargs="+", required=True, help="the first one serves --positions")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text (4096)")
    parser.add_argument("--every", type=int, default=3, help="every so many-th layer (3)")
    parser.add_argument("--positions", help="A:B, to compare caches end to end")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def configs(calibrations: list[str]) -> dict[str, CacheConfig]:
    planes = {"sign plane": build("tiered4", {}).cache, "2 planes": build("tiered4-2", {}).cache}
    words = {f"words ({read_origin(path).form})": path for path in calibrations}
    return planes | {name: CacheConfig("tailored", 1, 1, calibration=path) for name, path in words.items()}


# -- scans of single layers

Scan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], torch.Tensor]


def scans_of(config: CacheConfig, shape: HeadShape) -> Callable[[int], tuple[Scan, float]]:
    """layer -> what scores queries [HK, Q, G, D] in base 2 with pages k, v [n, HK, P, D] of these numbers, [HK, Q, G, n * P];
    and the bits that it reads of a key's element."""

    def of_layer(layer: int) -> tuple[Scan, float]:
        with_reference = PlanesCodec if config.codec == "planes" else make_codec
        codec = with_reference(config, shape, layer)
        fields = codec.layout.fields
        if config.codec == "planes":
            size = sum(fields[name].bytes for name in ("Kplanes", "Kscan", "Kcentroid"))
        else:
            size = sum(fields[name].bytes for name in ("page", "Kcodes", "Kscale"))

        def scan(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: list[int]) -> torch.Tensor:
            if config.codec == "planes":
                records = codec.encode(k, v).unsqueeze(0)
                return codec.scan(codec.prepare(query), records, torch.ones(1, len(k), dtype=torch.bool))[0]
            return word_scores(codec, query, codec.encode(k, v, numbers).unsqueeze(0))[0]

        return scan, size * 8 / (config.page_tokens * shape.head_dim)

    return of_layer


def word_scores(codec: TailoredCodec, query: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """[n, HK, Q, G, T] of records [n, pages, HK, bytes]."""
    k = codec.decode(records)[0].transpose(1, 2).flatten(2, 3)
    query, k = codec.scored(query, k, records)
    return torch.einsum("hqgd,nhtd->nhqgt", query, k)


def measured(seen: Trace, scan: Scan, bits: float) -> torch.Tensor:
    """Found, mass, squared error and bits of one layer, means over granules that are sealed whole, heads and queries."""
    state, page = seen.layer.states[0], seen.layer.cache.config.page_tokens
    first, end = GRANULE_TOKENS, state.sealed_end // GRANULE_TOKENS * GRANULE_TOKENS
    query = base2(seen.q, seen.scaling)
    k, v = (x[:, first:end].float() for x in (seen.k, seen.v))
    true = torch.einsum("hqgd,htd->hqgt", query, k)
    paged = (x.unflatten(1, (-1, page)).transpose(0, 1).contiguous() for x in (k, v))
    scores = scan(query, *paged, list(range(first // page, end // page)))
    true, scores = (x.unflatten(-1, (-1, GRANULE_TOKENS)).movedim(-2, 0) for x in (true, scores))
    sealed = torch.full((len(true),), GRANULE_TOKENS)
    chosen, best = (reference.select(x, sealed, RULE) for x in (scores, true))
    weight = torch.softmax(true.movedim(0, -2).flatten(-2) * math.log(2), -1)  # of each head, among these tokens
    weight = weight.unflatten(-1, (-1, GRANULE_TOKENS)).movedim(-2, 0)
    error = (scores - true) * math.log(2)
    error = (error - error.mean(-1, keepdim=True)).square().mean()
    found = (chosen & best).sum() / best.sum()
    mass = (weight * chosen).sum((0, -1)).mean() / (weight * best).sum((0, -1)).mean()
    return torch.tensor([found, mass, error, bits])


def row(scan: str, name: str, layers: list[torch.Tensor]) -> dict:
    found, mass, error, bits = torch.stack(layers).mean(0).tolist()
    return {"scan": scan, "text": name, "bits": bits, "found": found, "mass": mass, "error": math.sqrt(error)}


def show(rows: list[dict]) -> None:
    for each in rows:
        numbers = f"found {each['found']:.3f}  mass {each['mass']:.3f}  error {each['error']:.3f}"
        print(f"{each['text']:16} {each['scan']:24} {each['bits']:.3f} bits of a key  {numbers}", flush=True)


# -- caches that scan so


class WordScan(TailoredCodec):
    """Scans words, keys and values, and takes the chosen tokens from a second code: `below` bits of rotated planes, of what the
    words leave over (residual) or of the vectors themselves. Plain torch, for one question alone."""

    joined = True

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int, below: int, residual: bool) -> None:
        super().__init__(config, heads, layer)
        self.below = PlanesCodec(CacheConfig(key_bits=below, value_bits=below), heads, layer)
        self.words_bytes, self.residual = self.record_bytes, residual
        self.record_bytes += self.below.record_bytes

    def encode(self, k: torch.Tensor, v: torch.Tensor, pages: list[int]) -> torch.Tensor:
        whole, self.record_bytes = self.record_bytes, self.words_bytes
        words = super().encode(k, v, pages)
        self.record_bytes = whole
        if self.residual:
            k, v = (x.float() - coded for x, coded in zip((k, v), self.decode(words), strict=True))
        return torch.cat((words, self.below.encode(k, v)), -1)

    def attend(self, query, records, page_valid, choice=None, granules=None, page_mass=None) -> tuple[Partial, ReadCount]:
        words = records[..., : self.words_bytes].contiguous()
        coded = [x.transpose(1, 2).flatten(2, 3) for x in self.decode(words)]
        fine = [x.transpose(1, 2).flatten(2, 3) for x in self.below.decode(records[..., self.words_bytes :])]
        fine = [x + base for x, base in zip(fine, coded, strict=True)] if self.residual else fine
        valid = page_valid.repeat_interleave(self.tokens, 1)
        seen = valid[:, None, None, None]
        scores = torch.where(seen, torch.einsum("hqgd,nhtd->nhqgt", *self.scored(query, coded[0], words)), -math.inf)
        chosen = reference.select(scores, valid.sum(-1), RULE)
        scores = torch.where(chosen, torch.einsum("hqgd,nhtd->nhqgt", query, fine[0]), scores)
        m = scores.amax(-1)
        p = torch.where(seen, torch.exp2(scores - torch.where(torch.isinf(m), 0.0, m).unsqueeze(-1)), 0.0)
        o = [torch.einsum("nhqgt,nhtd->nhqgd", part, x) for part, x in ((p * ~chosen, coded[1]), (p * chosen, fine[1]))]
        tokens, refined = int(valid.sum()) * self.heads.kv_heads * query.shape[1], int(chosen.any(3).sum())
        bits = (self.words_bytes * tokens / self.tokens + self.below.record_bytes * refined / self.tokens) * 8
        count = ReadCount(int(bits), tokens * self.heads.head_dim * 2, tokens, refined)
        return Partial(m, p.sum(-1), o[0] + o[1]), count


def end_to_end(model: models.ServedModel, calibration: str, name: str, ids: list[int], first: int, last: int) -> list[dict]:
    """Rows of caches; the seed, which codebooks do not read, says which is meant."""
    kinds = {1: (4, False), 2: (3, True), 3: (2, True)}
    names = {seed: f"words, {below} bits of {'what they leave' if left else 'all'}" for seed, (below, left) in kinds.items()}
    caches = {"tiered4": build("tiered4", {}).cache, "words": CacheConfig("tailored", 1, 1, calibration=calibration)}
    caches |= {names[seed]: CacheConfig("tailored", 1, 1, calibration=calibration, seed=seed) for seed in kinds}

    def make(config: CacheConfig, heads: HeadShape, layer: int) -> Codec:
        if config.codec == "tailored" and config.seed in kinds:
            return WordScan(config, heads, layer, *kinds[config.seed])
        return make_codec(config, heads, layer)

    with mock.patch("bitkv_dist.layer.make_codec", make):
        scores = compare(model, caches | {"exact": build("exact", {}).cache}, ids, first, last)
    rows = [scores[cache].row(cache, name, scores["exact"]) for cache in caches]
    for each in rows:
        bits = f"{each['stored_bits']:.2f} stored, {each['read_bits']:.2f} read"
        print(f"{name:16} {each['codec']:32} {bits}  x{each['ppl_ratio']:.3f} ({each['kl']:.4f})", flush=True)
    return rows


if __name__ == "__main__":
    main()
