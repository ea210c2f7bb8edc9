"""Which code of keys finds the tokens that carry the attention: planes as they are scanned, or the words of a calibration?

    python benchmarks/scan_quality.py --calibration tailored.safetensors threshold.safetensors --text tests/data/handbook.txt

Exact queries, keys and values of a model; the queries of the last positions of each text meet all its sealed keys by code. Of
every granule, KV head and query the best 5 % of tokens are taken by the scanned scores of a group, as refinement takes them,
and by the true ones. *Found*: the share that both took. *Mass*: true attention of the tokens taken, over that of the best
choice. *Error*: root mean square of score errors in nats, less their mean in a granule, which the softmax does not see where
it is the same in all. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from bitkv_dist import checkpoint, text
from bitkv_dist import model as models
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.calibrated import read_origin
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.config import build
from bitkv_dist.evaluate.perplexity import head_shape
from bitkv_dist.evaluate.trace import Trace, trace
from bitkv_dist.kernels import reference
from bitkv_dist.layer import base2

SHARE = 0.05
RULE = reference.Selection(SHARE, 1, group=True)
LEAST_TOKENS = 3 * GRANULE_TOKENS  # two granules and the exact window


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    model = models.load(args.model, dtype=None, device=torch.device("cpu"))
    tokenizer = checkpoint.read_tokenizer(checkpoint.localise(args.model, lambda *progress: None))
    try:
        texts = {Path(path).name: text.encode_prompt(tokenizer, text.read_prompt_file(path, "--text")) for path in args.text}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if short := [name for name, ids in texts.items() if len(ids) < LEAST_TOKENS]:
        raise SystemExit(f"--text {short[0]}: has {len(texts[short[0]])} tokens; give a text of at least {LEAST_TOKENS}")
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
    how = {name: getattr(args, name) for name in ("model", "tokens", "every")} | {"torch": torch.__version__}
    digests = [read_origin(path).digest for path in args.calibration]
    print(json.dumps(how | {"calibrations": digests, "scans": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--calibration", nargs="+", required=True, help="of codec tailored")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text (4096)")
    parser.add_argument("--every", type=int, default=3, help="every so many-th layer (3)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.tokens < LEAST_TOKENS:
        parser.error(f"--tokens {args.tokens}: must be at least {LEAST_TOKENS}, so that a granule behind the first is sealed")
    for path in args.calibration:
        try:
            codec = read_origin(path).codec
        except ValueError as error:
            parser.error(f"--calibration {path}: {error}")
        if codec != "tailored":
            parser.error(f"--calibration {path}: is of codec {codec}; give files of codec tailored")
    return args


def configs(calibrations: list[str]) -> dict[str, CacheConfig]:
    planes = {"sign plane": build("tiered4", {}).cache, "2 planes": build("tiered4-2", {}).cache}
    words = {f"words ({Path(path).stem}, {read_origin(path).form})": path for path in calibrations}
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


if __name__ == "__main__":
    main()
