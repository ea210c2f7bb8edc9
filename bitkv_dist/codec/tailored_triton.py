"""The codec tailored on a GPU: the same records, attended to by a Triton kernel.

A chunk of several positions, of a packed prefill, is left to the reference: it rebuilds a page once for all of them.
"""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.books import Books
from bitkv_dist.codec.codebooks import MOST_EXACT, as_kernels_take
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.kernels import triton
from bitkv_dist.partial import Partial, merge

WIDTH = 8  # channels of a word
MOST_DIM = 128


class TailoredCodecTriton(TailoredCodec):
    """What the kernel does not know is left to the reference, by name."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.unserved = "eviction: heavy" if config.eviction == "heavy" else self.unserved_books()
        self.takes_tables = self.unserved is None
        if self.takes_tables:
            for books in self.books.values():
                books.words = as_kernels_take(books.words)  # encoding reads them as fp32
            self.pages = self.word_pages()
            tables = (*self.pages.keys[1:], *self.pages.values[1:], self.pages.place_turns)
            self.book_bytes += sum(table.nbytes for table in tables)

    def unserved_books(self) -> str | None:
        """What about this file the kernel does not know, or None."""
        keys, dim, half = self.books["K"], self.heads.head_dim, self.rope.half
        if any(books.width != WIDTH or books.stages != 1 for books in self.books.values()):
            return f"codebooks of other than {WIDTH} channels"
        if dim > MOST_DIM:
            return f"head_dim {dim}"
        if any(as_kernels_take(books.words).dtype != torch.float16 for books in self.books.values()):
            return f"codebooks of numbers above {MOST_EXACT}"
        if keys.center.any():
            return "codebooks of centred keys"
        first, second = channels_of(keys).unflatten(-1, (-1, 2)).unbind(-1)
        paired = torch.where(first < half, second == first + half, torch.minimum(first, second) >= 2 * half)
        return None if paired.all() else "codebooks that part the channels of a pair"

    def word_pages(self) -> triton.WordPages:
        fields, rope, heads = self.layout.fields, self.rope, self.heads
        keys, values = key_words(self.books["K"], rope.scaling), value_words(self.books["V"])
        pair = keys.channels[:, ::2].long()
        turns = torch.zeros(2, heads.kv_heads, self.tokens, 4 * triton.padded_groups(heads.head_dim), device=heads.device)
        for table, places, still in zip(turns, rope.places, (1.0, 0.0), strict=True):  # cosines, then sines
            places = torch.cat((places, places.new_full((self.tokens, 1), still)), 1)
            table[..., : pair.shape[1]] = places[:, pair.clamp(max=rope.half)].transpose(0, 1)
        correction = None if self.correction is None else self.correction[:, 0, 0].contiguous()
        codes = fields["Kcodes"].offset, fields["Vcodes"].offset
        return triton.WordPages(
            self.tokens, heads.head_dim, self.record_bytes, codes, fields["Kscale"].offset, self.share, keys, values,
            correction, rope.pages, turns.transpose(0, 1).contiguous(),
        )  # fmt: skip

    def attend(self, query: torch.Tensor, records: torch.Tensor, page_valid: torch.Tensor, choice: None = None,
               granules: torch.Tensor | None = None, page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        if self.unserved or query.shape[1] > 1 or len(records) == 0:
            return super().attend(query, records, page_valid, page_mass=page_mass)
        part = triton.attend_words(self.pages, query[None], triton.granule_table(records, page_valid))
        return Partial(*(tensor[0] for tensor in part)), self.count_reads(page_valid.sum(), 1)

    def table(self, base: torch.Tensor, offsets: torch.Tensor, bounds: torch.Tensor) -> triton.Table:
        return triton.Table(base, offsets, bounds)

    def bounds(self, spans: torch.Tensor, lanes: int) -> torch.Tensor:
        return triton.lane_bounds(spans, lanes, GRANULE_TOKENS // self.tokens)

    def attend_table(self, query: torch.Tensor, table: triton.Table, nodes: int) -> tuple[list[Partial], torch.Tensor]:
        lanes = triton.attend_words(self.pages, query, table)
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        return [Partial(*triton.halve(*sequence, nodes)) for sequence in zip(*lanes, strict=True)], nothing

    def conclude_table(self, root: Partial, exact: Partial) -> torch.Tensor:
        return merge(root, exact).normalised()


def channels_of(books: Books) -> torch.Tensor:
    """Which channel stands where in the groups, int64 [HK, D]."""
    if books.channels is not None:
        return books.channels
    return torch.arange(books.groups * books.width, device=books.words.device).expand(len(books.words), -1)


def key_words(books: Books, scaling: float) -> triton.Keys:
    """The books of keys as the kernel takes them; scaling: RoPE's factor."""
    channels = channels_of(books)
    worth = scaling * books.unit.repeat_interleave(WIDTH, 1) / books.weight[:, 0].gather(1, channels)
    factor = worth.unflatten(1, (-1, 2)).amax(-1)
    shares = worth / factor.repeat_interleave(2, 1)
    return triton.Keys(books.words[:, :, 0], channels.int().contiguous(), factor, shares)


def value_words(books: Books) -> triton.Values:
    channels = channels_of(books)
    factor = books.unit.repeat_interleave(WIDTH, 1) / books.weight[:, 0].gather(1, channels)
    return triton.Values(books.words[:, :, 0], channels.int().contiguous(), factor, books.center[:, 0].contiguous())
