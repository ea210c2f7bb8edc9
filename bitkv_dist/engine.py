"""The whole story of a run: prompts in, exact prefill, decode with one exchange per layer, tokens out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from bitkv_dist import agreement, placement, prefill
from bitkv_dist.cache import PackedCache, Shard, Step
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.config import GenerateConfig
from bitkv_dist.fitting import choose_prefill, saying_what_fits
from bitkv_dist.graph import CudaGraphs, Recorder, StepGraph
from bitkv_dist.model import ServedModel
from bitkv_dist.parallel import digest
from bitkv_dist.parallel.exchange import Exchange, combine
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.plan.room import free_bytes
from bitkv_dist.prompt import fitting_heads
from bitkv_dist.sampling import Sampler, eos_ids

RUNNING, STOP, LENGTH = 0, 1, 2
REASONS = {STOP: "stop", LENGTH: "length"}

OnToken = Callable[[int, int], bool]  # (sequence, token id) on rank 0 -> True ends the sequence
Fill = Callable[[list[list[int]], prefill.Progress], torch.Tensor]  # prompts -> logits fp32 [sequences, vocab] after them


def ignore(*_) -> None:
    """A callback that does nothing."""


@dataclass
class Result:
    """What one `generate` call produced. token_ids hold the EOS that ended a sequence; times in seconds."""

    prompt_tokens: list[int]
    token_ids: list[list[int]]
    finish_reason: list[str]
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    decoded_tokens: int = field(default=0)  # tokens of decode_s: all but the first of each sequence
    prefilled_tokens: int = 0  # tokens of prefill_s: those that neither were in the cache nor had been sampled


class Engine:
    """A model, its packed cache and this rank's place in the grid. Every rank makes the same calls."""

    recorder: Recorder = CudaGraphs()

    def __init__(
        self, model: ServedModel, cache: CacheConfig, mesh: Mesh, generate: GenerateConfig, audit: bool = False
    ) -> None:
        """audit: every rank also encodes the pages that it does not own, for `page_digests` to compare."""
        self.model, self.cache_config, self.mesh, self.config, self.audit = model, cache, mesh, generate, audit
        group = model.local_heads // model.local_kv_heads
        self.heads = HeadShape(
            model.layers, model.first_kv_head, model.local_kv_heads, model.head_dim, model.dtype, model.device, group,
            f"{model.fingerprint:016x}", model.loops,
        )  # fmt: skip
        make_codec(cache.for_layer(0), self.heads, 0)  # refuses another model's calibration before a prompt is read
        self.eos = frozenset(eos_ids(model.generation_config, model.tokenizer))
        if generate.graph:
            self.recorder.check(model.device, mesh.world.backend, mesh.split.parts)
        self.exchange = Exchange(mesh, model.heads_of_sequence_ranks(), model.local_heads)
        self.exchanged_bytes = self.exchanged_steps = 0  # what decode steps received from the SP group
        self.cache: PackedCache | None = None
        self.prefill = generate.prefill  # how the last prompt from the start was read: exact | packed
        self.room_bytes: int | None = None  # that this rank could allocate before the last prompt from the start
        self.graph: StepGraph | None = None  # of the decode step, where the configuration asks for it
        self.rotation_digest = agreement.require(mesh, model, cache, generate)
        self.pending: list[list[int]] = []  # each sequence's tokens that are not in the cache yet: the last one sampled
        self.histories: list[list[int]] = []
        self.ended: dict[int, str] = {}  # sequences that do not go on before another turn, and why
        self.fed = 0  # digest of all tokens that were fed to the model, in order
        if generate.warmup:
            self.warm_up()

    def page_digests(self) -> dict[digest.PageKey, int]:
        """(layer, sequence, page, global KV head) -> digest of sealed bytes, of this rank's pages (all pages with `audit`)."""
        return self.cache.page_digests()

    def cache_digest(self) -> str:
        """One digest of all sealed bytes in global order, the same at every world size; collective."""
        merged: dict[digest.PageKey, int] = {}
        for pages in self.mesh.gather_objects(self.page_digests()):
            merged.update(pages)
        return digest.combine(merged)

    # -- running

    def generate(
        self,
        prompts: list[list[int]],
        on_token: OnToken | None = None,
        on_prefill: prefill.Progress | None = None,
        keep: bool = False,
        fill: Fill | None = None,
        on_filled: Callable[[torch.Tensor], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        answered: Sequence[list[int]] = (),
    ) -> Result:
        """Continue the prompts (token ids, each at its own length). keep: append them to the sequences that the cache holds.

        on_token is called on rank 0 for every token as it comes and may end its sequence; on_prefill(done, all) counts prompt
        tokens. fill: brings the prompts into the cache in place of a prefill. on_filled sees the logits before the first token.
        on_step(tokens) is called on every rank between two steps; tokens: of each answer that goes on. answered: what `fill`
        has of each answer already.
        """
        keep = keep and self.cache is not None
        begun = self.histories if keep else [[] for _ in prompts]
        lengths = [len(history) + len(prompt) for history, prompt in zip(begun, prompts, strict=True)]
        with torch.inference_mode(), saying_what_fits(self, lengths):
            started = time.perf_counter()
            waiting = (pending for sequence, pending in enumerate(self.pending) if keep or sequence not in self.ended)
            held = self.cached_tokens() + sum(map(len, waiting)) if keep or fill else 0
            fill = fill or (self.append if keep else self.begin)
            logits = fill(prompts, on_prefill or ignore)
            if on_filled is not None:
                filled = time.perf_counter()
                on_filled(logits)
                started += time.perf_counter() - filled
            prefilled = self.cached_tokens() - held
            result = self.decode(logits, prompts, on_token, started, on_step or ignore, answered)
            result.prefilled_tokens = prefilled
            return result

    def cached_tokens(self) -> int:
        """Tokens of all sequences that the cache holds."""
        return sum(map(self.cache.length, range(self.cache.sequences)))

    def begin(self, prompts: list[list[int]], progress: prefill.Progress, others: Sequence[Engine] = ()) -> torch.Tensor:
        """A new cache filled with the prompts; fp32 logits [sequences, vocab] of their last tokens.

        others: engines of the same model whose caches are filled along, which an exact prefill can do at little cost.
        """
        self.mesh.mark("prefill")
        for engine in (self, *others):
            engine.open(prompts)
        if self.prefill == "packed":
            if others:
                raise ValueError("prefill packed: depends on the cache, so that several cannot share one; use exact")
            return self.model.head(prefill.packed(self.model, self.cache, prompts, self.config.chunk, progress))
        caches = [self.cache, *(engine.cache for engine in others)]
        rounds, at_once = prefill.rounds(prompts, self.config.chunk, self.mesh.sp), self.fitting_heads(prompts)
        last = prefill.exact(self.model, caches, prompts, rounds, progress, at_once)
        owners = [
            placement.owner((len(prompt) - 1) // GRANULE_TOKENS, sequence, self.mesh.sp)
            for sequence, prompt in enumerate(prompts)
        ]
        return self.model.head(self.mesh.gather_sp(last)[owners, list(range(len(prompts)))])

    def open(self, prompts: list[list[int]]) -> None:
        """An empty cache with room for the prompts, and all that belongs to them."""
        self.check_lengths(prompts, [0] * len(prompts))
        ranks, rank = self.mesh.sp, self.mesh.sp_rank
        shard = Shard(
            rank, ranks, placement.residue_count(ranks),
            owns=lambda granule, sequence: placement.owner(granule, sequence, ranks) == rank,
            reduce=lambda nodes, sequences: combine(nodes, sequences, rank, ranks, self.mesh.gather_sp),
            gather=self.mesh.gather_sp,
            exchange=self.exchange, all_heads=self.exchange.all_heads,
        )  # fmt: skip
        self.cache = self.graph = None  # the old one makes room first
        self.room_bytes = free_bytes(self.model.device, self.mesh.world.local_size)
        self.prefill = choose_prefill(self, prompts)
        self.cache = PackedCache(self.cache_config, self.heads, len(prompts), shard, self.audit)
        if self.config.graph and not self.cache.takes_tables:
            raise ValueError("generate.graph true: plain torch attends to this cache (see kernel.reason); leave it false")
        self.sampler = Sampler(self.model.generation_config, self.config, sorted(self.eos), self.model.device)
        self.histories = [list(prompt) for prompt in prompts]
        self.fed = 0
        for prompt in prompts:
            self.fed = digest.chained(self.fed, prompt)
        self.pending = [[] for _ in prompts]
        self.ended = {}
        self.reserve(list(map(len, prompts)))

    def fitting_heads(self, prompts: list[list[int]]) -> int:
        """How many KV heads of the prompts' exact keys to hold at a time. ValueError where one is too much."""
        limit, heads = self.config.prefill_memory_gb, self.heads
        shape = (heads.kv_heads, heads.head_dim, heads.dtype.itemsize)
        return fitting_heads(None if limit is None else limit * 1e9, list(map(len, prompts)), shape, self.mesh.sp)

    def append(self, prompts: list[list[int]], progress: prefill.Progress) -> torch.Tensor:
        """The next turn of every sequence on top of the cache, as a packed prefill; fp32 logits [sequences, vocab]."""
        self.mesh.mark("prefill")
        turns = [pending + prompt for pending, prompt in zip(self.pending, prompts, strict=True)]
        for turn in turns:
            self.fed = digest.chained(self.fed, turn)
        held = [self.cache.length(sequence) for sequence in range(self.cache.sequences)]
        self.check_lengths(turns, held)
        self.reserve([length + len(turn) for length, turn in zip(held, turns, strict=True)])
        self.sampler.begin_turn()
        self.pending = [[] for _ in prompts]
        self.ended = {}
        for history, prompt in zip(self.histories, prompts, strict=True):
            history += prompt
        return self.read(turns, progress)

    def read(self, prompts: list[list[int]], progress: prefill.Progress) -> torch.Tensor:
        """Append tokens to the sequences, as a packed prefill; fp32 logits [sequences that got tokens, vocab]."""
        return self.model.head(prefill.packed(self.model, self.cache, prompts, self.config.chunk, progress))

    def reserve(self, lengths: list[int]) -> None:
        """Room for prompts of these lengths, what is cached included, and for the tokens to come."""
        for sequence, length in enumerate(lengths):
            self.cache.reserve(sequence, min(length + self.config.max_new_tokens, self.model.max_positions))

    def check_lengths(self, prompts: list[list[int]], held_tokens: list[int]) -> None:
        """held_tokens: what the cache keeps of each sequence before its prompt."""
        for sequence, (prompt, held) in enumerate(zip(prompts, held_tokens, strict=True)):
            if not prompt:
                raise ValueError(f"prompt {sequence}: has no tokens; give some text")
            if held + len(prompt) > self.model.max_positions:
                room = f"{self.model.name} has {self.model.max_positions} positions"
                raise ValueError(f"prompt {sequence}: {held + len(prompt)} tokens, but {room}; shorten it")

    def decode(self, logits: torch.Tensor, prompts: list[list[int]], on_token: OnToken | None, started: float,
               on_step: Callable[[int], None] = ignore, answered: Sequence[list[int]] = ()) -> Result:
        """Sample, feed, repeat, until every sequence has ended; the prefill is what was done since `started`."""
        reasons = [self.ended.get(sequence, REASONS[LENGTH]) for sequence in range(len(prompts))]
        answers = list(map(list, answered)) or [[] for _ in prompts]
        result = Result(list(map(len, prompts)), answers, reasons)
        result.prefill_s = time.perf_counter() - started
        live = [sequence for sequence in range(len(prompts)) if sequence not in self.ended]
        begun = list(map(len, answers))
        first = max(begun, default=0)
        for step in range(first, self.config.max_new_tokens):
            with one_torch_thread():
                chosen = self.choose(logits, live, result, on_token)
            for sequence, (token, state) in zip(live, chosen, strict=True):
                result.token_ids[sequence].append(token)
                self.histories[sequence].append(token)
                self.pending[sequence] = [token]
                if state != RUNNING:
                    result.finish_reason[sequence] = REASONS[state]
                else:
                    continue
                if state == STOP:
                    self.ended[sequence] = REASONS[STOP]
                live = [other for other in live if other != sequence]
            if step == first:
                result.first_token_s = time.perf_counter() - started
            if not live:
                break
            paused = time.perf_counter()
            on_step(step + 1)
            started += time.perf_counter() - paused
            self.mesh.mark(f"step {step + 1}")
            received = self.mesh.sp_bytes
            logits = self.step(live)
            self.exchanged_bytes += self.mesh.sp_bytes - received
            self.exchanged_steps += 1
        gained = [len(answer) - before for answer, before in zip(answers, begun, strict=True)]
        result.decoded_tokens = sum(gained) - sum(map(bool, gained))
        if result.decoded_tokens:
            result.decode_s = time.perf_counter() - started - result.first_token_s
        return result

    def choose(self, logits: torch.Tensor, live: list[int], result: Result, on_token: OnToken | None) -> list[tuple[int, int]]:
        """(token, state) of each live sequence: rank 0 decides, all ranks follow.

        The same broadcast compares what the ranks were fed, so that one which went astray is found in that step.
        """
        if not math.isfinite(logits.sum()) and not torch.isfinite(logits).all():  # one number is infinite, or their sum
            layer = self.cache.first_nonfinite_layer()
            where = "after the last attention" if layer is None else f"first in the attention of layer {layer}"
            raise FloatingPointError(f"rank {self.mesh.world.rank}: logits are not finite, {where}")
        decided = [(0, RUNNING)] * len(live)
        if self.mesh.world.rank == 0:
            picked = self.sampler.pick(logits, [self.histories[sequence] for sequence in live], live)
            for row, (sequence, token) in enumerate(zip(live, picked, strict=True)):
                stop = bool(on_token(sequence, token)) if on_token else False
                if stop or (token in self.eos and not self.config.ignore_eos):
                    state = STOP
                else:
                    full = (
                        len(result.token_ids[sequence]) + 1 == self.config.max_new_tokens
                        or len(self.histories[sequence]) >= self.model.max_positions
                    )
                    state = LENGTH if full else RUNNING
                decided[row] = token, state
        shapes = [len(logits), *live, *map(self.cache.length, live), *map(self.cache.sealed_tokens, live)]
        agreed = self.mesh.broadcast_checked(torch.tensor(decided), digest.chained(self.fed, shapes))
        return [tuple(row) for row in agreed.tolist()]

    def step(self, live: list[int]) -> torch.Tensor:
        """Feed the pending token of each live sequence through all layers; fp32 logits [live, vocab]."""
        tokens = [self.pending[sequence].pop() for sequence in live]
        self.fed = digest.chained(self.fed, tokens)
        tables = self.cache.step_tables(live)
        self.cache.step = Step(live, count_reads=True, decode=True, tables=tables)
        if tables is None:
            positions = [[self.cache.length(sequence)] for sequence in live]
            device = self.model.device
            return self.forward(torch.tensor(tokens, device=device)[:, None], torch.tensor(positions, device=device))
        tables.advance(tokens)
        if not self.config.graph:
            return self.forward(tables.token, tables.position)
        if self.graph is None or self.graph.key is not tables:
            self.graph = StepGraph(tables, lambda: self.forward(tables.token, tables.position), self.recorder)
        return self.graph()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token of each sequence of the cache's step, ids and positions int64 [b, 1]; fp32 logits [b, vocab]."""
        return self.model.step(ids, positions, self.cache)

    def warm_up(self) -> None:
        """Run a short prompt per sequence rank and one step, so that first-call costs stay out of the timing."""
        config, cache = self.config, self.cache_config
        self.config = replace(config, max_new_tokens=2, ignore_eos=True)
        tokens = min(cache.sink_rounded + cache.recent_tokens + 2 * cache.page_tokens, self.model.max_positions - 2)
        self.generate([[0] * tokens] * self.mesh.sp)  # the first granule of sequence b is rank b's
        self.config, self.cache, self.graph = config, None, None
        self.exchanged_bytes = self.exchanged_steps = 0


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's workers spin for a while after an operation that they shared, on the cores that the next step's kernels want."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
