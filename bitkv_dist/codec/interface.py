"""What every codec offers: whole pages in, fixed-size byte records out, and attention that reads the records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.tuning import Tuning
from bitkv_dist.kernels import dispatch
from bitkv_dist.partial import Partial


@dataclass(frozen=True)
class HeadShape:
    """The attention heads that a rank serves; `first_kv_head` is the global index of its first, `dtype` the model's."""

    layers: int
    first_kv_head: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = field(default=torch.device("cpu"))
    group: int | None = None  # query heads per KV head, for codecs that learn from an exact prefill
    fingerprint: str | None = None  # of the model's weights, for codecs that are calibrated for one
    loops: int = 1  # of the model, over layers / loops layers of weights


@dataclass
class ReadCount:
    """What decode read from sealed pages: bits, elements (keys and values), and (token, KV head) pairs scanned and refined."""

    bits: int = 0
    elements: int = 0
    scanned: int = 0
    refined: int = 0

    def add(self, other: ReadCount) -> None:
        self.bits += other.bits
        self.elements += other.elements
        self.scanned += other.scanned
        self.refined += other.refined


class Codec(Protocol):
    """One layer's codec. Pages of P tokens become records of `record_bytes` bytes per KV head, a function of the page alone."""

    record_bytes: int
    chooses_globally: bool  # whether a choice spans the sequence: such a codec also has `scan`, `mass` and `refined_of`
    fused: bool  # whether a decode step is `see` and `conclude`, compiled, in place of all from `prepare` to `finish`
    takes_tables: bool  # whether a decode step finds its pages by tables.StepTables: such a codec is a TableCodec
    positional: bool  # whether keys are coded before RoPE: `encode` then also takes the pages' global indices, a list
    book_bytes: int  # codebooks that all pages share
    joined: bool  # whether the records of a page's KV heads need each other
    rebuilt: int  # fp32 numbers that `attend` holds of each token and KV head, beside scores; 0: it reads records as they lie

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """k, v [pages, HK, P, D] in the model's dtype, finite -> uint8 [pages, HK, record_bytes]. See LoopedCodec for the one
        that also takes records of another layer."""

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [..., HK, record_bytes] -> k, v fp32 [..., HK, P, D]: what the stored bits stand for."""

    def tuning(self) -> Tuning | None:
        """What one sequence's prompt will teach this codec; None: nothing."""

    def measure(self, lesson: str, q: torch.Tensor, tuning: Tuning, records: torch.Tensor, page_valid: torch.Tensor,
                keys: torch.Tensor | None) -> Partial:
        """Statistics of one of `tuning.lessons` for queries q fp32 [HK, Q, G, D] in base 2, a partial per granule; merged over
        all granules they go to `tuning.learn`. keys [n, HK, pages * P, D]: the granules' exact keys; without them, what the
        full codes score stands for the truth."""

    def prepare(self, q: torch.Tensor, tuning: Tuning | None = None) -> Any:
        """Queries fp32 [HK, Q, G, D], times softmax scale * log2 e, in the form that `attend` takes; once per layer, step."""

    def choice(self, tuning: Tuning | None, exact: Partial) -> Any:
        """How a step's queries choose what they refine; exact: the partial [HK, Q, G] of the tokens that are not sealed."""

    def attend(self, query: Any, records: torch.Tensor, page_valid: torch.Tensor, choice: Any = None,
               granules: torch.Tensor | None = None, page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        """records uint8 [n, pages, HK, record_bytes] of n granules, page_valid bool [n, pages] -> one partial per granule,
        m, l [n, HK, Q, G], o [n, HK, Q, G, D] in the codec's own space. choice: None = as configured. granules: their global
        indices int64 [n], for a choice among the whole sequence. page_mass fp32 [n, HK, Q, G, pages]: to fill with what each
        page has of l, with rule heavy of eviction."""

    def finish(self, partial: Partial) -> Partial:
        """A merged partial [HK, Q, G] from the codec's space to the model's."""


class TableCodec(Codec, Protocol):
    """A codec whose decode step takes every length from the device."""

    def table(self, base: torch.Tensor, offsets: torch.Tensor, bounds: torch.Tensor) -> Any:
        """What `attend_table` reads. base + offsets int64 [B, slots]: where each granule's records lie; lane i of `lanes` takes
        slots i, i + lanes, ..; bounds int32 [B, lanes, 2]: first and end of a lane's pages, counted in its granules."""

    def bounds(self, spans: torch.Tensor, lanes: int) -> torch.Tensor:
        """The bounds of all lanes for the pages first .. end - 1 of each sequence, spans int64 [B, 2]."""

    def attend_table(self, query: Any, table: Any, nodes: int) -> tuple[list[Partial], torch.Tensor]:
        """Prepared queries [B, HK, 1, G, ..] -> the first `nodes` nodes of each sequence's merge tree, Partials [nodes, HK, 1,
        G] in the codec's own space, and how many tokens were refined, int64 []."""

    def conclude_table(self, root: Partial, exact: Partial) -> torch.Tensor:
        """The attention output fp32 [HK, 1, G, D] from the root of the merge tree and the partial of the exact tokens."""


def make_codec(config: CacheConfig, heads: HeadShape, layer: int) -> Codec:
    """The codec that `config.codec` names, for one layer, with the fastest kernels for the device."""
    from bitkv_dist.codec.exact import ExactCodec
    from bitkv_dist.codec.looped import ANCHOR_BITS, LoopedCodec, anchor_of, planes_config
    from bitkv_dist.codec.minmax import MinMaxCodec
    from bitkv_dist.codec.planes import PlanesCodec
    from bitkv_dist.codec.planes_cpu import PlanesCodecCpu
    from bitkv_dist.codec.residual import ResidualCodec
    from bitkv_dist.codec.tailored import TailoredCodec
    from bitkv_dist.codec.worded import WordedCodec

    if config.codec == "looped":
        if layer != anchor_of(layer, heads):
            return LoopedCodec(config, heads, layer)
        config = planes_config(config, ANCHOR_BITS)
    planes, (kernels, _) = PlanesCodecCpu, dispatch.backend(heads.device)
    words = WordedCodec if config.refines else TailoredCodec
    if kernels == dispatch.REFERENCE:
        planes = PlanesCodec
    elif kernels == dispatch.TRITON:
        from bitkv_dist.codec.planes_triton import PlanesCodecTriton as planes  # not importable without Triton

        if not config.refines:
            from bitkv_dist.codec.tailored_triton import TailoredCodecTriton as words
    codecs = {"minmax": MinMaxCodec, "exact": ExactCodec, "residual": ResidualCodec}
    return (codecs | {"planes": planes, "tailored": words})[config.codec](config, heads, layer)
