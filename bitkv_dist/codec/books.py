"""Words for groups of channels: the nearest word's index is stored, decoding looks words up.

Vectors and words are small integers (in units of the book), so that squared distances are exact in fp32 whatever the order of
their sums, and every machine stores the same index: with |x| and |w| up to LIMIT, and twice that left over by a first stage of
groups of at most 4, |2 x.w| + |w|^2 stays below 2^24. Ties go to the lower index.
"""

from __future__ import annotations

import torch

from bitkv_dist.kernels.reference import pack_bits, unpack_bits

LIMIT = 700
ROWS_AT_ONCE = 1024  # vectors whose distances to all words are held at a time: they stay in the cache of a core


class Books:
    """One side (keys or values) of a layer. Words int16 [HK, groups, stages, words, n] in units fp32 [HK, groups].

    channels int [HK, groups * n]: which channel stands where in the groups, a permutation of the head's D channels, kept as
    `channels` and its inverse `places`, int64, unless it is the identity in all heads. A vector x is coded as
    (x - center) * weight, center and weight fp32 [HK, D]. Later stages code what the earlier ones left over.
    """

    def __init__(self, words: torch.Tensor, unit: torch.Tensor, channels: torch.Tensor, center: torch.Tensor,
                 weight: torch.Tensor) -> None:
        heads, self.groups, self.stages, count, self.width = words.shape
        self.bits = (count - 1).bit_length()
        self.words, self.unit = words, unit
        self.center, self.weight = center.unsqueeze(-2), weight.unsqueeze(-2)
        moved = (channels != torch.arange(channels.shape[-1], device=channels.device)).any()
        self.channels, self.places = (channels.long(), channels.argsort(-1)) if moved else (None, None)
        first = torch.arange(heads * self.groups * self.stages, device=words.device) * count
        self.first = first.view(heads, self.groups, self.stages, 1)  # of a book's words among all

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        held = (self.words, self.unit, self.channels, self.center, self.weight, self.first, self.places)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def code_shape(self) -> tuple[int, int, int]:
        """Planes of a page: [groups, stages, bits], each of P bits."""
        return self.groups, self.stages, self.bits

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """x fp32 [..., HK, P, D] -> uint8 [..., HK, groups, stages, bits, P/8], bit i of byte j is that of token 8j + i."""
        x = (x - self.center) * self.weight
        if self.places is not None:
            x = x.gather(-1, self.channels.unsqueeze(-2).expand(x.shape))
        left = self.integers(x.unflatten(-1, (self.groups, -1)).transpose(-2, -3))  # [.., HK, groups, P, n]
        found = []
        for stage in range(self.stages):
            found.append(nearest(left, self.words[:, :, stage].float()))
            if stage + 1 < self.stages:
                left = left - self.looked_up(found[-1] + self.first[:, :, stage])
        bits = torch.arange(self.bits, device=x.device).view(-1, 1)
        planes = ((torch.stack(found, -2).unsqueeze(-2) >> bits) & 1).to(torch.uint8)  # [.., HK, groups, stages, bits, P]
        return pack_bits(planes.unflatten(-1, (-1, 8)))

    def looked_up(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> the words, fp32 [..., n]."""
        return self.words.flatten(0, 3).index_select(0, rows.flatten()).float().view(*rows.shape, self.width)

    def integers(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., HK, groups, P, n] in units of the books, rounded half to even, as fp32."""
        return torch.round(x / self.unit[:, :, None, None]).clamp(-LIMIT, LIMIT)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 [..., HK, groups, stages, bits, P/8] -> fp32 [..., HK, P, D]."""
        powers = (1 << torch.arange(self.bits, device=codes.device)).view(-1, 1).float()
        index = (unpack_bits(codes).flatten(-2) * powers).sum(-2).long()  # [.., HK, groups, stages, P]
        found = self.looked_up(index + self.first)
        x = found[..., 0, :, :]
        for stage in range(1, self.stages):
            x = x + found[..., stage, :, :]
        x = (x * self.unit[:, :, None, None]).transpose(-2, -3).flatten(-2)
        if self.places is not None:
            x = x.gather(-1, self.places.unsqueeze(-2).expand(x.shape))
        return x / self.weight + self.center


def nearest(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """x [..., B.., P, n] of small whole numbers, words [B.., words, n] -> int64 [..., B.., P], words by number."""
    batch = words.shape[:-2]
    shape, lead = x.shape[:-1], x.shape[: x.dim() - len(batch) - 2]
    by_book = x.reshape(-1, batch.numel(), *x.shape[-2:]).transpose(0, 1).flatten(1, 2)  # [books, vectors, n]
    index = torch.stack([nearest_in_book(*each) for each in zip(by_book, words.reshape(-1, *words.shape[-2:]), strict=True)])
    return index.view(batch.numel(), lead.numel(), -1).transpose(0, 1).reshape(shape)


def nearest_in_book(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Index of the word with the least squared distance, ties to the lower: x fp32 [N, n], words fp32 [words, n] -> int64 [N].

    That is the largest of 2 x.w - |w|^2, one matrix product with a constant column.
    """
    matrix = torch.cat((2 * words.T, -(words * words).sum(-1)[None]))
    rows = torch.cat((x, x.new_ones(len(x), 1)), 1)
    scores = x.new_empty(min(len(x), ROWS_AT_ONCE), len(words))  # one block for all: fresh memory costs more than the sums
    parts = (torch.mm(part, matrix, out=scores[: len(part)]) for part in rows.split(ROWS_AT_ONCE))
    return torch.cat([first_largest(part) for part in parts])


def first_largest(scores: torch.Tensor) -> torch.Tensor:
    """Index of the first of the largest numbers in each row; torch.argmax does not say which of equal ones it takes."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    count = scores.shape[-1]
    position = torch.arange(count, device=scores.device)
    return torch.where(scores == scores.amax(-1, keepdim=True), position, count).amin(-1)
