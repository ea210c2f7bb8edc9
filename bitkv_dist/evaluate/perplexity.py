"""Teacher-forced perplexity of a text under packed caches, and how far their predictions are from exact ones.

Every query attends to sealed tokens: the text is fed a page at a time, so that a query sees the sink pages, `recent_tokens` to
`recent_tokens` + page - 1 tokens before it and itself exactly, and all others by code. That is harder than generation, where
the prompt never sees a quantised key. All caches walk the text together, so that memory does not grow with its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.model import ServedModel
from bitkv_dist.prefill import packed_chunks


@dataclass
class Score:
    """Sums over the predicted tokens of one text under one cache. KL is that of the exact to this prediction, in nats."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    top1: int = 0
    stored_bits: float = 0.0  # per key or value element of a sealed page
    read_bits: float = 0.0  # the same, of what attention read
    refined_share: float = 0.0  # of the sealed tokens
    kept_share: float = 1.0  # of the tokens that were sealed, at the end

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


    def row(self, codec: str, text: str, exact: Score) -> dict[str, Any]:
        """The measured cell as data; `exact` is the score of the exact cache on the same tokens."""
        return {
            "codec": codec,
            "text": text,
            "tokens": self.tokens,
            "ppl": self.perplexity,
            "ppl_ratio": self.perplexity / exact.perplexity,
            "kl": self.kl / self.tokens,
            "top1": self.top1 / self.tokens,
            "stored_bits": self.stored_bits,
            "read_bits": self.read_bits,
            "ratio": 16 / self.stored_bits,
            "refined_share": self.refined_share,
            "kept_share": self.kept_share,
        }


def exact_like(config: CacheConfig) -> CacheConfig:
    """The exact cache with the same pages, sink and window."""
    window = {name: getattr(config, name) for name in ("page_tokens", "sink_tokens", "recent_tokens")}
    return CacheConfig("exact", 16, 16, **window)


def differs(config: CacheConfig) -> bool:
    """Whether it answers otherwise than the exact cache."""
    return config.codec != "exact" or config.eviction != "none"


def head_shape(model: ServedModel) -> HeadShape:
    group = model.local_heads // model.local_kv_heads
    heads = model.layers, model.first_kv_head, model.local_kv_heads, model.head_dim
    return HeadShape(*heads, model.dtype, model.device, group, f"{model.fingerprint:016x}", model.loops)


def check_positions(first: int, last: int, tokens: int, model: str, max_positions: int) -> None:
    """ValueError, with the numbers, when ids[first:last] of a text of `tokens` tokens cannot be predicted by the model."""
    where = f"positions {first}:{last}"
    if not 1 <= first < last:
        raise ValueError(f"{where}: must be A:B with 1 <= A < B; a token is predicted from those before it")
    if last > tokens:
        raise ValueError(f"{where}: the text has {tokens} tokens; give a longer text or an end up to {tokens}")
    if last > max_positions:
        raise ValueError(f"{where}: {model} has {max_positions} positions; end there or before")


@torch.inference_mode()
def compare(model: ServedModel, caches: dict[str, CacheConfig], ids: list[int], first: int, last: int,
            progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Score]:
    """Scores of predicting ids[first:last], each token from all before it, for every named cache.

    All caches must share the window policy. An exact one walks along in any case; exact caches that are named share it.
    ValueError when there are no such positions.
    """
    check_positions(first, last, len(ids), model.name, model.max_positions)
    any_config = next(iter(caches.values()))
    shape = head_shape(model)
    configs = {"": exact_like(any_config)} | {name: config for name, config in caches.items() if differs(config)}
    held = {name: PackedCache(config, shape, 1) for name, config in configs.items()}
    page, tokens = any_config.page_tokens, ids[: last - 1]
    walks = {name: packed_chunks(model, cache, Step([0], count_reads=bool(name)), tokens, page) for name, cache in held.items()}
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
        progress(position, last - 1)
    for name, score in scores.items():
        account(score, held.get(name, held[""]))
    return scores


def account(score: Score, cache: PackedCache) -> None:
    """Fill in the bits that `cache` stores and read; one that counted no reads reads what it stores."""
    reads, score.stored_bits = cache.reads, cache.stored_bits_per_element
    score.read_bits = reads.bits / reads.elements if reads.elements else score.stored_bits
    held = cache.sealed_tokens(0)
    score.kept_share = held / sealed if (sealed := held + cache.evicted_tokens(0)) else 1.0
    score.refined_share = reads.refined / reads.scanned if reads.scanned else 0.0


def log_probabilities(model: ServedModel, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [n, E] -> fp32 log-probabilities [n, vocab]."""
    return torch.log_softmax(model.head(hidden), dim=-1)


def perplexity(model: ServedModel, cache: CacheConfig, ids: list[int], first: int, last: int) -> float:
    """Perplexity of ids[first:last] with one cache."""
    return compare(model, {"cache": cache}, ids, first, last)["cache"].perplexity
