"""Codec tailored on a CPU, with and without planes behind the words: decode steps attended to by the C++ kernels.

Records are those of plain torch, which also attends to what several queries of a sequence ask at once (a chunk of a prompt): it
decodes a page once for all of them. The sums of both are in different orders, so their last bits differ.
"""

from __future__ import annotations

import functools

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.book_pages import BookCodec
from bitkv_dist.codec.books import Books
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.rope import tables
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.codec.worded import WordedCodec
from bitkv_dist.kernels import cpu
from bitkv_dist.kernels.cpu import words
from bitkv_dist.kernels.cpu.step import View, finish
from bitkv_dist.partial import Partial

WORD, MOST_BITS = 8, 12  # channels of a word, bits of its index that the kernels know
SIDES = "KV"


class WordsOnCpu(BookCodec):
    """What both codecs have in common. Books that the kernels do not know are left to plain torch."""

    refinement = cpu.Refinement()
    left = cpu.Layout()
    signs: dict[str, torch.Tensor] | None = None  # of the planes

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.rule, self.evicts_heavy = config.refine, config.eviction == "heavy"
        self.unserved = None if self.known_books() else "codec tailored with other words than of whole RoPE pairs, 8 channels"
        if self.unserved is None:
            self.tables = {side: kernel_tables(self.books[side], heads.head_dim) for side in SIDES}
            self.book_bytes += sum(t.nbytes for side in SIDES for t in self.tables[side] if t is not None)
            self.native = self.describe()

    def known_books(self) -> bool:
        """Words of eight channels in one stage, a power of two of them; of keys, pairs that RoPE turns, or two channels that it
        leaves alone."""
        for books in self.books.values():
            if (books.width, books.stages) != (WORD, 1) or books.bits > MOST_BITS or books.words.shape[-2] != 1 << books.bits:
                return False
        x, y = channels_of(self.books["K"], self.heads.head_dim).unflatten(-1, (-1, 2)).unbind(-1)
        half = self.rope.half
        return bool(torch.where(x < half, y == x + half, torch.minimum(x, y) >= 2 * half).all())

    def describe(self) -> words.Words:
        fields, correction = self.layout.fields, self.correction
        self.places = places(tuple(self.rope.inv_freq.tolist()), self.tokens)
        described = words.Words(
            self.tokens, self.heads.head_dim, self.heads.kv_heads, GRANULE_TOKENS // self.tokens, self.record_bytes,
            self.rope.half, fields["page"].offset, fields["Kscale"].offset, self.share, self.layout.bytes,
            places=self.places.data_ptr(), page_cosine=self.rope.pages[0].data_ptr(), page_sine=self.rope.pages[1].data_ptr(),
            correction=None if correction is None else correction.data_ptr(), left=self.left, scaling=self.rope.scaling,
        )  # fmt: skip
        for index, side in enumerate(SIDES):
            factor, center, channels = self.tables[side]
            described.bits[index], described.codes[index] = self.books[side].bits, fields[f"{side}codes"].offset
            described.words[index], described.factor[index] = self.books[side].words.data_ptr(), factor.data_ptr()
            described.center[index] = None if center is None else center.data_ptr()
            described.channels[index] = channels.data_ptr()
            if self.signs is not None:
                described.signs[index] = self.signs[side].data_ptr()
        return described

    @property
    def fused(self) -> bool:
        return self.unserved is None and not self.evicts_heavy  # whose masses `see` does not tell

    def attend(self, query: torch.Tensor, records: torch.Tensor, page_valid: torch.Tensor, choice: None = None,
               granules: torch.Tensor | None = None, page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        if self.unserved is not None or query.shape[1] > 1:
            return super().attend(query, records, page_valid, choice, granules, page_mass)
        *part, refined = words.attend(self.native, self.refinement, query, records, page_valid, page_mass)
        return Partial(*part), self.count_reads(int(page_valid.sum()), 1, refined)

    def see(
        self, view: View, query: torch.Tensor, rows: torch.Tensor, slabs: list[torch.Tensor], count: int | None = None
    ) -> tuple[Partial, Partial, ReadCount]:
        """As PlanesCodecCpu.see, with tree nodes in the model's space."""
        exact, nodes, refined = words.see(view, self.native, self.refinement, query, rows, slabs, count)
        return Partial(*exact), Partial(*nodes), self.count_reads(view.pages, 1, refined)

    def conclude(self, root: Partial, exact: Partial, out: torch.Tensor) -> bool:
        """As PlanesCodecCpu.conclude."""
        return finish(root, exact, None, out)


class TailoredCodecCpu(WordsOnCpu, TailoredCodec):
    """Words alone."""


class WordedCodecCpu(WordsOnCpu, WordedCodec):
    """Words scan, planes refine."""

    def describe(self) -> words.Words:
        rule = self.rule
        self.refinement = cpu.Refinement(True, rule.granularity == "group", rule.min_tokens, rule.value)
        self.left, self.signs = self.below.native_layout, self.below.signs
        return super().describe()


def channels_of(books: Books, dim: int) -> torch.Tensor:
    """int64 [HK, D]: which channel stands where in the groups."""
    heads = len(books.words)
    return torch.arange(dim).expand(heads, -1) if books.channels is None else books.channels


def kernel_tables(books: Books, dim: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Factor and center fp32 [HK, D] in the order of the groups, by which a word's numbers become channels (center None: all
    0), and that order, int32 [HK, D]."""
    channels = channels_of(books, dim)
    weight, center = (t.squeeze(-2).gather(-1, channels) for t in (books.weight, books.center))
    factor = books.unit.repeat_interleave(books.width, -1) / weight
    return factor.contiguous(), center.contiguous() if center.any() else None, channels.int().contiguous()


@functools.cache
def places(inv_freq: tuple[float, ...], page_tokens: int) -> torch.Tensor:
    """Cosine and sine of the places in a page, fp32 [r/2 + 1, 2, P]: for channels that RoPE turns, and for the others."""
    turned = tables(inv_freq, page_tokens, torch.device("cpu"))[1].permute(2, 0, 1)
    alone = torch.tensor((1.0, 0.0)).view(1, 2, 1).expand(1, 2, page_tokens)
    return torch.cat((turned, alone)).contiguous()
