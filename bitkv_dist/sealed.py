"""Sealed pages of one sequence and layer on one rank: whole granules in slabs that are never copied."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import torch

from bitkv_dist.kernels.cpu import advise_huge_pages

GROWTH_GRANULES = 16


class SealedStore:
    """Records uint8 [granules, pages, HK, record_bytes] of the granules that this rank owns, in ascending order.

    A slab is allocated once for what `reserve` announces; growth beyond it adds slabs, it never moves one.
    """

    def __init__(self, pages_per_granule: int, kv_heads: int, record_bytes: int, device: torch.device) -> None:
        self.granule_shape = (pages_per_granule, kv_heads, record_bytes)
        self.device = device
        self.slabs: list[torch.Tensor] = []
        self.granules: list[int] = []  # global indices, one per slot in use
        self.writes: Counter[int] = Counter()  # granule -> pages written so far: while it is the same, so are the bytes
        self.capacity = 0

    def reserve(self, granules: int) -> None:
        """Room for `granules` owned granules in all."""
        if granules > self.capacity:
            slab = torch.empty(granules - self.capacity, *self.granule_shape, dtype=torch.uint8, device=self.device)
            self.slabs.append(advise_huge_pages(slab).zero_())
            self.capacity = granules

    def page(self, granule: int, page: int) -> torch.Tensor:
        """The record view [HK, record_bytes] of a page of global granule `granule`, to be written; opens the granule when it
        is the next one. Who only reads takes `record`: what was not asked for here has not changed."""
        if not self.granules or self.granules[-1] < granule:
            if len(self.granules) == self.capacity:
                self.reserve(self.capacity + GROWTH_GRANULES)
            self.granules.append(granule)
        found = self.record(granule, page)
        self.writes[granule] += 1
        return found

    def record(self, granule: int, page: int) -> torch.Tensor:
        """The record view [HK, record_bytes] of a page of a granule that is held here, to be read."""
        slot = self._slot(granule)
        for slab in self.slabs:
            if slot < len(slab):
                return slab[slot, page]
            slot -= len(slab)
        raise AssertionError("a granule lies in no slab")

    def _slot(self, granule: int) -> int:
        """ValueError for a granule that was never opened."""
        slot = bisect_left(self.granules, granule)
        if slot == len(self.granules) or self.granules[slot] != granule:
            raise ValueError(f"granule {granule} is not held here")
        return slot

    def within(self, granules: range) -> list[int]:
        """The granules held here of a range."""
        return self.granules[bisect_left(self.granules, granules.start) : bisect_left(self.granules, granules.stop)]

    def before(self, granule: int) -> list[int]:
        """The granules held here before this one."""
        return self.granules[: bisect_left(self.granules, granule)]

    def blocks(
        self, most: int, before: int | None = None, modulus: int = 1, residue: int = 0
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """(records [n, pages, HK, record_bytes], their global granules) with n <= most, in token order; only granules <
        before, and those congruent to `residue`: views whose granules may lie apart."""
        first = 0
        count = len(self.granules) if before is None else bisect_left(self.granules, before)
        for slab in self.slabs:
            used = range(max(0, min(len(slab), count - first)))
            slots = used if modulus == 1 else [slot for slot in used if self.granules[first + slot] % modulus == residue]
            step = slots[1] - slots[0] if len(slots) > 1 else 1  # the same all along: owners of granules come in turns
            for start in range(0, len(slots), most):
                some = slots[start : start + most]
                yield slab[some[0] : some[-1] + 1 : step], [self.granules[first + slot] for slot in some]
            first += len(slab)

    def addresses(self) -> Iterator[tuple[int, int]]:
        """(global granule, address of its records) of the granules held here. A slab never moves."""
        for records, granules in self.blocks(1):
            yield granules[0], records.data_ptr()

    @property
    def bytes(self) -> int:
        return sum(slab.untyped_storage().nbytes() for slab in self.slabs)
