"""The planes codec on a GPU: the same records, encoded and attended to by the Triton kernels."""

from __future__ import annotations

from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.codec.planes_cpu import PlanesCodecCpu, unserved_rule
from bitkv_dist.config import CacheConfig

MOST_BITS = 4
MOST_HEADS = 16  # query heads of a KV head: the columns of a tensor-core tile


class PlanesCodecTriton(PlanesCodecCpu):
    """What the compiled attention of a GPU does not know, by name, is left to the reference; encoding knows everything."""

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.unserved = unserved_rule(config) or unserved_shape(config, heads)


def unserved_shape(config: CacheConfig, heads: HeadShape) -> str | None:
    """The depth or head count that the Triton attention does not know, or None."""
    for name in ("key_bits", "value_bits"):
        if getattr(config, name) > MOST_BITS:
            return f"{name} {getattr(config, name)}"
    if heads.group is not None and heads.group > MOST_HEADS:
        return f"{heads.group} query heads to a KV head"
    return None
