"""One layer of the packed cache: what its sequences keep exactly, when a page is sealed, and attention over both.

A token is exact while it is in the sink pages or in the recent window; a page is sealed, once, when it is complete and older than the
window. Which pages are sealed is a function of the length alone, so the bytes do not depend on how the tokens arrived.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from bitkv_dist.codec.interface import make_codec
from bitkv_dist.config import GRANULE_TOKENS
from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.kernels.reference import attend_dense
from bitkv_dist.partial import Partial, empty, fill_lanes, lane_width, merge, reduce_lanes
from bitkv_dist.sealed import SealedStore

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache

SCORES_AT_ONCE = 1 << 23  # elements of a score tensor that the reference attention holds at a time


def digest(record: torch.Tensor) -> int:
    """64-bit BLAKE2b of a page record uint8 [record_bytes] of one KV head."""
    return int.from_bytes(hashlib.blake2b(record.cpu().contiguous().numpy().tobytes(), digest_size=8).digest(), "little")


class SequenceState:
    """One sequence in one layer: exact rows [2 (K, V), HK, capacity, D] (sink tokens, then the recent window) and sealed pages."""

    def __init__(self, cache: PackedCache, record_bytes: int) -> None:
        shape, config = cache.heads, cache.config
        self.length = 0
        self.page_tokens, self.first_page = config.page_tokens, config.sink_rounded // config.page_tokens
        self.sealed_end = config.sink_rounded  # tokens before it are sealed, or in the sink
        self.exact = torch.zeros(2, shape.kv_heads, config.sink_rounded + config.recent_tokens + config.page_tokens, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.sealed = SealedStore(GRANULE_TOKENS // config.page_tokens, shape.kv_heads, record_bytes, shape.device)
        self.prompt: torch.Tensor | None = None  # [2, HK, T, D] during an exact prefill

    def exact_count(self, sink: int) -> int:
        """Rows of `exact` in use."""
        return min(self.length, sink) + max(0, self.length - self.sealed_end)

    def pages(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(global page index, record [HK, record_bytes]) of the sealed pages held here, in token order."""
        for records, granules in self.sealed.blocks(1):
            for place, record in enumerate(records[0]):
                page = granules[0] * records.shape[1] + place
                if self.first_page <= page < self.sealed_end // self.page_tokens:
                    yield page, record


class PackedLayer:
    """One layer's keys and values of all sequences. The object itself travels through the model's attention as an opaque handle."""

    def __init__(self, cache: PackedCache, index: int) -> None:
        self.cache, self.index = cache, index
        self.codec = make_codec(cache.config.for_layer(index), cache.heads, index)
        self.states = [SequenceState(cache, self.codec.record_bytes) for _ in range(cache.sequences)]
        self.audited: dict[tuple[int, int, int], int] = {}  # (sequence, page, local KV head) -> digest, of pages of other ranks
        self.rows: list[torch.Tensor] = []  # this forward's exact rows, one per sequence of the step

    # -- writing

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> tuple[PackedLayer, PackedLayer]:
        """k, v [rows, HK, n, D] of the step's sequences; returns the handle that the attention function calls `attend` on."""
        kv = torch.stack((k, v), dim=1)
        if self.cache.step.round:
            self.receive(kv[0])
        else:
            self.rows = [self.extend(sequence, kv[row]) for row, sequence in enumerate(self.cache.step.sequences)]
        return self, self

    def receive(self, kv: torch.Tensor | None) -> None:
        """Exact prefill: exchange one round's keys and values; kv [2, HK, n, D], or None when this rank has no chunk in the round."""
        step, shape = self.cache.step, self.cache.heads
        widest = max(part[2] for part in step.round if part)
        sent = torch.zeros(2, shape.kv_heads, widest, shape.head_dim, dtype=shape.dtype, device=shape.device)
        if kv is not None:
            sent[:, :, : kv.shape[2]] = kv
        for part, received in zip(step.round, self.cache.shard.gather(sent), strict=True):
            if part:
                sequence, start, tokens = part
                self.states[sequence].prompt[:, :, start : start + tokens] = received[:, :, :tokens]

    def begin_prompt(self, sequence: int, tokens: int) -> None:
        shape = self.cache.heads
        self.states[sequence].prompt = torch.empty(2, shape.kv_heads, tokens, shape.head_dim, dtype=shape.dtype, device=shape.device)

    def finish_prompt(self, sequence: int) -> None:
        """Seal the prompt's pages, keep its sink and recent window, drop the rest."""
        state = self.states[sequence]
        prompt, state.prompt = state.prompt, None
        state.length = prompt.shape[2]
        self.keep(sequence, self.seal_due(sequence, state.length, prompt))

    def extend(self, sequence: int, kv: torch.Tensor) -> torch.Tensor:
        """Append kv [2, HK, n, D]; returns the rows that the n queries see exactly: sink, recent window and the n tokens."""
        state, sink = self.states[sequence], self.cache.config.sink_rounded
        before = state.exact_count(sink)
        rows = self.seal_due(sequence, state.length + 1, state.exact[:, :, :before])
        state.length += kv.shape[2]
        if kv.shape[2] > 1:
            return torch.cat((rows, kv), dim=2)
        if rows.shape[2] != before:
            state.exact[:, :, sink : rows.shape[2]] = rows[:, :, sink:].clone()
        state.exact[:, :, rows.shape[2]] = kv[:, :, 0]
        return state.exact[:, :, : rows.shape[2] + 1]

    def seal_due(self, sequence: int, length: int, rows: torch.Tensor) -> torch.Tensor:
        """Seal the pages that are due at `length` tokens; rows [2, HK, count, D] start with the sink. Returns the rows that stay exact."""
        config, state = self.cache.config, self.states[sequence]
        page, sink = config.page_tokens, config.sink_rounded
        recent = max(1, config.recent_tokens)  # the newest token is always exact: a step seals before it has stored its own
        end = max(state.sealed_end, (length - recent) // page * page)
        count = end - state.sealed_end
        if count == 0:
            return rows
        pages = rows[:, :, sink : sink + count].unflatten(2, (-1, page)).transpose(1, 2)  # [2, pages, HK, P, D]
        self.check_finite(pages, state.sealed_end)
        self.seal(sequence, state.sealed_end // page, pages)
        state.sealed_end = end
        return torch.cat((rows[:, :, :sink], rows[:, :, sink + count :]), dim=2)

    def seal(self, sequence: int, first: int, pages: torch.Tensor) -> None:
        """Encode the pages that this rank owns; pages [2, n, HK, P, D] are the global pages first, first + 1, .."""
        per_granule = GRANULE_TOKENS // self.cache.config.page_tokens
        owned = [self.cache.shard.owns((first + i) // per_granule, sequence) for i in range(pages.shape[1])]
        wanted = [i for i, own in enumerate(owned) if own or self.cache.audit]
        if not wanted:
            return
        records = self.codec.encode(pages[0, wanted], pages[1, wanted])
        for i, record in zip(wanted, records, strict=True):
            granule, place = divmod(first + i, per_granule)
            if owned[i]:
                self.states[sequence].sealed.page(granule, place).copy_(record)
            else:
                self.audited.update({(sequence, first + i, head): digest(record[head]) for head in range(len(record))})

    def check_finite(self, pages: torch.Tensor, first_token: int) -> None:
        if not torch.isfinite(pages).all():
            side, token = (~torch.isfinite(pages)).any(dim=(2, 4)).flatten(1).nonzero()[0].tolist()
            raise FloatingPointError(f"layer {self.index}, token {first_token + token}: {('key', 'value')[side]} is not finite")

    def keep(self, sequence: int, rows: torch.Tensor) -> None:
        self.states[sequence].exact[:, :, : rows.shape[2]] = rows

    # -- reading

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [rows, H, n, D] of the step's sequences -> [rows, n, H, D] in the model's dtype."""
        shape = self.cache.heads
        grouped = q.unflatten(1, (shape.kv_heads, -1))  # [rows, HK, G, n, D]
        if self.cache.step.round:
            sequence, start, tokens = self.cache.step.round[self.cache.shard.rank]
            prompt = self.states[sequence].prompt[:, :, : start + tokens]
            out = causal_attention(grouped[0], prompt[0], prompt[1], scaling)
            self.cache.finite[self.index] &= torch.isfinite(out).all()
            return out.flatten(0, 1).transpose(0, 1).unsqueeze(0)
        step = self.cache.step
        queries = grouped.transpose(2, 3).float() * (scaling * math.log2(math.e))  # [rows, HK, n, G, D]
        nodes = [self.sealed_nodes(sequence, query) for sequence, query in zip(step.sequences, queries, strict=True)]
        roots = self.cache.shard.reduce(nodes, step.sequences)
        outputs = []
        for sequence, query, rows, root in zip(step.sequences, queries, self.rows, roots, strict=True):
            if step.count_reads:
                self.cache.count_exact(rows)
            whole = merge(self.codec.finish(root), self.exact_partial(query, rows))
            outputs.append(whole.normalised().transpose(0, 1).flatten(1, 2))  # [n, H, D]
            if query.shape[1] > 1:
                self.keep(sequence, self.seal_due(sequence, self.states[sequence].length, rows))
        self.rows = []
        out = torch.stack(outputs)
        self.cache.finite[self.index] &= torch.isfinite(out).all()
        return out.to(q.dtype)

    def sealed_nodes(self, sequence: int, query: torch.Tensor) -> Partial:
        """This rank's nodes of the merge tree over the sealed pages, Partial [V, HK, n, G]; the nodes of other ranks stay empty.

        query fp32 [HK, n, G, D] in base 2.
        """
        state, nodes, heads = self.states[sequence], self.cache.shard.nodes, query.shape[:3]
        if not state.sealed.granules:
            return empty((nodes, *heads), query.shape[-1], query.device)
        prepared = self.codec.prepare(query)
        parts = []
        for records, granules in state.sealed.blocks(max(1, SCORES_AT_ONCE // (math.prod(heads) * GRANULE_TOKENS))):
            part, reads = self.codec.attend(prepared, records, self.pages_valid(granules, state))
            parts.append(part)
            if self.cache.step.count_reads:
                self.cache.reads.add(reads)
        part = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        index = torch.tensor(state.sealed.granules, device=query.device)
        width = lane_width(-(-state.sealed_end // GRANULE_TOKENS), nodes)
        return reduce_lanes(fill_lanes(part, index, width), nodes)

    def pages_valid(self, granules: list[int], state: SequenceState) -> torch.Tensor:
        """bool [n, pages]: which page slots of these granules hold a sealed page (the sink's and those to come do not)."""
        config = self.cache.config
        first = torch.tensor(granules, device=state.exact.device)[:, None] * GRANULE_TOKENS
        start = first + torch.arange(0, GRANULE_TOKENS, config.page_tokens, device=state.exact.device)
        return (start >= config.sink_rounded) & (start < state.sealed_end)

    def exact_partial(self, query: torch.Tensor, rows: torch.Tensor) -> Partial:
        """Partial [HK, n, G] of queries [HK, n, G, D] over exact rows [2, HK, count, D], of which the last n are the queries' own tokens."""
        n, count = query.shape[1], rows.shape[2]
        position = torch.arange(count, device=rows.device)
        valid = (position <= torch.arange(count - n, count, device=rows.device)[:, None])[None, None, :, None, :] if n > 1 else None
        k, v = rows.float().unsqueeze(1)
        return Partial(*attend_dense(query, k, v, valid)).rows(0)
