"""Codebooks of one layer out of what texts have shown of it: the tensors of codec/codebooks.py, for one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bitkv_dist.codec.books import LIMIT, Books
from bitkv_dist.codec.rope import Rope, channel_pairs
from bitkv_dist.fit.attended import attended, score_cost, tempered
from bitkv_dist.fit.importance import importance, weights
from bitkv_dist.fit.kmeans import assign, kmeans
from bitkv_dist.fit.matching import group_channels
from bitkv_dist.fit.sample import Window, turned

MARGIN = 1.25  # a vector this much farther out than the outermost word still keeps its place
ANCHORS = 96  # queries of a window whose scores decide whether a head is weighted
TRIAL_STRIDE = 64  # every so many-th query decides it for form attended
TRIAL = {"vectors": 2048, "words": 64, "iterations": 6}  # of the books that decide it


@dataclass(frozen=True)
class Fit:
    """How books are fitted: to `vectors` of the tokens that teach, drawn once for a layer, in `iterations` of k-means."""

    codec: str
    form: str
    vectors: int = 8192
    iterations: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Tokens:
    """One side of a layer as its books see it: x fp32 [HK, T, D] with the scale divided out, scale fp32 [T] or None.

    teaches bool [T]; drawn int64 [vectors]: the tokens that the books are fitted to.
    """

    x: torch.Tensor
    scale: torch.Tensor | None
    teaches: torch.Tensor
    drawn: torch.Tensor

    def importance(self, tokens: torch.Tensor) -> torch.Tensor:
        """How much a normalised error of some tokens costs, fp32 [n]: their squared scale, 1 in the mean."""
        if self.scale is None:
            return torch.ones(self.x.shape[1])[tokens]
        square = self.scale[tokens].square()
        return square / square.mean().clamp(min=1e-30)


def fit_layer(windows: Sequence[Window], rope: Rope, how: Fit) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The layer's tensors by name, and the shares of the (weighted) variance that keys and values lose, taught and held out."""
    k, v = (torch.cat([getattr(window, side) for window in windows], 1) for side in "kv")
    teaches = torch.cat([torch.arange(window.k.shape[1]) < window.taught for window in windows])
    taught = teaches.nonzero().flatten()
    drawn = taught[torch.randperm(len(taught), generator=torch.Generator().manual_seed(how.seed))[: how.vectors]]
    plain = {side: Tokens(x, None, teaches, drawn) for side, x in (("K", k), ("V", v))}
    if how.codec == "residual":
        books = {side: residual_books(tokens, how) for side, tokens in plain.items()}
        sides, found = plain, {}
    else:
        weight, switches = channel_weights(windows, rope, plain["K"], how)
        keys = scaled(plain["K"], weight)
        books = {"K": tailored_books(keys, weight, rope, how), "V": value_books(plain["V"], how)}
        sides, found = plain | {"K": keys}, {"K.weighted": switches}
    lost: dict[str, float] = {}
    for side, tokens in sides.items():
        error = tokens.x - coded(books[side], tokens.x)
        found |= {f"{side}.{name}": tensor for name, tensor in books[side].items()}
        found[f"{side}.lost"] = channel_losses(error[:, ~teaches], rope.half if side == "K" else 0)
        for part, chosen in (("taught", teaches), ("held_out", ~teaches)):
            lost[f"{side}.{part}"] = share_lost(error[:, chosen], tokens, chosen, books[side]["weight"])
    return found, lost


# -- tailored


def scaled(tokens: Tokens, weight: torch.Tensor) -> Tokens:
    """Keys over the root mean square of a token's weighted keys in all heads; weight fp32 [HK, D]."""
    scale = (tokens.x * weight[:, None]).square().mean((0, 2)).sqrt()
    return replace(tokens, x=tokens.x / torch.where(scale == 0, 1.0, scale)[:, None], scale=scale)


def channel_weights(windows: Sequence[Window], rope: Rope, keys: Tokens, how: Fit) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [HK, D], and which heads are weighted, uint8 [HK]: those whose scores small trial books serve better with weights.

    The weights know the diagonal of M alone; where its other entries matter, plain channels may do better.
    """
    heads, _, dim = keys.x.shape
    even = torch.ones(heads, dim)
    if how.form == "unweighted":
        return even, torch.zeros(heads, dtype=torch.uint8)
    taught = [window.q[:, :, : window.taught] for window in windows]
    count = torch.tensor([q.shape[2] * (q.shape[2] + 1) / 2 for q in taught])
    diagonal = sum(importance(q, rope.inv_freq) * pairs for q, pairs in zip(taught, count / count.sum(), strict=True))
    weighed = weights(diagonal)
    if how.form == "attended":
        weighed = tempered(weighed, weights(sum(attended(window, rope) for window in windows)))
    if how.form == "threshold":  # a channel's own weight does not move its threshold; scales are taken of weighted keys
        return weighed, torch.ones(heads, dtype=torch.uint8)
    trial = Fit(how.codec, how.form, TRIAL["vectors"], TRIAL["iterations"], how.seed)
    errors = []
    for weight in (weighed, even):
        tokens = scaled(keys, weight)
        books = tailored_books(tokens, weight, rope, trial, TRIAL["words"])
        error = (tokens.x - coded(books, tokens.x)) * tokens.scale[:, None]
        errors.append((score_cost_of_all if how.form == "attended" else score_error)(windows, rope, error))
    switched = errors[0] < errors[1]
    return torch.where(switched[:, None], weighed, even), switched.to(torch.uint8)


def score_cost_of_all(windows: Sequence[Window], rope: Rope, error: torch.Tensor) -> torch.Tensor:
    """What key errors fp32 [HK, T, D] of all windows' tokens cost the queries that read them by code, fp32 [HK]."""
    parts = zip(windows, error.split([window.k.shape[1] for window in windows], 1), strict=True)
    return sum(score_cost(window, rope, part[:, : window.taught], TRIAL_STRIDE) for window, part in parts)


def score_error(windows: Sequence[Window], rope: Rope, error: torch.Tensor) -> torch.Tensor:
    """Mean square error of scores for key errors fp32 [HK, T, D] of all windows' tokens, fp32 [HK]: the teaching queries of
    ANCHORS positions of each window with all the keys that they see."""
    total, pairs, first = torch.zeros(len(error)), 0, 0
    for window in windows:
        n = window.taught
        positions = torch.linspace(0, n - 1, min(ANCHORS, n)).long()
        turned_error = turned(rope, error[:, first : first + n])
        q = turned(rope, window.q[:, :, :n].flatten(0, 1)).unflatten(0, window.q.shape[:2])[:, :, positions].flatten(1, 2)
        seen = (torch.arange(n) <= positions[:, None]).repeat(window.q.shape[1], 1)
        total += ((q @ turned_error.transpose(1, 2) * window.scaling).square() * seen).sum((1, 2))
        pairs += int(seen.sum())
        first += window.k.shape[1]
    return total / pairs


def tailored_books(tokens: Tokens, weight: torch.Tensor, rope: Rope, how: Fit, words: int = 1024) -> dict[str, torch.Tensor]:
    """Books of keys: octets of channels, or single channels of two levels for form threshold."""
    x = tokens.x * weight[:, None]
    heads, _, dim = x.shape
    if how.form == "threshold":
        channels, words = torch.arange(dim).view(1, -1, 1).expand(heads, -1, -1), 2
    else:
        pairs, taught = channel_pairs(rope.half, dim), x[:, tokens.teaches]
        channels = torch.stack([group_channels(torch.cov(head.T), pairs) for head in taught])
    return fitted(tokens, x, channels, words, how) | {"center": torch.zeros(heads, dim), "weight": weight}


def value_books(tokens: Tokens, how: Fit) -> dict[str, torch.Tensor]:
    heads, _, dim = tokens.x.shape
    width, words = (1, 2) if how.form == "threshold" else (8, 1024)
    channels = torch.arange(dim).view(1, -1, width).expand(heads, -1, -1)
    even = {"center": torch.zeros(heads, dim), "weight": torch.ones(heads, dim)}
    return fitted(tokens, tokens.x, channels, words, how) | even


# -- residual


def residual_books(tokens: Tokens, how: Fit) -> dict[str, torch.Tensor]:
    """Blocks of 4 neighbouring channels, normalised one by one; two stages of 16 words."""
    heads, _, dim = tokens.x.shape
    taught = tokens.x[:, tokens.teaches]
    center, weight = taught.mean(1), 1 / taught.std(1).clamp(min=1e-6)
    channels = torch.arange(dim).view(1, -1, 4).expand(heads, -1, -1)
    x = (tokens.x - center[:, None]) * weight[:, None]
    return fitted(tokens, x, channels, 16, how, stages=2) | {"center": center, "weight": weight}


# -- both


def fitted(tokens: Tokens, x: torch.Tensor, channels: torch.Tensor, words: int, how: Fit,
           stages: int = 1) -> dict[str, torch.Tensor]:
    """words, unit and channels of books for x fp32 [HK, T, D], groups channels int64 [HK, groups, n].

    The words of a stage are frozen, rounded as they are stored, before the next is fitted to what they leave over.
    """
    heads, groups, width = channels.shape
    order = channels.flatten(1)
    tokens_drawn = tokens.drawn[: how.vectors]
    drawn = x[:, tokens_drawn].gather(2, order[:, None].expand(-1, len(tokens_drawn), -1))
    left = drawn.unflatten(2, (groups, width)).transpose(1, 2).flatten(0, 1)  # [HK * groups, vectors, n]
    weight = tokens.importance(tokens_drawn)
    found, unit = [], None
    for stage in range(stages):
        real = kmeans(left, weight, words, how.iterations, how.seed + stage)
        if unit is None:
            unit = (real.abs().amax((1, 2)) * (MARGIN / LIMIT)).clamp(min=1e-12)
        whole = torch.round(real / unit[:, None, None])
        found.append(whole.to(torch.int16))
        if stage + 1 < stages:
            stored = whole * unit[:, None, None]
            left = torch.stack([vectors - book[assign(vectors, book)[0]] for vectors, book in zip(left, stored, strict=True)])
    return {
        "words": torch.stack(found, 1).unflatten(0, (heads, groups)),
        "unit": unit.view(heads, groups),
        "channels": order.to(torch.int16),
    }


def coded(books: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x fp32 [HK, T, D] encoded and decoded."""
    fields = books | {"channels": books["channels"].long()}
    codec = Books(*(fields[name] for name in ("words", "unit", "channels", "center", "weight")))
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
    return codec.decode(codec.encode(padded))[:, : x.shape[1]]


def channel_losses(error: torch.Tensor, half: int) -> torch.Tensor:
    """Mean square of errors fp32 [HK, n, D] by channel, fp32 [HK, D]; the two channels of a RoPE pair (j, j + half) alike."""
    mean = error.square().mean(1)
    pair = (mean[:, :half] + mean[:, half : 2 * half]) / 2
    return torch.cat((pair, pair, mean[:, 2 * half :]), 1)


def share_lost(error: torch.Tensor, tokens: Tokens, chosen: torch.Tensor, weight: torch.Tensor) -> float:
    """Weighted square of errors [HK, n, D] over the weighted variance of the same tokens."""
    importance = tokens.importance(chosen)[None, :, None] * weight[:, None].square()
    x = tokens.x[:, chosen]
    spread = (x - x.mean(1, keepdim=True)).square() * importance
    return float((error.square() * importance).sum() / spread.sum().clamp(min=1e-30))
