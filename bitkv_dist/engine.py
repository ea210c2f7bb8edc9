"""The whole story of a run: prompts in, exact prefill, decode with one exchange per layer, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from bitkv_dist import agreement, prefill
from bitkv_dist.cache import PackedCache, Shard, Step
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import GRANULE_TOKENS, CacheConfig, GenerateConfig
from bitkv_dist.model import ServedModel
from bitkv_dist.parallel import digest, placement
from bitkv_dist.parallel.exchange import combine
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.sampling import Sampler, eos_ids

RUNNING, STOP, LENGTH = 0, 1, 2
REASONS = {STOP: "stop", LENGTH: "length"}

OnToken = Callable[[int, int], bool]  # (sequence, token id) on rank 0 -> True ends the sequence


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


class Engine:
    """A model, its packed cache and this rank's place in the grid. Every rank makes the same calls."""

    def __init__(
        self, model: ServedModel, cache: CacheConfig, mesh: Mesh, generate: GenerateConfig, audit: bool = False
    ) -> None:
        """audit: every rank also encodes the pages that it does not own, for `page_digests` to compare."""
        self.model, self.cache_config, self.mesh, self.config, self.audit = model, cache, mesh, generate, audit
        group = model.local_heads // model.local_kv_heads
        self.heads = HeadShape(
            model.layers, model.first_kv_head, model.local_kv_heads, model.head_dim, model.dtype, model.device, group
        )
        self.eos = frozenset(eos_ids(model.generation_config, model.tokenizer))
        self.cache: PackedCache | None = None
        self.rotation_digest = agreement.require(mesh, model, cache, generate)
        self.pending: list[list[int]] = []  # each sequence's tokens that are not in the cache yet: the last one sampled
        self.histories: list[list[int]] = []
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
    ) -> Result:
        """Continue the prompts (token ids, each at its own length). keep: append them to the sequences that the cache holds.

        on_token is called on rank 0 for every token as it comes and may end its sequence; on_prefill(done, all) counts prompt
        tokens.
        """
        with torch.inference_mode():
            started = time.perf_counter()
            if keep and self.cache is not None:
                logits = self.append(prompts, on_prefill or ignore)
            else:
                logits = self.begin(prompts, on_prefill or ignore)
            result = Result(list(map(len, prompts)), [[] for _ in prompts], [REASONS[LENGTH]] * len(prompts))
            result.prefill_s = time.perf_counter() - started
            self.decode(logits, result, on_token, started)
        return result

    def begin(self, prompts: list[list[int]], progress: prefill.Progress) -> torch.Tensor:
        """A new cache filled with the prompts; fp32 logits [sequences, vocab] of their last tokens."""
        self.check_lengths(prompts, [0] * len(prompts))
        ranks, rank, chunk = self.mesh.sp, self.mesh.sp_rank, self.config.chunk
        shard = Shard(
            rank, ranks, placement.residue_count(ranks),
            owns=lambda granule, sequence: placement.owner(granule, sequence, ranks) == rank,
            reduce=lambda nodes, sequences: combine(nodes, sequences, rank, ranks, self.mesh.gather_sp),
            gather=self.mesh.gather_sp,
        )  # fmt: skip
        self.cache = None  # the old one makes room first
        self.cache = PackedCache(self.cache_config, self.heads, len(prompts), shard, self.audit)
        self.sampler = Sampler(self.model.generation_config, self.config, sorted(self.eos), self.model.device)
        self.histories = [list(prompt) for prompt in prompts]
        self.pending = [[] for _ in prompts]
        self.reserve(list(map(len, prompts)))
        if self.config.prefill == "packed":
            return self.model.head(prefill.packed(self.model, self.cache, prompts, chunk, progress))
        last = prefill.exact(self.model, self.cache, prompts, self.rounds(prompts), progress)
        owners = [
            placement.owner((len(prompt) - 1) // GRANULE_TOKENS, sequence, ranks) for sequence, prompt in enumerate(prompts)
        ]
        return self.model.head(self.mesh.gather_sp(last)[owners, list(range(len(prompts)))])

    def append(self, prompts: list[list[int]], progress: prefill.Progress) -> torch.Tensor:
        """The next turn of every sequence on top of the cache, as a packed prefill; fp32 logits [sequences, vocab]."""
        turns = [pending + prompt for pending, prompt in zip(self.pending, prompts, strict=True)]
        held = [self.cache.length(sequence) for sequence in range(self.cache.sequences)]
        self.check_lengths(turns, held)
        self.reserve([length + len(turn) for length, turn in zip(held, turns, strict=True)])
        self.sampler.begin_turn()
        self.pending = [[] for _ in prompts]
        for history, prompt in zip(self.histories, prompts, strict=True):
            history += prompt
        return self.model.head(prefill.packed(self.model, self.cache, turns, self.config.chunk, progress))

    def reserve(self, lengths: list[int]) -> None:
        """Room for prompts of these lengths, what is cached included, and for the tokens to come."""
        for sequence, length in enumerate(lengths):
            self.cache.reserve(sequence, min(length + self.config.max_new_tokens, self.model.max_positions))

    def rounds(self, prompts: list[list[int]]) -> list[list[prefill.Part | None]]:
        """The schedule of an exact prefill: in each round, the (sequence, first token, tokens) of every sequence rank."""
        chunk, ranks = self.config.chunk, self.mesh.sp
        pieces = [(sequence, piece) for sequence, prompt in enumerate(prompts) for piece in range(-(-len(prompt) // chunk))]
        schedule = []
        for group in placement.rounds(pieces, GRANULE_TOKENS // chunk, ranks):
            parts: list[prefill.Part | None] = [None] * ranks
            for sequence, piece in group:
                start = piece * chunk
                rank = placement.owner(start // GRANULE_TOKENS, sequence, ranks)
                parts[rank] = (sequence, start, min(chunk, len(prompts[sequence]) - start))
            schedule.append(parts)
        return schedule

    def check_lengths(self, prompts: list[list[int]], held_tokens: list[int]) -> None:
        """held_tokens: what the cache keeps of each sequence before its prompt."""
        for sequence, (prompt, held) in enumerate(zip(prompts, held_tokens, strict=True)):
            if not prompt:
                raise ValueError(f"prompt {sequence}: has no tokens; give some text")
            if held + len(prompt) > self.model.max_positions:
                raise ValueError(
                    f"prompt {sequence}: {held + len(prompt)} tokens, but {self.model.name} has {self.model.max_positions} positions; shorten it"
                )

    def decode(self, logits: torch.Tensor, result: Result, on_token: OnToken | None, started: float) -> None:
        """Sample, feed, repeat, until every sequence has ended; fills `result`."""
        live = list(range(len(result.token_ids)))
        for step in range(self.config.max_new_tokens):
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
                live = [other for other in live if other != sequence]
            if step == 0:
                result.first_token_s = time.perf_counter() - started
            if not live:
                break
            logits = self.step(live)
        result.decoded_tokens = sum(map(len, result.token_ids)) - sum(map(bool, result.token_ids))
        if result.decoded_tokens:
            result.decode_s = time.perf_counter() - started - result.first_token_s

    def choose(self, logits: torch.Tensor, live: list[int], result: Result, on_token: OnToken | None) -> list[tuple[int, int]]:
        """(token, state) of each live sequence: rank 0 decides, all ranks follow."""
        if not torch.isfinite(logits).all():
            layer = self.cache.first_nonfinite_layer()
            where = "after the last attention" if layer is None else f"first in the attention of layer {layer}"
            raise FloatingPointError(f"rank {self.mesh.world.rank}: logits are not finite, {where}")
        decided = torch.zeros(len(live), 2, dtype=torch.int64)
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
                decided[row] = torch.tensor((token, state))
        return [tuple(row) for row in self.mesh.broadcast_tensor(decided).tolist()]

    def step(self, live: list[int]) -> torch.Tensor:
        """Feed the pending token of each live sequence through all layers; fp32 logits [live, vocab]."""
        positions = torch.tensor([[self.cache.length(sequence)] for sequence in live], device=self.model.device)
        ids = torch.tensor([self.pending[sequence] for sequence in live], device=self.model.device)
        for sequence in live:
            self.pending[sequence] = []
        self.cache.step = Step(live, count_reads=True)
        return self.model.step(ids, positions, self.cache)

    def warm_up(self) -> None:
        """Run a short prompt per sequence rank and one step, so that first-call costs stay out of the timing."""
        config, cache = self.config, self.cache_config
        self.config = replace(config, max_new_tokens=2, ignore_eos=True)
        tokens = min(cache.sink_rounded + cache.recent_tokens + 2 * cache.page_tokens, self.model.max_positions - 2)
        self.generate([[0] * tokens] * self.mesh.sp)  # the first granule of sequence b is rank b's
        self.config, self.cache = config, None


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's workers spin for a while after an operation that they shared, on the cores that the next step's kernels want."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ignore(done: float, total: int) -> None:
    """A progress callback that shows nothing."""
