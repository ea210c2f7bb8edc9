"""Teacher-forced perplexity of a text under packed caches, and how far their predictions are from exact ones.

Every query attends to sealed tokens: the text is fed a page at a time, so that a query sees the sink pages, `recent_tokens` to
`recent_tokens` + page - 1 tokens before it and itself exactly, and all others by code. That is harder than generation, where
the prompt never sees a quantised key. All caches walk the text together, so that memory does not grow with its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import CacheConfig
from bitkv_dist.model import ServedModel
from bitkv_dist.prefill import packed_chunks


@dataclass
class Score:
    """Sums over the predicted tokens of one text under one cache. KL is that of the exact to this prediction, in nats."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    top1: int = 0
    stored_bits: float = 0.0
    read_bits: float | None = None
    refined_share: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    def add(self, log_p: torch.Tensor, exact_log_p: torch.Tensor, targets: torch.Tensor) -> None:
        """log_p, exact_log_p fp32 [n, vocab]; targets int64 [n]."""
        self.tokens += len(targets)
        self.nll -= log_p.gather(1, targets[:, None]).double().sum().item()
        self.top1 += int((log_p.argmax(1) == exact_log_p.argmax(1)).sum())
        if log_p is not exact_log_p:
            self.kl += (exact_log_p.exp() * (exact_log_p - log_p)).sum(1).double().sum().item()


def exact_like(config: CacheConfig) -> CacheConfig:
    """The exact cache with the same pages, sink and window."""
    return CacheConfig("exact", 16, 16, page_tokens=config.page_tokens, sink_tokens=config.sink_tokens, recent_tokens=config.recent_tokens)


def head_shape(model: ServedModel) -> HeadShape:
    group = model.local_heads // model.local_kv_heads
    return HeadShape(model.layers, model.first_kv_head, model.local_kv_heads, model.head_dim, model.dtype, model.device, group)


@torch.inference_mode()
def compare(model: ServedModel, caches: dict[str, CacheConfig], ids: list[int], first: int, last: int,
            progress: Callable[[int, int], None] | None = None) -> dict[str, Score]:
    """Scores of predicting ids[first:last], each token from all before it, for every named cache; "exact" is measured when named.

    All caches must share the window policy. ValueError when the text has fewer than `last` tokens.
    """
    if not 1 <= first < last:
        raise ValueError(f"positions {first}:{last}: must be A:B with 1 <= A < B; a token is predicted from those before it")
    if last > len(ids):
        raise ValueError(f"positions {first}:{last}: the text has {len(ids)} tokens; give a longer text or an end up to {len(ids)}")
    if last > model.max_positions:
        raise ValueError(f"positions {first}:{last}: {model.name} has {model.max_positions} positions; end there or before")
    any_config = next(iter(caches.values()))
    shape = head_shape(model)
    held = {name: PackedCache(config, shape, 1) for name, config in ({"": exact_like(any_config)} | caches).items() if config.codec != "exact" or not name}
    walks = {name: packed_chunks(model, cache, Step([0], count_reads=bool(name)), ids[: last - 1], any_config.page_tokens) for name, cache in held.items()}
    scores = {name: Score() for name in caches}
    targets = torch.tensor(ids, device=model.device)
    position = 0
    for chunks in zip(*walks.values(), strict=True):
        hidden = dict(zip(walks, chunks, strict=True))
        end = position + hidden[""].shape[1]
        begin = max(position, first - 1)  # the row at position p predicts token p + 1
        if begin < end:
            exact_log_p = log_probabilities(model, hidden[""][0, begin - position :])
            for name, score in scores.items():
                log_p = log_probabilities(model, hidden[name][0, begin - position :]) if name in hidden else exact_log_p
                score.add(log_p, exact_log_p, targets[begin + 1 : end + 1])
        position = end
        if progress:
            progress(position, last - 1)
    for name, score in scores.items():
        cache = held.get(name, held[""])
        reads = cache.reads
        score.stored_bits = cache.stored_bits_per_element
        if name in held and reads.elements:
            score.read_bits, score.refined_share = reads.bits / reads.elements, reads.refined / reads.scanned
        elif name not in held:
            score.read_bits, score.refined_share = cache.stored_bits_per_element, 0.0
    return scores


def log_probabilities(model: ServedModel, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [n, E] -> fp32 log-probabilities [n, vocab]."""
    return torch.log_softmax(model.head(hidden), dim=-1)


def perplexity(model: ServedModel, cache: CacheConfig, ids: list[int], first: int, last: int) -> float:
    """Perplexity of ids[first:last] with one cache."""
    return compare(model, {"cache": cache}, ids, first, last)["cache"].perplexity
