"""A one-bit space tailored to a model (TaSQ, arXiv 2610.03027): keys before RoPE, weighted by the attention that each channel
receives, in codebooks for groups of channels that vary together.

One fp16 scale per token, the root mean square of the weighted keys of all KV heads together, stands before the keys' words;
values have none. Which groups, words and weights: the calibration file (fit/books.py makes it). 1,024 words for 8 channels are
1.25 bits; the simpler form of the article, two levels for each channel, is the same with groups of one and two words.
"""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.book_pages import BookCodec
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.kernels.reference import divide, to_half, tree_sum


class TailoredCodec(BookCodec):
    """The scales of a page are dealt out to the records of its KV heads, the first ones to the first: each is stored once."""

    joined = True

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        self.share = -(-config.page_tokens // heads.kv_heads)  # scales in the record of one head
        super().__init__(config, heads, layer, ("Kscale", torch.float16, (self.share,)))

    def split(self, k: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weighted = (k * self.books["K"].weight).transpose(1, 2).flatten(2)  # [pages, P, HK * D]
        scale = to_half(torch.sqrt(divide(tree_sum(weighted * weighted, -1), weighted.shape[-1])))  # [pages, P]
        dealt = scale.new_zeros(len(k), self.heads.kv_heads * self.share)
        dealt[:, : self.tokens] = scale
        k = k / torch.where(scale == 0, 1.0, scale.float())[:, None, :, None]
        return k, {"Kscale": dealt.unflatten(1, (self.heads.kv_heads, -1))}

    def scales(self, records: torch.Tensor) -> torch.Tensor:
        return self.layout.view(records, "Kscale").flatten(-2)[..., None, : self.tokens].float()
