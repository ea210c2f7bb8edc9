"""Reading prompts into the cache: exactly, layer by layer, or packed, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bitkv_dist import placement
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.heap import return_large_blocks
from bitkv_dist.model import ServedModel
from bitkv_dist.shortage import needing

Progress = Callable[[float, int], None]  # (prompt tokens done, of all), called often
Part = tuple[int, int, int]  # sequence, first token, tokens


def rounds(prompts: list[list[int]], chunk: int, ranks: int) -> list[list[Part | None]]:
    """The schedule of an exact prefill in chunks of so many tokens: in each round, the part of every sequence rank."""
    pieces = [(sequence, piece) for sequence, prompt in enumerate(prompts) for piece in range(-(-len(prompt) // chunk))]
    schedule = []
    for group in placement.rounds(pieces, GRANULE_TOKENS // chunk, ranks):
        parts: list[Part | None] = [None] * ranks
        for sequence, piece in group:
            start = piece * chunk
            rank = placement.owner(start // GRANULE_TOKENS, sequence, ranks)
            parts[rank] = (sequence, start, min(chunk, len(prompts[sequence]) - start))
        schedule.append(parts)
    return schedule


def run_layer(
    model: ServedModel, cache: PackedCache, layer: int, hidden: torch.Tensor, start: int, round_rows: int | None = None
) -> torch.Tensor:
    """One decoder layer over hidden [1, n, E] of tokens start .. start + n - 1; `cache.step` says of which sequence."""
    positions = torch.arange(start, start + hidden.shape[1], device=hidden.device).unsqueeze(0)
    return model.layer(layer, hidden, positions, model.rotary(hidden, positions), cache, round_rows)


def exact(
    model: ServedModel,
    caches: list[PackedCache],
    prompts: list[list[int]],
    rounds: list[list[Part | None]],
    progress: Progress,
    heads_at_once: int | None = None,
) -> torch.Tensor:
    """Walk the layers, not the prompt: all chunks go through a layer with its exact keys, then its pages are sealed.

    rounds: what each sequence rank works on at a time; a chunk's keys reach all ranks before the next round. No prompt token
    ever sees a quantised key, so one walk fills all `caches`. Memory: hidden states of this rank's chunks and the keys and
    values of one layer, whole or (heads_at_once) for some KV heads at a time, see prompt.py.
    Returns hidden [sequences, E] of the last tokens; only the rows whose last chunk is this rank's are filled.
    """
    cache = caches[0]
    rank = cache.shard.rank
    if cache.shard.ranks > 1 and (heads_at_once or cache.heads.kv_heads) < cache.heads.kv_heads:
        return_large_blocks()  # of gathered keys, each round longer than the one before: no hole is large enough for the next
    total = sum(map(len, prompts))
    parts_here = [part for parts in rounds if (part := parts[rank])]
    # One block that every layer overwrites: tensors of a chunk's size that come and go leave holes between them.
    rows = sum(part[2] for part in parts_here)
    with needing("the prompt's hidden states"):
        block = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
    hidden = dict(zip(parts_here, block.split([part[2] for part in parts_here]), strict=True))
    for (sequence, start, tokens), states in hidden.items():
        states.copy_(model.embed(as_ids(prompts[sequence][start : start + tokens], model))[0])
    for index, (layer, *others) in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        for sequence, prompt in enumerate(prompts):
            layer.begin_prompt(sequence, len(prompt), others, heads_at_once)
        for turn, parts in enumerate(rounds):
            own = parts[rank]
            cache.step = Step([own[0]] if own else [], round=parts)
            widest = max(part[2] for part in parts if part)
            if own:
                hidden[own].copy_(run_layer(model, cache, index, hidden[own].unsqueeze(0), own[1], widest)[0])
            else:
                layer.receive(None)
                model.idle(index, widest)
            progress(total * (index * len(rounds) + turn + 1) / (len(rounds) * len(cache.layers)), total)
        for sequence in range(len(prompts)):
            layer.finish_prompt(sequence, others)
    last = torch.zeros(len(prompts), model.config.hidden_size, dtype=model.dtype, device=model.device)
    for (sequence, start, tokens), states in hidden.items():
        if start + tokens == len(prompts[sequence]):
            last[sequence] = states[-1]
    return last


def packed(model: ServedModel, cache: PackedCache, prompts: list[list[int]], chunk: int, progress: Progress) -> torch.Tensor:
    """Append prompts to what the cache holds, a chunk at a time through all layers: memory does not grow with the prompt.

    A chunk sees what a decode step at its first position would see exactly, and its own tokens exactly; the rest by code.
    Chunks end at multiples of `chunk` in the whole sequence, wherever the prompt begins. A prompt may have no tokens. Returns
    hidden [sequences that got tokens, E] of the last tokens.
    """
    return_large_blocks()
    last, done, total = [], 0, sum(map(len, prompts))
    for sequence, prompt in enumerate(prompts):
        if not prompt:
            continue
        for hidden in packed_chunks(model, cache, Step([sequence]), prompt, chunk):
            done += hidden.shape[1]
            progress(done, total)
        last.append(hidden[0, -1])
    return torch.stack(last)


def packed_chunks(model: ServedModel, cache: PackedCache, step: Step, tokens: list[int], chunk: int) -> Iterator[torch.Tensor]:
    """Append tokens to the sequence of `step`; yields the final hidden states [1, n, E] of each chunk, before the last norm."""
    first = cache.length(step.sequences[0])
    position, end = first, first + len(tokens)
    while position < end:
        stop = min(end, (position // chunk + 1) * chunk)
        hidden = model.embed(as_ids(tokens[position - first : stop - first], model))
        cache.step = step
        for index in range(len(cache.layers)):
            hidden = run_layer(model, cache, index, hidden, position)
        yield hidden
        position = stop


def as_ids(tokens: list[int], model: ServedModel) -> torch.Tensor:
    """int64 [1, n] on the model's device."""
    return torch.tensor([tokens], device=model.device)
