"""The planes codec on a CPU: the same records, encoded and attended to by the C++ kernels."""

from __future__ import annotations

import math

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.planes import PlanesCodec
from bitkv_dist.codec.tuning import Tuning
from bitkv_dist.kernels import cpu, dispatch, reference
from bitkv_dist.kernels.cpu.step import View, finish
from bitkv_dist.partial import Partial

MOST_DIM = 512  # the C++ kernels keep the sums of a query in tables of this size


class PlanesCodecCpu(PlanesCodec):
    """Encoding is byte for byte that of the reference. Rules that the compiled attention does not know are left to the
    reference."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.kernels = dispatch.native(heads.device)
        self.unserved = unserved_rule(config)
        if heads.head_dim > MOST_DIM:
            self.unserved = f"head_dim {heads.head_dim}"
        self.native_layout = native_layout(self)
        rule, noise = config.refine, 0.5 * math.log(2)
        self.refinement = cpu.Refinement(
            enabled=config.refines,
            group=config.refines and rule.granularity == "group",
            min_tokens=rule.min_tokens if config.refines else 0,
            share=rule.value if config.refines else 0.0,
            scan_noise=noise * self.noise[config.key_scan_bits, config.key_bits],
            full_noise=noise * self.noise[config.key_bits, config.key_bits],
        )

    @property
    def rebuilt(self) -> int:
        return super().rebuilt if self.unserved else 0

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.kernels.encode(self.native_layout, k, v, self.signs["K"], self.signs["V"], self.config.score == "unbiased")

    def prepare(self, q: torch.Tensor, tuning: Tuning | None = None) -> cpu.Query | reference.Query:
        return super().prepare(q, tuning) if self.unserved else self.kernels.quantize_query(q, self.signs["K"])

    def attend(
        self,
        query: cpu.Query | reference.Query,
        records: torch.Tensor,
        page_valid: torch.Tensor,
        choice: reference.Selection | None = None,
        granules: torch.Tensor | None = None,
        page_mass: torch.Tensor | None = None,
    ) -> tuple[Partial, ReadCount]:
        if self.unserved:
            return super().attend(query, records, page_valid, choice, granules, page_mass)
        more = [] if page_mass is None else [page_mass]
        *part, refined = self.kernels.attend(self.native_layout, query, records, page_valid, self.refinement, *more)
        return Partial(*part), self.count_reads(self.valid_pages(page_valid), query.codes.shape[1], refined)

    def valid_pages(self, page_valid: torch.Tensor) -> int | torch.Tensor:
        """How many they are, as `count_reads` takes it."""
        return int(page_valid.sum())

    def finish(self, partial: Partial) -> Partial:
        return partial._replace(o=self.kernels.rotate_back(partial.o, self.signs["V"]))

    @property
    def fused(self) -> bool:
        return not self.unserved and self.config.eviction != "heavy"  # whose masses `see` does not tell

    def see(
        self, view: View, query: torch.Tensor, rows: torch.Tensor, slabs: list[torch.Tensor], count: int | None = None
    ) -> tuple[Partial, Partial, ReadCount]:
        """A decode query fp32 [HK, 1, G, D] in base 2: its partial [HK, 1, G] over the first `count` (None: all) of the exact
        rows [2, HK, .., D], its tree nodes [V, HK, 1, G] over the sealed granules in `slabs`, and what was read. The next `see`
        of the view replaces both."""
        exact, nodes, refined = view.see(self.native_layout, self.refinement, self.signs["K"], query, rows, slabs, count)
        return Partial(*exact), Partial(*nodes), self.count_reads(view.pages, 1, refined)

    def conclude(self, root: Partial, exact: Partial, out: torch.Tensor) -> bool:
        """Fills out fp32 [1, H, D] from the partials [HK, 1, G] of sealed (root of the merge tree, or its only node) and exact
        tokens. Returns whether it is finite."""
        return finish(root, exact, self.signs["V"], out)


def unserved_rule(config: CacheConfig) -> str | None:
    """The setting that no compiled attention knows, or None."""
    if config.score == "fitted":
        return "score: fitted"
    if not config.refines:
        return None
    rule = config.refine
    if rule.skip_below is not None:
        return "refine.skip_below"
    return next(
        (
            f"refine.{name}: {value}"
            for name, value in (("rule", rule.rule), ("scope", rule.scope))
            if value in ("mass", "global")
        ),
        None,
    )


def native_layout(codec: PlanesCodec) -> cpu.Layout:
    """The record of `codec` as the C++ kernels are told of it."""
    tokens, fields = codec.config.page_tokens, codec.layout.fields
    layout = cpu.Layout(tokens, codec.heads.head_dim, codec.heads.kv_heads, GRANULE_TOKENS // tokens, codec.record_bytes)
    for index, side in enumerate("KV"):
        layout.bits[index], layout.scan_bits[index] = codec.depth(side)
        for name in ("planes", "scan", "full", "low", "centroid"):
            if side + name in fields:
                getattr(layout, name)[index] = fields[side + name].offset
    return layout
