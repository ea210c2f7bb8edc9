"""One layer of the packed cache as a forward sees it: it takes in keys and values, and attends to exact rows and sealed pages.

What stays exact, and when a page is sealed: see sealing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.calibration import Probe, calibrate, chunk_probes, probe_ends, prompt_probes
from bitkv_dist.eviction import Watched
from bitkv_dist.kernels import dispatch
from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.kernels.reference import attend_dense
from bitkv_dist.partial import Partial, merge
from bitkv_dist.prompt import Prompt
from bitkv_dist.ranked import whole_sequence
from bitkv_dist.sealing import PAGES_AT_ONCE, SealingLayer
from bitkv_dist.sequence import SequenceState
from bitkv_dist.shortage import needing
from bitkv_dist.subtree import SCORES_AT_ONCE, partials_at_once, queries_at_once, walk

if TYPE_CHECKING:
    from bitkv_dist.cache import PackedCache
    from bitkv_dist.tables import StepTables


class PackedLayer(SealingLayer):
    """One layer's keys and values of all sequences. The object itself travels through attention as an opaque handle."""

    def __init__(self, cache: PackedCache, index: int) -> None:
        super().__init__(cache, index)
        self.rows: list[tuple[torch.Tensor, int]] = []  # this forward's exact rows, of each sequence of the step: see extend

    # -- writing

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> tuple[PackedLayer, PackedLayer]:
        """k, v [rows, HK, n, D] of the step's sequences; returns the handle that the attention function calls `attend` on."""
        self.take(torch.stack((k, v), dim=1).unbind())
        return self, self

    def take(self, kv: Sequence[torch.Tensor]) -> None:
        """kv [2, HK, n, D] of each of the step's sequences."""
        step = self.cache.step
        if step.round:
            self.receive(kv[0])
        elif (tables := step.tables) is not None:
            for state, row, token in zip(tables.states(self.index), tables.row, kv, strict=True):
                state.exact.index_copy_(2, row[None], token)
        else:
            self.rows = [self.extend(sequence, row) for sequence, row in zip(step.sequences, kv, strict=True)]

    def receive(self, kv: torch.Tensor | None) -> None:
        """Exact prefill: take in one round's keys and values; kv [2, HK, n, D], or None: this rank has no chunk in it."""
        step, shape = self.cache.step, self.cache.heads
        own = step.round[self.cache.shard.rank]
        if not all(self.states[part[0]].prompt.whole for part in step.round if part):
            if own:
                self.states[own[0]].prompt.put(own[1], kv)
            else:
                self.attend_prompt(None, 0.0)  # the others gather keys from here
            return
        widest = max(part[2] for part in step.round if part)
        sent = torch.zeros(2, shape.kv_heads, widest, shape.head_dim, dtype=shape.dtype, device=shape.device)
        if kv is not None:
            sent[:, :, : kv.shape[2]] = kv
        for part, received in zip(step.round, self.cache.shard.gather(sent), strict=True):
            if part:
                sequence, start, tokens = part
                self.states[sequence].prompt.put(start, received[:, :, :tokens])

    def begin_prompt(
        self, sequence: int, tokens: int, others: Sequence[PackedLayer] = (), heads_at_once: int | None = None
    ) -> None:
        """Room for a prompt's exact keys and values; `others`: the same layer of caches that the prompt fills along."""
        state = self.states[sequence]
        at_once = None if self.cache.audit else heads_at_once  # an audit encodes the pages of all ranks
        with needing(f"the prompt's exact keys and values in layer {self.index}"):
            state.prompt = Prompt(sequence, tokens, self.cache.heads, self.cache.shard, at_once)
        learns = any(layer.states[sequence].tuning is not None for layer in (self, *others))
        state.probe_ends = probe_ends(tokens) if learns else []
        if any(layer.cache.config.eviction == "heavy" for layer in (self, *others)):
            pages = state.sealed_at(tokens) // state.page_tokens
            state.received = torch.zeros(pages, self.cache.heads.kv_heads, dtype=torch.int64)

    def finish_prompt(self, sequence: int, others: Sequence[PackedLayer] = ()) -> None:
        """Seal the prompt's pages, keep its sink and recent window, drop the rest."""
        state = self.states[sequence]
        prompt, state.prompt = state.prompt, None
        probes = prompt_probes(state, self.cache.heads, self.cache.shard.gather) if state.probe_ends else []
        received, state.received = state.received, None
        if received is not None:
            received = self.evictor.gathered(received).sum(0)
        for layer in (self, *others):
            layer.take_prompt(sequence, prompt, probes, received)

    def take_prompt(self, sequence: int, prompt: Prompt, probes: list[tuple[torch.Tensor, int]],
                    received: torch.Tensor | None = None) -> None:
        """A prompt's exact keys and values, and what a layer needs that learns from it, or keeps only some of its pages
        (received: see eviction.prompt_mass)."""
        state = self.states[sequence]
        state.length, end = prompt.tokens, state.sealed_at(prompt.tokens)
        at_once = PAGES_AT_ONCE * state.page_tokens
        if state.table is not None:
            self.evictor.choose(state, end, received)
            for start in range(state.sealed_end, end, at_once):  # a slot's owner need not have the page's rows
                self.seal(sequence, start, prompt.read(start, min(start + at_once, end)))
        else:
            for start, rows in prompt.pieces(state.sealed_end, end, at_once):
                self.seal(sequence, start, rows)
        state.sealed_end = end
        self.keep(sequence, torch.cat((prompt.read(0, min(state.sink, prompt.tokens)), prompt.read(end, prompt.tokens)), dim=2))
        if state.tuning is not None:
            calibrate(self, sequence, [Probe(query, state.sealed_at(end)) for query, end in probes], prompt)

    # -- reading

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [rows, H, n, D] of the step's sequences -> [rows, n, H, D] in the model's dtype."""
        step = self.cache.step
        grouped = q.unflatten(1, (self.cache.heads.kv_heads, -1))  # [rows, HK, G, n, D]
        if step.round:
            out = self.attend_prompt(grouped[0], scaling)
        elif step.tables is not None:
            out = self.attend_tables(base2(grouped, scaling), step.tables)
        else:
            out = torch.empty(len(q), q.shape[2], q.shape[1], q.shape[3], device=q.device)
            self.attend_each(base2(grouped, scaling).unbind(), out.unbind())
            return out.to(q.dtype)
        self.check_finite_output(out)
        return out.to(q.dtype)

    def attend_each(self, queries: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Queries fp32 [HK, n, G, D] in base 2 of each of the step's sequences: fills their outputs fp32 [n, H, D]."""
        step, (_, n, group, _) = self.cache.step, queries[0].shape
        if n == 1 and self.codec.fused:
            return self.attend_fused(queries, outputs)
        exact_rows = [rows[:, :, :count] for rows, count in self.rows]
        exacts = [self.exact_partial(query, rows) for query, rows in zip(queries, exact_rows, strict=True)]
        nodes, watched = [], []
        for each in zip(step.sequences, queries, exacts, strict=True):
            nodes.append(self.sealed_nodes(*each))
            watched.append(self.evictor.watched)
            self.evictor.watched = []
        roots = self.cache.shard.merge(nodes, step.sequences)
        if self.cache.config.eviction == "heavy":
            totals = roots
            if not self.cache.shard.all_heads:
                totals = self.cache.shard.reduce([node._replace(o=node.o[..., :0]) for node in nodes], step.sequences)
            for sequence, *parts in zip(step.sequences, watched, totals, exacts, strict=True):
                self.evictor.count(self.states[sequence], *parts, n * group)
        for output, *each in zip(outputs, step.sequences, queries, exact_rows, exacts, roots, strict=True):
            output.copy_(self.finish_step(*each))
            self.check_finite_output(output)
        self.rows = []

    def attend_fused(self, queries: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """`attend_each` of a decode step in few calls: see Codec.fused."""
        step, shard, exacts, nodes = self.cache.step, self.cache.shard, [], []
        for sequence, query, (rows, count) in zip(step.sequences, queries, self.rows, strict=True):
            state = self.states[sequence]
            if sequence not in step.views:
                step.views[sequence] = state.view(shard.nodes, query.shape[2])
            exact, node, reads = self.codec.see(step.views[sequence], query, rows, state.sealed.slabs, count)
            exacts.append(exact)
            nodes.append(node)
            if step.count_reads:
                self.cache.count_exact(count)
                self.cache.counted.add(reads)
        roots = nodes if shard.nodes == 1 else shard.merge(nodes, step.sequences)  # a lone node is the root
        for root, exact, output in zip(roots, exacts, outputs, strict=True):
            if not self.codec.conclude(root, exact, output):
                self.cache.finite[self.index] = False
        self.rows = []

    def check_finite_output(self, out: torch.Tensor) -> None:
        """Only ever names the layer of what is found later."""
        self.cache.finite[self.index] &= torch.isfinite(out.sum())

    def attend_prompt(self, q: torch.Tensor | None, scaling: float) -> torch.Tensor | None:
        """Exact prefill: q [HK, G, n, D] of this rank's chunk -> [1, n, H, D]; None where it has none in this round."""
        parts = [part for part in self.cache.step.round if part]
        own, found = self.cache.step.round[self.cache.shard.rank], []
        for sequence in sorted({part[0] for part in parts}):
            state, stop = self.states[sequence], max(start + tokens for of, start, tokens in parts if of == sequence)
            for heads in state.prompt.head_groups():
                rows = state.prompt.read(0, stop, heads)
                if own and own[0] == sequence:
                    found.append(causal_attention(q[heads], *rows[:, :, : own[1] + own[2]], scaling))
                    if state.received is not None:
                        self.evictor.watch_prompt(state, q[heads], rows[0, :, : own[1] + own[2]], heads, own[1], scaling)
                del rows  # before the next ones come
        if not own:
            return None
        state, end = self.states[own[0]], own[1] + own[2]
        if end in state.probe_ends:
            state.probes[end] = base2(q[:, :, -1:], scaling)
        return torch.cat(found).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def attend_tables(self, queries: torch.Tensor, tables: StepTables) -> torch.Tensor:
        """A decode step's queries fp32 [rows, HK, 1, G, D] in base 2 -> [rows, 1, H, D]; no length of it is the host's."""
        shard, kernels = self.cache.shard, dispatch.native(queries.device)
        nodes, refined = self.codec.attend_table(self.codec.prepare(queries), tables.tables[self.index], shard.nodes)
        self.cache.refined[self.index] += refined
        outputs = []
        rows = zip(queries, tables.states(self.index), tables.row, shard.merge(nodes, tables.sequences), strict=True)
        for query, state, row, root in rows:
            exact = Partial(*kernels.attend_exact(query, state.exact, row + 1))
            outputs.append(self.codec.conclude_table(root, exact).transpose(0, 1).flatten(1, 2))
        return torch.stack(outputs)

    def finish_step(self, sequence: int, query: torch.Tensor, rows: torch.Tensor, exact: Partial,
                    root: Partial) -> torch.Tensor:
        """Output [n, H, D] of a sequence's queries [HK, n, G, D]; what a chunk of several tokens left to do is done."""
        state = self.states[sequence]
        if self.cache.step.count_reads:
            self.cache.count_exact(rows.shape[2])
        if state.tuning is not None and not self.cache.step.decode:
            calibrate(self, sequence, chunk_probes(state, query))
        if query.shape[1] > 1:
            self.settle(sequence, rows)
        return merge(self.codec.finish(root), exact).normalised().transpose(0, 1).flatten(1, 2)

    def sealed_nodes(self, sequence: int, query: torch.Tensor, exact: Partial, first: int = 0) -> Partial:
        """This rank's nodes of the merge tree over the sealed pages, Partial [V, HK, n, G]; other ranks' stay empty.

        query fp32 [HK, n, G, D] in base 2, of a step's positions from its `first` on; exact: the partial of its exact tokens.
        """
        state = self.states[sequence]
        at_once = queries_at_once(query[:, 0].numel())
        if query.shape[1] > at_once:
            exacts = [Partial(*part) for part in zip(*(t.split(at_once, 1) for t in exact), strict=True)]
            parts = zip(query.split(at_once, 1), exacts, range(0, query.shape[1], at_once), strict=True)
            found = [self.sealed_nodes(sequence, *part) for part in parts]
            return Partial(*(torch.cat(tensors, dim=2) for tensors in zip(*found, strict=True)))
        prepared = self.codec.prepare(query, state.tuning)
        choice = self.codec.choice(state.tuning, exact)
        if self.codec.chooses_globally:
            choice = choice._replace(whole=whole_sequence(self, sequence, prepared, query.shape[:3]))

        def attend(records: torch.Tensor, valid: torch.Tensor, granules: list[int]) -> Partial:
            index = torch.tensor(granules, device=query.device) if self.codec.chooses_globally else None
            mass = None
            if self.cache.config.eviction == "heavy":
                mass = query.new_empty(len(records), *query.shape[:3], records.shape[1])
            part, reads = self.codec.attend(prepared, records, valid, choice, index, mass)
            if mass is not None:
                self.evictor.watched.append(Watched(first, granules, part.m, mass))
            if self.cache.step.count_reads:
                self.cache.counted.add(reads)
            return part

        return self.nodes(state, query.shape, state.held_end, attend)

    def nodes(self, state: SequenceState, shape: tuple[int, ...], end: int,
              compute: Callable[[torch.Tensor, torch.Tensor, list[int]], Partial], cost: int = 1) -> Partial:
        """This rank's tree nodes over the sealed tokens before `end`: m, l [V, HK, n, G], o [V, *shape], shape = HK, n, G, ..

        compute(records, page_valid, granules) gives the partials of some granules (see SequenceState.granules) and holds `cost`
        numbers for each score.
        """
        shard, heads = self.cache.shard, shape[:3]
        most = partials_at_once(math.prod(shape))
        block = min(most, self.granules_at_once(heads, cost))

        def blocks(modulus: int, residue: int) -> Iterator[Partial]:
            return (compute(*found) for found in self.blocks(state, block, end, (modulus, residue)))

        held = state.sealed.before(-(-end // GRANULE_TOKENS))
        granules = -(-state.held_end // GRANULE_TOKENS)
        return walk(blocks, held, granules, shard.nodes, most, shape, state.exact.device)

    def blocks(
        self, state: SequenceState, most: int, end: int, of: tuple[int, int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """`state.granules` of (modulus, residue) `of`, as the codec reads them."""
        return state.granules(most, end, *of)

    def granules_at_once(self, heads: tuple[int, ...], cost: int = 1) -> int:
        """How many granules to attend to together for queries [HK, n, G]: neither their scores, with `cost` numbers each, nor
        what the codec rebuilds of their tokens is more than a block."""
        of_a_token = max(math.prod(heads) * cost, heads[0] * self.codec.rebuilt)
        return max(1, SCORES_AT_ONCE // (GRANULE_TOKENS * of_a_token))

    def exact_partial(self, query: torch.Tensor, rows: torch.Tensor) -> Partial:
        """Partial [HK, n, G] of queries [HK, n, G, D] over exact rows [2, HK, count, D], the last n of them their own."""
        n, count = query.shape[1], rows.shape[2]
        if n == 1 and (kernels := dispatch.native(rows.device)) is not None:
            return Partial(*kernels.attend_exact(query, rows))
        valid = None
        if n > 1:
            position = torch.arange(count, device=rows.device)
            valid = (position <= position[count - n :, None])[None, None, :, None, :]
        k, v = rows.float().unsqueeze(1)
        return Partial(*attend_dense(query, k, v, valid)).rows(0)


def base2(q: torch.Tensor, scaling: float) -> torch.Tensor:
    """q [.., G, n, D] -> fp32 [.., n, G, D], multiplied by softmax scale * log2 e."""
    return q.transpose(-2, -3).float() * (scaling * math.log2(math.e))
