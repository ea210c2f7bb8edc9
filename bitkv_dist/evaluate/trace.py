"""True queries, keys and values of a prompt, layer by layer, beside the cache that an exact prefill makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bitkv_dist.cache import PackedCache
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import Codec, HeadShape, make_codec
from bitkv_dist.evaluate.perplexity import head_shape
from bitkv_dist.layer import PackedLayer
from bitkv_dist.model import ServedModel
from bitkv_dist.prefill import Progress, exact

QUERIES = 64  # last positions of the prompt whose queries are kept, as far as the recent window reaches

MakeCodec = Callable[[CacheConfig, HeadShape, int], Codec]


class Trace(NamedTuple):
    """A layer of the cache after a prompt of T tokens, and the truth about it in the model's dtype, after RoPE.

    q [HK, G, n, D] of the last n positions, none of which is sealed; k, v [HK, T, D].
    """

    layer: PackedLayer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float


class TracedLayer(PackedLayer):
    """A cache layer that shows its visitor what an exact prefill has brought it."""

    def __init__(self, cache: PackedCache, index: int, codec: Codec, visit: Callable[[Trace], None]) -> None:
        super().__init__(cache, index)
        self.codec, self.visit = codec, visit
        self.q: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        kept = min(QUERIES, max(1, self.cache.config.recent_tokens))
        grouped = q[0].unflatten(0, (self.cache.heads.kv_heads, -1))
        self.q = (grouped if self.q is None else torch.cat((self.q, grouped), 2))[:, :, -kept:]
        self.scaling = scaling
        return super().attend(q, scaling)

    def finish_prompt(self, sequence: int, others: Sequence[PackedLayer] = ()) -> None:
        k, v = self.states[sequence].prompt.rows
        super().finish_prompt(sequence, others)
        self.visit(Trace(self, self.q, k, v, self.scaling))


def trace(model: ServedModel, config: CacheConfig, ids: list[int], visit: Callable[[Trace], None], make: MakeCodec = make_codec,
          progress: Progress = lambda done, total: None) -> None:
    """Reads a prompt as the engine does and calls `visit` for each layer as soon as it is sealed.

    make: another codec of the same record size in the place of the configured one. ValueError when no page is sealed, and for
    codec looped, whose layers are not sealed one after the other.
    """
    if config.codec == "looped":
        rule = "seals a page of all loops at once, and layers are looked at one by one here"
        raise ValueError(f"cache.codec 'looped': {rule}; compare it with --task ppl or retrieval")
    sealing = config.sink_rounded + config.page_tokens + max(1, config.recent_tokens)
    if len(ids) < sealing:
        raise ValueError(f"text of {len(ids)} tokens: no page of it is sealed; give at least {sealing} tokens")
    heads = head_shape(model)
    cache = PackedCache(config, heads, 1)
    codecs = [make(config.for_layer(index), heads, index) for index in range(model.layers)]
    cache.layers = [TracedLayer(cache, index, codec, visit) for index, codec in enumerate(codecs)]
    chunks = [[(0, start, min(GRANULE_TOKENS, len(ids) - start))] for start in range(0, len(ids), GRANULE_TOKENS)]
    exact(model, [cache], [ids], chunks, progress)
