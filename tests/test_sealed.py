"""The store of sealed pages: granules in token order, slabs that never move, bytes that are really there."""

import re
from pathlib import Path

import pytest
import torch

from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.sealed import GROWTH_GRANULES, SealedStore

CPU = torch.device("cpu")


def filled(reserve: int, granules: list[int], pages: int = 4) -> SealedStore:
    """A store with 2 heads and 32-byte records, each record full of (granule + page) % 251."""
    store = SealedStore(pages, 2, 32, CPU)
    store.reserve(reserve)
    for granule in granules:
        for page in range(pages):
            store.page(granule, page).fill_((granule + page) % 251)
    return store


def contents(store: SealedStore, most: int) -> list[tuple[int, list[int]]]:
    """(granule, first byte of each page) of all blocks."""
    found = []
    for records, granules in store.blocks(most):
        assert 1 <= len(records) == len(granules) <= most
        found += [(granule, record[:, 0, 0].tolist()) for granule, record in zip(granules, records, strict=True)]
    return found


@pytest.mark.parametrize("reserve", [0, 1, 5, 40])
@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("granules", [[], [0], [2, 5, 8], list(range(1, 120, 3))], ids=len)
def test_blocks_are_in_token_order_whatever_was_reserved(reserve, most, granules):
    wanted = [(g, [(g + page) % 251 for page in range(4)]) for g in granules]
    assert contents(filled(reserve, granules), most) == wanted


def test_growth_adds_slabs_and_never_moves_one():
    store = filled(3, [0, 1, 2])
    first = store.page(1, 2)
    address = first.data_ptr()
    filled_bytes = store.bytes
    for granule in range(3, 60):
        store.page(granule, 0).fill_(7)
    assert store.page(1, 2).data_ptr() == address and first[0, 0] == 3
    assert [len(slab) for slab in store.slabs] == [3] + [GROWTH_GRANULES] * 4
    assert filled_bytes == 3 * 4 * 2 * 32
    assert store.bytes == sum(slab.numel() for slab in store.slabs) == (3 + 4 * GROWTH_GRANULES) * 4 * 2 * 32


def test_reserving_twice_allocates_the_difference():
    store = filled(3, [0])
    store.reserve(2)
    assert [len(slab) for slab in store.slabs] == [3]
    store.reserve(10)
    assert [len(slab) for slab in store.slabs] == [3, 7] and store.capacity == 10


def test_an_earlier_granule_can_still_be_read():
    """Pages of a chunk may fill the end of one granule and the start of the next; older ones stay reachable by their index."""
    store = filled(1, [4, 9, 11])
    assert [store.page(g, 1)[0, 0].item() for g in (9, 4, 11)] == [10, 5, 12]
    with pytest.raises(ValueError):
        store.page(5, 0)  # never opened, and a later one is


def test_new_pages_are_zero():
    store = SealedStore(8, 3, 48, CPU)
    assert not store.page(0, 0).any()
    assert [record.shape for record, _ in store.blocks(5)] == [(1, 8, 3, 48)]


def test_offsets_beyond_two_to_the_31():
    """C21: a slab of 2.3 GB, 32,768 bytes from page to page; its last record, read through a strided view, is as written.

    Only the pages that are written ever exist in memory.
    """
    layout = RecordLayout(("codes", torch.uint8, (64, 200)), ("scale", torch.float16, (64,)), ("rest", torch.uint8, (19_840,)))
    assert layout.bytes == 32_768
    store = SealedStore(4, 1, layout.bytes, CPU)
    store.slabs, store.capacity = [torch.empty(17_500, *store.granule_shape, dtype=torch.uint8)], 17_500
    store.granules = list(range(17_500))
    torch.manual_seed(0)
    codes, scale = torch.randint(0, 256, (64, 200), dtype=torch.uint8), torch.randn(64).half()
    layout.write(store.page(17_499, 3), codes=codes, scale=scale)
    assert store.page(17_499, 3).storage_offset() == 69_999 * 32_768 > 2**31
    (records, granules), *_ = reversed(list(store.blocks(100)))
    assert granules[-1] == 17_499
    assert torch.equal(layout.view(records, "codes")[-1, 3, 0], codes)
    assert torch.equal(layout.view(records, "scale")[-1, 3, 0].contiguous(), scale)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages to ask for")
def test_a_large_slab_asks_for_huge_pages():
    store = SealedStore(4, 8, 5120, CPU)
    store.reserve(64)
    slab = store.slabs[0]
    assert slab.numel() >= 8 << 20 and not slab.any()
    middle, inside, flags = slab.data_ptr() + slab.numel() // 2, False, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            inside = first <= middle < last
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "hg" in flags
