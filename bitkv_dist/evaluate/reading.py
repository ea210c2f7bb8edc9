"""What decode reads of one layer, step by step: records, scores, attention, next to the truth that they stand for."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch

from bitkv_dist.codec.interface import Codec
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.evaluate.trace import Trace
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference.scores import key_scores
from bitkv_dist.partial import Partial, fill_lanes, lane_width, merge, reduce_lanes

QUERIES = 64  # last positions of the prompt that attend to the sealed pages


class Fresh(NamedTuple):
    """What a sound planes codec makes of one side, in its own rotated space: the page mean, and the codes of the distances z to it.

    z fp32 [pages, HK, P, D]; centroid fp32 [pages, HK, D]; lost fp32 [pages, HK, P] = mean square of z - scanned code.
    """

    z: torch.Tensor
    centroid: torch.Tensor
    codes: reference.Codes
    lost: torch.Tensor


def sealed_tokens(config: CacheConfig, tokens: int) -> range:
    """The tokens of a prompt that are sealed before any of its last QUERIES positions. ValueError when there is none."""
    first = config.sink_rounded
    end = max(0, tokens - max(config.recent_tokens, QUERIES)) // config.page_tokens * config.page_tokens
    if end <= first:
        least = first + max(config.recent_tokens, QUERIES) + config.page_tokens
        raise ValueError(f"text of {tokens} tokens: no page of it is sealed; give at least {least} tokens or smaller --recent-tokens")
    return range(first, end)


class Reading:
    """A layer's sealed pages as its codec holds them, and the last QUERIES positions of the prompt attending to them.

    T tokens are sealed; all scores are in base 2. Truth comes from the trace, everything else from the codec's own records.
    """

    def __init__(self, codec: Codec, config: CacheConfig, trace: Trace, sealed: range) -> None:
        self.codec, self.config, self.trace, self.sealed = codec, config, trace, sealed
        self.pages = {side: self.paged(x) for side, x in (("K", trace.k), ("V", trace.v))}  # [pages, HK, P, D]
        self.page_records = codec.encode(self.pages["K"], self.pages["V"])
        self.records, self.valid = self.granules(self.page_records)
        self.query = trace.q[:, :, -QUERIES:].transpose(1, 2).float() * (trace.scaling * math.log2(math.e))  # [HK, Q, G, D]
        self.prepared = codec.prepare(self.query)
        self.scannable = hasattr(codec, "load")  # a planes codec: its scores can be taken apart

    def paged(self, x: torch.Tensor) -> torch.Tensor:
        """x [HK, T of the prompt, D] -> sealed pages [pages, HK, P, D]."""
        return x[:, self.sealed.start : self.sealed.stop].unflatten(1, (-1, self.config.page_tokens)).transpose(0, 1)

    def granules(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records [pages, HK, bytes] at their places in granules [n, pages, HK, bytes], and which places hold one, bool [n, pages]."""
        per_granule = GRANULE_TOKENS // self.config.page_tokens
        first, last = self.sealed.start // self.config.page_tokens, self.sealed.stop // self.config.page_tokens
        slots = records.new_zeros(-(-last // per_granule) * per_granule, *records.shape[1:])
        slots[first:last] = records
        place = torch.arange(len(slots), device=records.device)
        return slots.unflatten(0, (-1, per_granule)), ((place >= first) & (place < last)).unflatten(0, (-1, per_granule))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, .., granule tokens] -> the sealed ones [.., T]."""
        return x.movedim(0, -2).flatten(-2)[..., self.sealed.start : self.sealed.stop]

    # -- what the records should be, and what they stand for

    @cached_property
    def fresh(self) -> dict[str, Fresh]:
        return {side: self.encode_again(side) for side in "KV"}

    def encode_again(self, side: str) -> Fresh:
        bits, scan_bits = self.codec.depth(side)
        z = reference.rotate(self.pages[side].float(), self.codec.signs[side][:, None, :])
        centroid = z.mean(-2)
        z = z - centroid.unsqueeze(-2)
        codes = reference.quantize(z, bits, scan_bits, unbiased=side == "K" and self.codec.config.score == "unbiased")
        scanned = (codes.code >> (bits - scan_bits)).float() * 2 - ((1 << scan_bits) - 1)
        lost = z - scanned * (codes.scan.float() * reference.level_unit(scan_bits)).unsqueeze(-1)
        return Fresh(z, centroid, codes, lost.square().mean(-1))

    def scanned_vectors(self, side: str) -> torch.Tensor:
        """What the scanned planes stand for, fp32 [pages, HK, P, D]."""
        _, scan_bits = self.codec.depth(side)
        plane = self.codec.load(self.page_records, side)
        return reference.decode(plane._replace(full=plane.scan), self.codec.signs[side], scan_bits, scan_bits, side)

    @cached_property
    def due_correction(self) -> torch.Tensor:
        """0.5 ln 2 |q'|^2 r_t^2 / D, [HK, Q, G, T]: half the variance of a score whose scanned code lost the energy r_t^2."""
        lost = self.fresh["K"].lost.transpose(0, 1).flatten(1)[:, None, None, :]
        return 0.5 * math.log(2) * self.query.square().sum(-1, keepdim=True) * lost

    # -- keys to scores [HK, Q, G, T]

    @cached_property
    def true_scores(self) -> torch.Tensor:
        return self.dots(self.trace.k[:, self.sealed.start : self.sealed.stop].float())

    def dots(self, k: torch.Tensor) -> torch.Tensor:
        """The query times k [HK, T, D]."""
        return (self.query.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(1, self.query.shape[1:3])

    def scores(self, low: int, correct: bool) -> torch.Tensor:
        """Scores that the codec gives with `low` bits below the scanned planes, with its own log-normal correction or without any."""
        bits, scan_bits = self.codec.depth("K")
        noise = self.codec.noise[scan_bits + low, bits] if correct else 0.0
        return self.tokens(key_scores(self.prepared, self.codec.load(self.records, "K"), self.valid, low, noise))

    @cached_property
    def bare(self) -> torch.Tensor:
        """Scanned scores without correction."""
        return self.scores(0, correct=False) if self.scannable else self.final

    @cached_property
    def scanned(self) -> torch.Tensor:
        return self.scores(0, correct=True) if self.scannable else self.final

    @cached_property
    def refined(self) -> torch.Tensor | None:
        """Which tokens the codec reads with all their planes, bool [HK, Q, G, T]; None where it refines nothing."""
        if not self.scannable or self.codec.selection is None:
            return None
        keys, values = (self.codec.load(self.records, side) for side in "KV")
        codec = self.codec
        found = reference.attend(self.prepared, keys, values, self.valid, codec.key_low, codec.value_low, codec.noise, codec.selection)
        return self.tokens(found.refined)

    @cached_property
    def final(self) -> torch.Tensor:
        """What enters the softmax: scanned scores, and those of all planes for the refined tokens."""
        if not self.scannable:
            return self.dots(self.codec.decode(self.page_records)[0].transpose(0, 1).flatten(1, 2))
        if self.refined is None or not self.codec.key_low:
            return self.scanned
        return torch.where(self.refined, self.scores(self.codec.key_low, correct=True), self.scanned)

    # -- scores to outputs [HK, Q, G, D]

    @cached_property
    def sealed_partial(self) -> Partial:
        """Attention to the sealed pages, as decode computes it."""
        part, _ = self.codec.attend(self.prepared, self.records, self.valid)
        index = torch.arange(len(self.records), device=self.valid.device)
        return self.codec.finish(reduce_lanes(fill_lanes(part, index, lane_width(len(index), 1)), 1).rows(0))

    @cached_property
    def exact_partial(self) -> Partial:
        """Attention to the tokens that are not sealed: the sink, and those from the window to the query itself."""
        k, v = (torch.cat((x[:, : self.sealed.start], x[:, self.sealed.stop :]), 1).float() for x in (self.trace.k, self.trace.v))
        count, queries = k.shape[1], self.query.shape[1]
        newest = torch.arange(count - queries, count, device=k.device)
        visible = torch.arange(count, device=k.device) <= newest[:, None]
        return Partial(*reference.attend_dense(self.query, k[None], v[None], visible[None, None, :, None, :])).rows(0)

    @cached_property
    def true_partial(self) -> Partial:
        """Attention to the sealed tokens with their true keys and values."""
        k, v = (x[:, self.sealed.start : self.sealed.stop].float() for x in (self.trace.k, self.trace.v))
        return Partial(*reference.attend_dense(self.query, k[None], v[None], None)).rows(0)

    @cached_property
    def output(self) -> torch.Tensor:
        return merge(self.sealed_partial, self.exact_partial).normalised()

    @cached_property
    def true_output(self) -> torch.Tensor:
        return merge(self.true_partial, self.exact_partial).normalised()
