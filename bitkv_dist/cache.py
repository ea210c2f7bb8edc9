"""The packed KV cache of a batch: every layer, the rank's share of the granules, and the byte accounting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.layer import PackedLayer
from bitkv_dist.loops import looped_layers
from bitkv_dist.partial import Partial, root
from bitkv_dist.sealing import digest
from bitkv_dist.shortage import needing
from bitkv_dist.tables import StepTables


@dataclass(frozen=True)
class Shard:
    """A rank's part in the sequence: which granules it owns and how partials and prompt keys of all ranks come together.

    nodes: merge-tree nodes that the ranks share. owns(granule, sequence). reduce(nodes of each sequence, sequences) -> roots.
    exchange: the same for a layer's attention, where the roots of heads that this rank does not go on with may stay empty; None
    = reduce. gather: [*s] -> [ranks, *s].
    """

    rank: int = 0
    ranks: int = 1
    nodes: int = 1
    owns: Callable[[int, int], bool] = lambda granule, sequence: True
    reduce: Callable[[list[Partial], list[int]], list[Partial]] = lambda nodes, sequences: [root(node) for node in nodes]
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.unsqueeze(0)
    exchange: Callable[[list[Partial], list[int]], list[Partial]] | None = None
    all_heads: bool = True  # whether `exchange` gives the roots of all heads

    def merge(self, nodes: list[Partial], sequences: list[int]) -> list[Partial]:
        """`exchange`."""
        return (self.exchange or self.reduce)(nodes, sequences)


@dataclass(frozen=True)
class Step:
    """What the rows of the coming forward are.

    round: of an exact prefill, each rank's (sequence, start, tokens) or None. decode: tokens of a model's own, which teach its
    layers nothing. tables: of a decode step whose lengths are on the device; `StepTables.advance` has then made room for its
    tokens. views: of a decode step on a CPU, what each sequence's query sees, for all layers; filled by the first.
    """

    sequences: list[int]
    round: list[tuple[int, int, int] | None] = field(default_factory=list)
    count_reads: bool = False
    decode: bool = False
    tables: StepTables | None = None
    views: dict[int, View] = field(default_factory=dict)


class PackedCache:
    """Packed keys and values of `sequences` sequences in all layers; passed to the model's layers as `past_key_values`."""

    def __init__(
        self, config: CacheConfig, heads: HeadShape, sequences: int, shard: Shard | None = None, audit: bool = False
    ) -> None:
        """audit: also encode, and digest, the pages that other ranks own."""
        config.check_model(heads.layers, heads.head_dim, loops=heads.loops)
        self.config, self.heads, self.sequences, self.audit = config, heads, sequences, audit
        self.shard = shard or Shard()
        self.step = Step([])
        self.counted = ReadCount()
        self.refined = torch.zeros(heads.layers, dtype=torch.int64, device=heads.device)  # by steps with tables
        self.exact_reads = ReadCount()
        self.row_elements = 2 * heads.kv_heads * heads.head_dim  # of a token in a layer
        self.finite = torch.ones(
            heads.layers, dtype=torch.bool, device=heads.device
        )  # whether every attention output so far was
        looped = config.codec == "looped"
        self.layers = looped_layers(self) if looped else [PackedLayer(self, index) for index in range(heads.layers)]
        self._tables: StepTables | None = None

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args, **kwargs) -> tuple[PackedLayer, PackedLayer]:
        """The call of the model's attention: k, v [rows, HK, n, D]."""
        return self.layers[layer_idx].update(k, v)

    def decode(
        self, index: int, kv: Sequence[torch.Tensor], queries: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """A decode step of one layer, fp32, for each of the step's sequences: its token's kv [2, HK, 1, D] is taken in, and
        what its queries [HK, 1, G, D], in base 2, attend to fills outputs [1, H, D]."""
        self.layers[index].take(kv)
        self.layers[index].attend_each(queries, outputs)

    def length(self, sequence: int) -> int:
        """Tokens stored for a sequence."""
        return self.layers[-1].states[sequence].length

    def reserve(self, sequence: int, tokens: int) -> None:
        """Allocate sealed pages for a sequence of `tokens` tokens at once."""
        granules = reserved_granules(self.config, tokens)
        owned = sum(self.shard.owns(granule, sequence) for granule in range(granules))
        for layer in self.layers:
            layer.states[sequence].reserved_granules = granules
            with needing(f"the sealed pages of layer {layer.index}"):
                layer.states[sequence].sealed.reserve(owned)

    @property
    def takes_tables(self) -> bool:
        """Whether the kernels of every layer find their pages by tables."""
        return all(layer.codec.takes_tables for layer in self.layers)

    def step_tables(self, sequences: list[int]) -> StepTables | None:
        """The tables of a decode step of these sequences, the same ones until they are outgrown; None where the kernels take
        none."""
        if not self.takes_tables:
            return None
        if self._tables is None or self._tables.sequences != sequences or self._tables.stale:
            self._tables = StepTables(self, sequences)
        return self._tables

    @property
    def reads(self) -> ReadCount:
        """What decode steps read of sealed pages so far."""
        found = replace(self.counted)
        for layer, refined in zip(self.layers, self.refined.tolist(), strict=True):
            if refined:
                found.add(layer.codec.count_reads(0, 1, refined))
        return found

    def count_exact(self, rows: int) -> None:
        """Note that a decode step read so many rows of exact keys and values in one layer."""
        elements = rows * self.row_elements
        self.exact_reads.elements += elements
        self.exact_reads.bits += elements * self.heads.dtype.itemsize * 8

    def first_nonfinite_layer(self) -> int | None:
        bad = (~self.finite).nonzero().flatten().tolist()
        return bad[0] if bad else None

    @property
    def bytes(self) -> int:
        """Storage of every live cache tensor on this rank, slack of preallocation included."""
        states = [state for layer in self.layers for state in layer.states]
        tables = self._tables.bytes if self._tables is not None else 0
        return tables + self.book_bytes + sum(state.bytes for state in states)

    @property
    def book_bytes(self) -> int:
        """Codebooks of calibrated codecs, on this rank."""
        return sum(layer.codec.book_bytes for layer in self.layers)

    @property
    def stored_bits_per_element(self) -> float:
        """Bits per key or value element of a sealed page, all metadata in it counted, mean over layers."""
        record_bytes = sum(layer.codec.record_bytes for layer in self.layers) / len(self.layers)
        return record_bytes * 8 / (self.config.page_tokens * self.heads.head_dim * 2)

    def mass_covered(self) -> list[list[float]]:
        """Per layer: the share of the true sealed weight that rule mass refined for the probes, of every sequence and local
        head."""
        found = []
        for layer in self.layers:
            tunings = [state.tuning for state in layer.states if state.tuning is not None]
            found.append(
                [share for tuning in tunings if tuning.covered is not None for share in tuning.covered.flatten().tolist()]
            )
        return found

    def sealed_tokens(self, sequence: int) -> int:
        """Sealed tokens of a sequence over all ranks."""
        return self.layers[-1].states[sequence].held_end - self.config.sink_rounded

    def evicted_tokens(self, sequence: int) -> int:
        """Tokens of a sequence that were sealed, or would have been, and are gone."""
        state = self.layers[-1].states[sequence]
        return state.sealed_end - state.held_end

    def page_digests(self) -> dict[tuple[int, int, int, int], int]:
        """(layer, sequence, page, global KV head) -> digest of the sealed bytes that this rank holds, or encoded for the
        audit; of pages that were not evicted."""
        found: dict[tuple[int, int, int, int], int] = {}
        first_head = self.heads.first_kv_head
        for layer in self.layers:
            for sequence, state in enumerate(layer.states):
                for slot, record in state.pages():
                    for head in range(len(record)):
                        key = layer.index, sequence, state.page_in(slot, head), first_head + head
                        found[key] = digest(record[head])
            for (sequence, slot, head), value in layer.audited.items():
                found[layer.index, sequence, layer.states[sequence].page_in(slot, head), first_head + head] = value
        return found


def reserved_granules(config: CacheConfig, tokens: int) -> int:
    """Granules, of all ranks, that the pages of a sequence of `tokens` tokens need room in."""
    due, sink = max(0, tokens - config.recent_tokens) // config.page_tokens * config.page_tokens, config.sink_rounded
    if due > sink:
        due = sink + config.kept_pages((due - sink) // config.page_tokens) * config.page_tokens
    return -(-due // GRANULE_TOKENS)
