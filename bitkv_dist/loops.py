"""Cache layers of a model that runs its layers in loops, where a page of all loops is sealed at once.

The pages of earlier loops are coded against those of the last one, the anchor, which a token reaches last. In decode steps the
exact window bridges that: a page is due long after its last token has passed all loops, so the first loop seals it for all,
out of their windows, before the step's token comes. A chunk of tokens is held by every loop until the last has seen it: its
size bounds what is held. An exact prefill walks a whole prompt through one loop before the next: each rank holds the exact
pages that it is going to seal, of all loops but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bitkv_dist.layer import PackedLayer
from bitkv_dist.sealing import PAGES_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bitkv_dist.cache import PackedCache
    from bitkv_dist.calibration import Probe
    from bitkv_dist.prompt import Prompt
    from bitkv_dist.sequence import SequenceState


def looped_layers(cache: PackedCache) -> list[LoopedLayer]:
    """The layers of a cache, each of which knows those that run the same weights."""
    layers = [LoopedLayer(cache, index) for index in range(cache.heads.layers)]
    stack = len(layers) // cache.heads.loops
    for layer in layers:
        layer.loops = layers[layer.index % stack :: stack]
    return layers


class LoopedLayer(PackedLayer):
    """One loop of one layer of weights. Its `loops`, itself among them, are in the order in which a token passes them."""

    loops: list[LoopedLayer]

    def __init__(self, cache: PackedCache, index: int) -> None:
        super().__init__(cache, index)
        self.chunks: dict[int, torch.Tensor] = {}  # sequence -> exact rows of a chunk that the last loop has not seen
        self.pages: dict[int, dict[int, torch.Tensor]] = {}  # sequence -> page -> its rows [2, HK, P, D], of a prompt

    @property
    def anchor(self) -> LoopedLayer:
        return self.loops[-1]

    # -- writing

    def extend(self, sequence: int, kv: torch.Tensor) -> tuple[torch.Tensor, int]:
        length = self.states[sequence].length + 1
        if self.states[sequence].sealed_at(length) > self.states[sequence].sealed_end:
            self.seal_together(sequence, length, [layer.states[sequence].rows() for layer in self.loops])
        return super().extend(sequence, kv)

    def settle(self, sequence: int, rows: torch.Tensor) -> None:
        self.chunks[sequence] = rows
        if self is self.anchor:
            held = [layer.chunks.pop(sequence) for layer in self.loops]
            self.seal_together(sequence, self.states[sequence].length, held)

    def seal_together(self, sequence: int, length: int, rows: list[torch.Tensor]) -> None:
        """Seal the pages due at `length` tokens in all loops, out of each one's exact rows [2, HK, count, D], which start with
        the sink, and keep the rest of them."""
        state = self.states[sequence]
        end, page, sink = state.sealed_at(length), state.page_tokens, state.sink
        first, count = state.sealed_end, end - state.sealed_end
        numbers = self.wanted(sequence, range(first // page, end // page))
        for some in batches(numbers):
            self.seal_all(sequence, some, [self.cut(each, [number * page - first + sink for number in some]) for each in rows])
        for layer, each in zip(self.loops, rows, strict=True):
            layer.states[sequence].sealed_end = end
            layer.keep(sequence, torch.cat((each[:, :, :sink], each[:, :, sink + count :]), dim=2))

    def cut(self, rows: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """The pages [2, n, HK, P, D] that begin at these places of rows [2, HK, count, D]."""
        return torch.stack([rows[:, :, start : start + self.cache.config.page_tokens] for start in starts], dim=1)

    def take_prompt(self, sequence: int, prompt: Prompt, probes: list[Probe], received: torch.Tensor | None = None) -> None:
        state = self.states[sequence]
        state.length, end, page = prompt.tokens, state.sealed_at(prompt.tokens), state.page_tokens
        copied = self.cache.shard.ranks > 1  # else the prompt is the rank's own, and stays as it is
        wanted = set(self.wanted(sequence, range(state.sink // page, end // page)))
        self.pages[sequence] = {
            start // page: rows.clone() if copied else rows
            for start, rows in prompt.pieces(state.sink, end, page)
            if start // page in wanted
        }
        self.keep(sequence, torch.cat((prompt.read(0, min(state.sink, prompt.tokens)), prompt.read(end, prompt.tokens)), dim=2))
        state.sealed_end = end
        if self is self.anchor:
            held = [layer.pages.pop(sequence) for layer in self.loops]
            for some in batches(sorted(held[0])):
                self.seal_all(sequence, some, [torch.stack([pages.pop(number) for number in some], dim=1) for pages in held])

    def seal_all(self, sequence: int, numbers: list[int], pages: list[torch.Tensor]) -> None:
        """Encode and store these pages of all loops; pages: of each loop [2, n, HK, P, D]."""
        anchors = None
        for layer, each in reversed(list(zip(self.loops, pages, strict=True))):
            layer.check_finite(each, numbers)
            records = layer.codec.encode(*each) if anchors is None else layer.codec.encode(*each, anchors)
            anchors = records if anchors is None else anchors
            layer.store(sequence, numbers, records)

    # -- reading

    def blocks(
        self, state: SequenceState, most: int, end: int, of: tuple[int, int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """With the anchor's records behind an earlier loop's own."""
        if self is self.anchor:
            yield from super().blocks(state, most, end, of)
            return
        anchor = self.anchor.states[self.states.index(state)]
        both = zip(state.granules(most, end, *of), anchor.granules(most, end, *of), strict=True)
        for (records, valid, granules), (anchors, _, same) in both:
            assert granules == same  # all loops seal, and make room, together
            yield torch.cat((records, anchors), dim=-1), valid, granules


def batches(numbers: Sequence[int]) -> Iterator[list[int]]:
    for first in range(0, len(numbers), PAGES_AT_ONCE):
        yield list(numbers[first : first + PAGES_AT_ONCE])
