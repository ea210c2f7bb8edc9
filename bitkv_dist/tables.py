"""What a decode step reads, in device tensors of a constant shape: every length is a number in one of them.

A step that takes its lengths from here is the same work whatever they are, so a CUDA graph of it can be replayed token after
token. The host only seals the pages that are due, before a step, and writes a few numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.partial import lane_width

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache


class StepTables:
    """The tables of a decode step of some sequences on this rank; `advance` before each step.

    token, position int64 [B, 1]: the token fed and where it stands. row int64 [B]: the exact row that its key and value take.
    tables: the codec's, one per layer. Their tensors stay where they are until `stale`.
    """

    def __init__(self, cache: PackedCache, sequences: list[int]) -> None:
        self.cache, self.sequences = cache, sequences
        device, batch = cache.heads.device, len(sequences)
        self.numbers = torch.zeros(batch, 3, dtype=torch.int64, device=device)
        self.token, self.position, self.row = self.numbers[:, :1], self.numbers[:, 1:2], self.numbers[:, 2]
        self.page_tokens = cache.config.page_tokens
        self.slots = max(1, self.needed(), *(state.reserved_granules for state in self.states(0)))
        self.anchor = torch.zeros(16, dtype=torch.uint8, device=device)  # what the granules' addresses count from
        self.offsets = [torch.zeros(batch, self.slots, dtype=torch.int64, device=device) for _ in cache.layers]
        self.spans = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        lanes = lane_width(self.slots, cache.shard.nodes)  # more would only be empty
        owned = [[cache.shard.owns(lane, sequence) for lane in range(lanes)] for sequence in sequences]
        self.owned = torch.tensor(owned, device=device)
        self.bounds = torch.zeros(batch, lanes, 2, dtype=torch.int32, device=device)
        places = zip(cache.layers, self.offsets, strict=True)
        self.tables = [layer.codec.table(self.anchor, offsets, self.bounds) for layer, offsets in places]
        self.filled: list[tuple[int, int]] = []  # (sealed end, granules held) of each sequence, as the tables have it
        self.pages = 0  # sealed pages held here, of all the sequences

    def states(self, layer: int) -> list:
        return [self.cache.layers[layer].states[sequence] for sequence in self.sequences]

    def needed(self) -> int:
        """Granules of the longest sequence once there is room for its next token."""
        return max(-(-state.held_at(state.length + 1) // GRANULE_TOKENS) for state in self.states(0))

    @property
    def stale(self) -> bool:
        """Whether a sequence has outgrown the slots: new tables are due, and a new graph."""
        return self.needed() > self.slots

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (self.numbers, self.anchor, self.spans, self.owned, self.bounds, *self.offsets))

    def advance(self, tokens: list[int]) -> None:
        """Make room for one more token of each sequence in all layers: seal the pages that are due, write the numbers."""
        positions = [state.length for state in self.states(0)]
        for layer in self.cache.layers:
            rows = [layer.make_room(sequence) for sequence in self.sequences]
        self.numbers.copy_(torch.tensor([tokens, positions, rows]).T)
        now = [(state.held_end, len(state.sealed.granules)) for state in self.states(0)]
        if now != self.filled:
            self.filled = now
            self.refill()
        for layer in self.cache.layers:
            self.cache.counted.add(layer.codec.count_reads(self.pages, 1, 0))
            self.cache.count_exact(sum(rows) + len(rows))

    def refill(self) -> None:
        """Write where the sealed granules lie and how far they reach."""
        page, base = self.page_tokens, self.anchor.data_ptr()
        for index, offsets in enumerate(self.offsets):
            found = torch.zeros(offsets.shape, dtype=torch.int64)
            for row, state in zip(found, self.states(index), strict=True):
                for granule, address in state.sealed.addresses():
                    row[granule] = address - base
            offsets.copy_(found)
        self.spans.copy_(torch.tensor([[state.sink // page, state.held_end // page] for state in self.states(0)]))
        self.bounds.copy_(self.cache.layers[0].codec.bounds(self.spans, self.bounds.shape[1]) * self.owned.unsqueeze(-1))
        self.pages = int((self.bounds[..., 1] - self.bounds[..., 0]).sum())
