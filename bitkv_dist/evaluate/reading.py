"""What decode reads of one layer, step by step: records, scores, attention, next to the truth that they stand for."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch

from bitkv_dist.codec.interface import Codec, ReadCount
from bitkv_dist.evaluate.trace import Trace
from bitkv_dist.kernels import reference
from bitkv_dist.layer import base2
from bitkv_dist.partial import Partial, merge


class Fresh(NamedTuple):
    """What a sound planes codec makes of one side, in its own rotated space: the page mean, and codes of the distances z to it.

    z fp32 [pages, HK, P, D]; centroid fp32 [pages, HK, D]; lost fp32 [pages, HK, P] = mean square of z - scanned code.
    """

    z: torch.Tensor
    centroid: torch.Tensor
    codes: reference.Codes
    lost: torch.Tensor


class Overheard:
    """Stands in for a codec and keeps what the layer gave `attend`: a call per block of granules."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def attend(self, *given: Any) -> tuple[Partial, ReadCount]:
        self.calls.append(given)
        return self.codec.attend(*given)


class Reading:
    """A layer's sealed pages, and the last n positions of the prompt attending to them through the layer itself.

    T tokens are sealed, in pages of P; all scores are in base 2. Truth comes from the trace, everything else from the layer's
    records, through its codec and the reference kernels.
    """

    def __init__(self, trace: Trace) -> None:
        layer, state = trace.layer, trace.layer.states[0]
        self.codec, self.sealed = layer.codec, slice(state.sink, state.sealed_end)
        self.k, self.v = (x[:, self.sealed].float() for x in (trace.k, trace.v))  # true, [HK, T, D]
        paged = (x.unflatten(1, (-1, state.page_tokens)).transpose(0, 1) for x in (self.k, self.v))
        self.pages = dict(zip("KV", paged, strict=True))  # side -> true, [pages, HK, P, D]
        self.query = base2(trace.q, trace.scaling)  # [HK, n, G, D]
        self.scannable = hasattr(self.codec, "load")  # a planes codec: its scores can be taken apart

        self.exact_partial = layer.exact_partial(self.query, state.exact[:, :, : state.exact_count()])
        layer.codec = overheard = Overheard(self.codec)
        nodes = layer.sealed_nodes(0, self.query, self.exact_partial)
        layer.codec = self.codec
        self.sealed_partial = self.codec.finish(layer.cache.shard.reduce([nodes], [0])[0])
        prepared, records, valid, choice = list(zip(*overheard.calls, strict=True))[:4]
        self.prepared, self.choice = prepared[0], choice[0]
        if self.scannable:  # kernels for other machines hold the same numbers as int8
            self.prepared = reference.Query(*(part if part is None else part.float() for part in self.prepared))
            self.unfitted = self.prepared._replace(factor=None, offset=None)
        self.records, self.valid = torch.cat(records), torch.cat(valid)
        self.granules = torch.tensor(state.sealed.granules[: len(self.records)], device=self.valid.device)
        self.page_records = self.records[self.valid]  # [pages, HK, record_bytes]

    # -- what the records should be, and what they stand for

    @cached_property
    def fresh(self) -> dict[str, Fresh]:
        return {side: self.encode_again(side) for side in "KV"}

    def encode_again(self, side: str) -> Fresh:
        bits, scan_bits = self.codec.depth(side)
        z = reference.rotate(self.pages[side], self.codec.signs[side][:, None, :])
        centroid = z.mean(-2)
        z = z - centroid.unsqueeze(-2)
        codes = reference.quantize(z, bits, scan_bits, unbiased=side == "K" and self.codec.config.score == "unbiased")
        scanned = (codes.code >> (bits - scan_bits)).float() * 2 - ((1 << scan_bits) - 1)
        lost = z - scanned * (codes.scan.float() * reference.level_unit(scan_bits)).unsqueeze(-1)
        return Fresh(z, centroid, codes, lost.square().mean(-1))

    def scanned_vectors(self, side: str) -> torch.Tensor:
        """What the scanned planes stand for, fp32 [HK, T, D]."""
        _, scan_bits = self.codec.depth(side)
        plane = self.codec.load(self.page_records, side)
        return flat(reference.decode(plane._replace(full=plane.scan), self.codec.signs[side], scan_bits, scan_bits, side))

    def vectors(self, side: str) -> torch.Tensor:
        """What all planes stand for, fp32 [HK, T, D]."""
        return flat(self.codec.decode(self.page_records)["KV".index(side)])

    # -- scores [HK, n, G, T]

    @cached_property
    def true_scores(self) -> torch.Tensor:
        return self.dots(self.k)

    def dots(self, k: torch.Tensor) -> torch.Tensor:
        """The query times k [HK, T, D]."""
        return (self.query.flatten(1, 2) @ k.transpose(-1, -2)).unflatten(1, self.query.shape[1:3])

    @cached_property
    def due_correction(self) -> torch.Tensor:
        """0.5 ln 2 |q'|^2 r_t^2 / D: half the variance of a score whose scanned code lost the energy r_t^2."""
        lost = self.fresh["K"].lost.transpose(0, 1).flatten(1)[:, None, None, :]
        return 0.5 * math.log(2) * self.query.square().sum(-1, keepdim=True) * lost

    def scores(self, query: reference.Query, low: int, correct: bool) -> torch.Tensor:
        """The codec's scores with `low` bits below the scanned planes, with its own log-normal correction or without any."""
        bits, scan_bits = self.codec.depth("K")
        noise = self.codec.noise[scan_bits + low, bits] if correct else 0.0
        return self.sealed_of(reference.key_scores(query, self.codec.load(self.records, "K"), self.valid, low, noise))

    def sealed_of(self, x: torch.Tensor) -> torch.Tensor:
        """x [granules, .., granule tokens] -> the sealed tokens [.., T]."""
        return x.movedim(0, -2).flatten(-2)[..., self.valid.repeat_interleave(x.shape[-1] // self.valid.shape[1], 1).flatten()]

    @cached_property
    def bare(self) -> torch.Tensor:
        """Scanned scores without correction, and without what `score: fitted` has learnt from the prompt."""
        return self.scores(self.unfitted, 0, correct=False) if self.scannable else self.final

    @cached_property
    def scanned(self) -> torch.Tensor:
        """Scanned scores without what was learnt."""
        return self.scores(self.unfitted, 0, correct=True) if self.scannable else self.final

    @cached_property
    def refined(self) -> torch.Tensor | None:
        """Which tokens the layer had read with all their planes, bool; None where it refines nothing."""
        if self.choice is None:
            return None
        codec, (keys, values) = self.codec, (self.codec.load(self.records, side) for side in "KV")
        lows = codec.key_low, codec.value_low
        found = reference.attend(self.prepared, keys, values, self.valid, *lows, codec.noise, self.choice, self.granules)
        return self.sealed_of(found.refined)

    @cached_property
    def final(self) -> torch.Tensor:
        """What enters the softmax."""
        if self.scannable:
            return self.entering(correct=True)
        if hasattr(self.codec, "entering"):
            words, left = self.codec.parts(self.records)
            return self.sealed_of(self.codec.entering(self.query, words[0], left[0], self.records, self.valid)[0])
        query, k = self.codec.scored(self.query, self.vectors("K").unsqueeze(0), self.page_records.unsqueeze(0))
        return (query.flatten(1, 2) @ k[0].transpose(-1, -2)).unflatten(1, query.shape[1:3])

    def entering(self, correct: bool) -> torch.Tensor:
        """Scanned scores, and those of all planes for the refined tokens, with or without correction."""
        if self.prepared.factor is not None:
            scanned = self.scores(self.prepared, 0, correct)
        else:
            scanned = self.scanned if correct else self.bare
        if self.refined is None or not self.codec.key_low:
            return scanned
        return torch.where(self.refined, self.scores(self.prepared, self.codec.key_low, correct), scanned)

    def centroids(self, side: str) -> torch.Tensor:
        """The centroid of each token's page, fp32 [HK, T, D]."""
        plane = self.codec.load(self.page_records, side)
        rotated = plane.centroid.float().unsqueeze(-2).expand(-1, -1, plane.full.shape[-1], -1)
        return flat(reference.rotate_back(rotated, self.codec.signs[side][:, None, :]))

    # -- outputs [HK, n, G, D]

    @cached_property
    def true_partial(self) -> Partial:
        """Attention to the sealed tokens with their true keys and values."""
        return Partial(*reference.attend_dense(self.query, self.k[None], self.v[None], None)).rows(0)

    @cached_property
    def output(self) -> torch.Tensor:
        return merge(self.sealed_partial, self.exact_partial).normalised()

    @cached_property
    def true_output(self) -> torch.Tensor:
        return merge(self.true_partial, self.exact_partial).normalised()


def flat(pages: torch.Tensor) -> torch.Tensor:
    """[pages, HK, P, D] -> [HK, T, D]."""
    return pages.transpose(0, 1).flatten(1, 2)
