"""Does one key among a million receive the weight it should? Planted at a known margin, by preset and context.

    python benchmarks/planted_key.py --contexts 8192,131072,1048576
    python benchmarks/planted_key.py --layers 18 --presets exact,tiered4,tiered4:refine.min_tokens=64,tiered4:tail_correction=1

The background is a smoothed bootstrap of a real model's cache: true queries, keys and values of a text after RoPE are captured;
each page of the background is the mean of a captured page, drawn at random, plus residuals of captured tokens, each mixed
with Gaussian noise of the head's own covariance, so that a million tokens are a million different ones. A granule
is encoded and attended to by the real codecs and kernels, and dropped. Then one key is planted: a background key moved along a
query by just so much that its exact logit lies `margin` nats above the log-sum-exp of the whole background, that is, its exact
weight is sigmoid(margin). For every query head, query, margin and context: the log odds of its weight by each preset minus the
exact ones. A key is *lost* where it receives less than half of its exact weight, *overtaken* where a background token
outweighs it that does not in truth. A preset fails at a margin where it loses more than 5 % of the keys. The sink and the
recent window, which are exact in a real cache, are left out of both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import yaml

from bitkv_dist import model
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec import planes
from bitkv_dist.codec.interface import Codec, HeadShape, make_codec
from bitkv_dist.config import build
from bitkv_dist.evaluate.trace import Trace, trace
from bitkv_dist.kernels import dispatch, reference
from bitkv_dist.layer import base2
from bitkv_dist.text import read_prompt_file

PRESETS = "exact,4bit,tiered4-2,tiered4,2bit,tiered2,1bit,minmax2"
MARGINS = (-4.0, -2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
LOST_SHARE = 0.05
SMOOTHING = 0.5  # share of a residual's standard deviation that is Gaussian
GRANULES_AT_ONCE = 16


class Heads(NamedTuple):
    """What a layer's heads look like. queries fp32 [HK, Q, G, D] in base 2. For keys and values (first dim): means fp32
    [2, pages, HK, D], residuals fp32 [2, tokens, HK, D], and a square root of their covariance fp32 [2, HK, D, D]."""

    queries: torch.Tensor
    means: torch.Tensor
    residuals: torch.Tensor
    roots: torch.Tensor


class Column(NamedTuple):
    """A preset in one layer, and what its granules of the background gave: base-2 log-sum-exp and largest score, fp64
    [n, HK, Q, G]."""

    codec: Codec
    config: CacheConfig
    mass: torch.Tensor
    peak: torch.Tensor


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    served = model.load(args.model, dtype=torch.float32, device=torch.device("cpu"))
    texts = [served.tokenizer(read_prompt_file(path, "--text")).input_ids for path in args.text]
    ids = [token for text in texts for token in text][: args.text_tokens]
    found: list[dict[str, Any]] = []

    def visit(seen: Trace) -> None:
        if seen.layer.index in args.layers:
            heads = statistics(seen, args.queries)
            found.extend(cases(heads, seen.layer.index, args))

    with torch.inference_mode():
        trace(served, CacheConfig(), ids, visit)
    rows = [row for name in args.presets for tokens in args.contexts if (row := summary(found, name, tokens))]
    show(rows)
    backend, _ = dispatch.backend(torch.device("cpu"))
    about = {"model": args.model, "layers": args.layers, "queries": args.queries, "seed": args.seed, "isa": backend}
    print(json.dumps(about | {"margins": MARGINS, "rows": rows, "torch": torch.__version__, "machine": platform.machine()}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose queries, keys and values are captured")
    parser.add_argument("--text", action="append", help="joined until there are enough tokens")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=numbers, default=[3, 12, 21, 28])
    parser.add_argument("--queries", type=int, default=4, help="positions per layer, spread over the last ones of the text")
    parser.add_argument("--contexts", type=numbers, default=[8192, 131072, 1048576], help="multiples of 512")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=PRESETS.split(","),
                        help="presets, changed by :FIELD=VALUE (refine.value, .., and tail_correction)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.text = args.text or ["tests/data/tale.txt", "tests/data/handbook.txt"]
    if "exact" not in args.presets:
        parser.error("--presets: must have exact, which the others are compared with")
    if uneven := [tokens for tokens in args.contexts if tokens % GRANULE_TOKENS]:
        parser.error(f"--contexts {uneven[0]}: must be multiples of {GRANULE_TOKENS}")
    return args


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# -- the background


def statistics(seen: Trace, queries: int) -> Heads:
    """Of the tokens that a cache would seal; queries of `queries` positions spread over those that were kept."""
    config, state = seen.layer.cache.config, seen.layer.states[0]
    places = torch.linspace(0, seen.q.shape[2] - 1, queries).long()
    sealed = torch.stack((seen.k, seen.v))[:, :, config.sink_rounded : state.sealed_at(seen.k.shape[1])].float()
    pages = sealed.transpose(1, 2).unflatten(1, (-1, config.page_tokens))  # [2, pages, P, HK, D]
    means = pages.mean(2)
    residuals = (pages - means.unsqueeze(2)).flatten(1, 2)
    covariance = torch.einsum("sthd,sthe->shde", residuals, residuals) / residuals.shape[1]
    values, vectors = torch.linalg.eigh(covariance)
    roots = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return Heads(base2(seen.q, seen.scaling)[:, places], means, residuals, roots)


def background(heads: Heads, seed: int, granule: int) -> torch.Tensor:
    """Keys and values of a granule, fp32 [2, pages, HK, P, D]; the same arguments give the same tokens."""
    chance = torch.Generator().manual_seed(seed * 1_000_003 + granule)
    page_tokens = CacheConfig.page_tokens
    pages, kv_heads = GRANULE_TOKENS // page_tokens, heads.means.shape[2]
    page = torch.randint(heads.means.shape[1], (pages,), generator=chance)
    token = torch.randint(heads.residuals.shape[1], (GRANULE_TOKENS,), generator=chance)
    noise = torch.randn(2, kv_heads, GRANULE_TOKENS, heads.means.shape[-1], generator=chance) @ heads.roots.transpose(-1, -2)
    residuals = math.sqrt(1 - SMOOTHING**2) * heads.residuals[:, token].transpose(1, 2) + SMOOTHING * noise
    return residuals.unflatten(2, (pages, page_tokens)).transpose(1, 2) + heads.means[:, page].unsqueeze(3)


def fill(heads: Heads, layer: int, args: argparse.Namespace) -> dict[str, Column]:
    """Every preset's partials of every granule of the longest context."""
    kv_heads, dim = heads.means.shape[2:]
    shape = HeadShape(layer + 1, 0, kv_heads, dim, torch.float32, group=heads.queries.shape[2])
    columns = {name: Column(*codec_of(name, shape, layer), [], []) for name in args.presets}
    granules = max(args.contexts) // GRANULE_TOKENS
    for first in range(0, granules, GRANULES_AT_ONCE):
        block = [background(heads, args.seed, g) for g in range(first, min(first + GRANULES_AT_ONCE, granules))]
        for column in columns.values():
            records = encoded(column.codec, torch.stack(block))
            valid = torch.ones(records.shape[:2], dtype=torch.bool)
            part, _ = column.codec.attend(column.codec.prepare(heads.queries), records, valid)
            column.mass.append(part.m.double() + torch.log2(part.l.double()))
            column.peak.append(part.m.double())
    return {name: column._replace(mass=torch.cat(column.mass), peak=torch.cat(column.peak)) for name, column in columns.items()}


def codec_of(name: str, shape: HeadShape, layer: int) -> tuple[Codec, CacheConfig]:
    """The codec of a preset with its changes, PRESET:FIELD=VALUE:.."""
    preset, *changes = name.split(":")
    changed = {field: yaml.safe_load(value) for field, value in (change.split("=") for change in changes)}
    share = changed.pop("tail_correction", None)
    config = build(preset, {f"cache.{field}": value for field, value in changed.items()}).cache
    with nullcontext() if share is None else mock.patch.object(planes, "TAIL_CORRECTION", share):
        return make_codec(config, shape, layer), config


def encoded(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """Granules fp32 [n, 2, pages, HK, P, D] -> records uint8 [n, pages, HK, record_bytes]."""
    k, v = kv.transpose(0, 1).flatten(1, 2)
    return codec.encode(k, v).unflatten(0, kv.shape[::2][:2])


# -- what is planted


def cases(heads: Heads, layer: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per preset, context, query position, query head of a group and margin; its numbers are lists over the KV heads."""
    columns, found = fill(heads, layer, args), []
    chance = torch.Generator().manual_seed(args.seed)
    truth = columns["exact"]
    for tokens in args.contexts:
        granules = tokens // GRANULE_TOKENS
        mass = log_sum_exp2(truth.mass[:granules])  # [HK, Q, G]
        for query in range(heads.queries.shape[1]):
            for head in range(heads.queries.shape[2]):
                granule, token = (int(torch.randint(most, (), generator=chance)) for most in (granules, GRANULE_TOKENS))
                kv = planted(heads, args.seed, granule, token, heads.queries[:, query, head], mass[:, query, head])
                rows = {name: weigh(column, kv, heads.queries, token, granule, granules) for name, column in columns.items()}
                for name, (odds, lead) in rows.items():
                    error = odds - rows["exact"][0]
                    exact_weight, weight = torch.sigmoid(rows["exact"][0]), torch.sigmoid(odds)
                    bias = log_sum_exp2(columns[name].mass[:granules]) - mass
                    values = {
                        "error": error[..., query, head],
                        "lost": (weight < exact_weight / 2)[..., query, head],
                        "overtaken": ((lead < 0) & (rows["exact"][1] > 0))[..., query, head],
                    }
                    for index, margin in enumerate(MARGINS):
                        case = {"preset": name, "tokens": tokens, "margin": margin}
                        case["bias"] = (bias[:, query, head] * math.log(2)).tolist()
                        found.append(case | {key: value[index].tolist() for key, value in values.items()})
    return found


def planted(heads: Heads, seed: int, granule: int, token: int, query: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """A granule of the background for each margin, fp32 [margins, 2, pages, HK, P, D], whose key `token` scores just as much.

    query fp32 [HK, D] in base 2, mass fp64 [HK]: the background's log-sum-exp, base 2.
    """
    page, place = divmod(token, CacheConfig.page_tokens)
    kv = background(heads, seed, granule).repeat(len(MARGINS), 1, 1, 1, 1, 1)
    key = kv[:, 0, page, :, place].double()  # [margins, HK, D]
    wanted = mass + torch.tensor(MARGINS, dtype=torch.float64)[:, None] / math.log(2)
    query = query.double()
    step = (wanted - (key * query).sum(-1)) / (query * query).sum(-1)
    kv[:, 0, page, :, place] = (key + step.unsqueeze(-1) * query).float()
    return kv


def weigh(column: Column, kv: torch.Tensor, queries: torch.Tensor, token: int, granule: int,
          granules: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log odds in nats of the planted token's weight among `granules` granules, and its score's lead over the largest of the
    others; fp64 [margins, HK, Q, G]."""
    scores = token_scores(column, encoded(column.codec, kv), queries)
    own = scores[..., token].clone()
    scores[..., token] = -math.inf
    others = torch.arange(granules) != granule
    rest = torch.logaddexp2(log_sum_exp2(column.mass[:granules][others]), log_sum_exp2(scores.movedim(-1, 0)))
    highest = torch.maximum(column.peak[:granules][others].amax(0), scores.amax(-1))
    return (own - rest) * math.log(2), own - highest


def token_scores(column: Column, records: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """The scores that attention gives every token of n granules, fp64 [n, HK, Q, G, T], base 2: by plain torch, as the kernels
    keep none. Their log-sum-exp must be the kernels'."""
    valid = torch.ones(records.shape[:2], dtype=torch.bool)
    codec = column.codec
    if column.config.codec != "planes":
        k = codec.decode(records)[0].transpose(1, 2).flatten(2, 3)  # [n, HK, T, D]
        scores = (queries.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(-2, queries.shape[1:3])
    else:
        query, keys = reference.quantize_query(queries, codec.signs["K"]), codec.load(records, "K")
        bits, scan = column.config.key_bits, column.config.key_scan_bits
        scores = reference.key_scores(query, keys, valid, 0, codec.noise[scan, bits])
        if codec.selection is not None:
            refined = reference.select(scores, valid.sum(1) * column.config.page_tokens, codec.selection)
            full = reference.key_scores(query, keys, valid, codec.key_low, codec.noise[bits, bits])
            scores = torch.where(refined, full, scores)
    part, _ = codec.attend(codec.prepare(queries), records, valid)
    difference = (log_sum_exp2(scores.double().movedim(-1, 0)) - part.m.double() - torch.log2(part.l.double())).abs().max()
    assert difference < 1e-3, f"{column.config}: the kernels differ from the reference by {difference} in log2 of the weight"
    return scores.double()


def log_sum_exp2(x: torch.Tensor) -> torch.Tensor:
    """Over the first dim."""
    return torch.logsumexp(x * math.log(2), 0) / math.log(2)


# -- what is shown


def summary(found: list[dict[str, Any]], name: str, tokens: int) -> dict[str, Any]:
    """A preset at a context, over all heads, queries and layers."""
    mine = [case for case in found if (case["preset"], case["tokens"]) == (name, tokens)]
    lost = {margin: mean(flat(mine, "lost", margin)) for margin in MARGINS}
    failing = [margin for margin, share in lost.items() if share > LOST_SHARE]
    errors = torch.tensor(flat(mine, "error", MARGINS[-1]))
    bias = torch.tensor(flat(mine, "bias", 0.0))
    return {
        "preset": name, "tokens": tokens, "cases": len(errors), "fails_at": max(failing, default=None), "lost": lost,
        "overtaken": {margin: mean(flat(mine, "overtaken", margin)) for margin in MARGINS},
        "error": [errors.quantile(share).item() for share in (0.05, 0.5, 0.95)],
        "background": [bias.mean().item(), bias.min().item(), bias.max().item()],
    }  # fmt: skip


def flat(cases_: list[dict[str, Any]], key: str, margin: float) -> list[float]:
    return [float(value) for case in cases_ if case["margin"] == margin for value in case[key]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def show(rows: list[dict[str, Any]]) -> None:
    margins = " ".join(f"{margin:>5g}" for margin in MARGINS)
    titles = f"{'background, nats':>20s} {'planted, log odds':>20s}"
    print(f"{'':44s} {'tokens':>8s} {titles}   lost, % at margin {margins}   fails at")
    for row in rows:
        bias, error = (" ".join(f"{value:+6.2f}" for value in row[name]) for name in ("background", "error"))
        lost = " ".join(f"{100 * share:5.1f}" for share in row["lost"].values())
        fails = "never" if row["fails_at"] is None else f"{row['fails_at']:g}"
        print(f"{row['preset']:44s} {row['tokens']:8d} {bias:>20s} {error:>20s}   {'':17s} {lost}   {fails}")


if __name__ == "__main__":
    main()
