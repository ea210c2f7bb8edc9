"""What the C++ kernels do with partials: the merge tree, the end of a decode step; and that threads change nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_pages import KV_HEADS, Pages, isa, queries, signs  # noqa: F401
from granule_partials import assert_is_tree, equal, granules

from bitkv_dist import partial
from bitkv_dist.kernels import cpu, reference
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import Partial

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 256, 257, 700])
def test_tree_is_that_of_the_partials(count):
    torch.manual_seed(count)
    found, index = granules(count), torch.arange(count)
    for nodes in (1, 4, 256):
        width = partial.lane_width(count, nodes)
        assert_is_tree(Partial(*cpu.tree(*found, index, width, nodes)), found, index, width, nodes)


@pytest.mark.parametrize("count", [2, 5, 31, 300])
def test_tree_merges_in_the_defined_order(count):
    """To the bit, by the kernel's own merge of two: another order would show, as that of neighbours does."""
    torch.manual_seed(count)
    found, pair = granules(count), torch.arange(2)

    def both(a: Partial, b: Partial) -> Partial:
        return Partial(*cpu.tree(*(torch.stack(parts) for parts in zip(a, b, strict=True)), pair, 2, 1)).rows(0)

    lanes: dict[int, Partial] = {}
    for index in range(count):
        lane, part = index % 256, found.rows(index)
        lanes[lane] = both(lanes[lane], part) if lane in lanes else part

    def node(stride: int, off: int) -> Partial | None:
        if stride == 256:
            return lanes.get(off)
        a, b = node(2 * stride, off), node(2 * stride, off + stride)
        return both(a, b) if a and b else a or b

    root = Partial(*cpu.tree(*found, torch.arange(count), partial.lane_width(count, 1), 1)).rows(0)
    assert equal(root, node(1, 0))
    if count > 2:
        neighbours = [found.rows(index) for index in range(count)]
        while len(neighbours) > 1:
            pairs = zip(neighbours[::2], [*neighbours[1::2], None], strict=False)
            neighbours = [both(a, b) if b else a for a, b in pairs]
        torch.testing.assert_close(neighbours[0].o, root.o, rtol=1e-4, atol=1e-4)
        assert not equal(neighbours[0], root)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 12])
def test_tree_has_the_same_bits_for_any_number_of_ranks(ranks):
    nodes = ranks if ranks & (ranks - 1) == 0 else min(256, 1 << (4 * ranks - 1).bit_length())
    for count in (1, 5, 300):
        torch.manual_seed(count)
        found, index = granules(count), torch.arange(count)
        wanted = cpu.tree(*found, index, 256, 1)
        sent = partial.empty((nodes, 2, 3), 24)
        for rank in range(ranks):  # residue u belongs to rank u mod ranks
            own = index[(index % nodes) % ranks == rank]
            mine = Partial(*cpu.tree(*found.rows(own), own, 256, nodes))
            for u in range(rank, nodes, ranks):
                for whole, part in zip(sent, mine, strict=True):
                    whole[u] = part[u]
        assert equal(cpu.tree(*sent, torch.arange(nodes), nodes, 1), wanted), count


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128])
def test_rotate_back_gives_the_bits_of_the_reference(dim):
    torch.manual_seed(dim)
    z = torch.randn(KV_HEADS, 3, 5, dim)
    assert torch.equal(cpu.rotate_back(z, signs("V", dim)), reference.rotate_back(z, signs("V", dim)[:, None, None, :]))


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_attend_exact_agrees_with_the_reference(dim):
    """Windows of any length and dtype, views into a longer one, one that is not contiguous."""
    torch.manual_seed(dim)
    q, window = queries(dim, 1, 3) / 3, torch.randn(2, KV_HEADS, 140, dim)
    for count in (0, 1, 31, 129, 140):
        for rows in (
            window[:, :, :count],
            window[:, :, 140 - count :].bfloat16(),
            window.flip(2).transpose(-1, -2).contiguous().transpose(-1, -2)[:, :, :count],
        ):
            found = cpu.attend_exact(q, rows)
            m, l, o = (part[0] for part in reference.attend_dense(q, rows[:1].float(), rows[1:].float(), None))
            torch.testing.assert_close(found[0], m, atol=1e-5, rtol=0)
            torch.testing.assert_close(found[1], l, atol=0, rtol=1e-5)
            torch.testing.assert_close(found[2], o, atol=1e-5, rtol=1e-5)


def test_attend_exact_over_heads_70_000_rows_apart():
    torch.manual_seed(0)
    q, rows = queries(16, 1, 3), torch.randn(2, KV_HEADS, 70_000, 16)[:, :, 69_867:]
    assert rows.stride(1) == 70_000 * 16
    assert equal(cpu.attend_exact(q, rows), cpu.attend_exact(q, rows.contiguous()))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 7, 90])
def test_see_gives_the_bits_of_attend_and_tree(count, threads):
    """A decode step merges the partials of granules where they arise; granules of a rank among others, in two slabs."""
    torch.manual_seed(count)
    pages = Pages(16, 64, (4, 1), (4, 1))
    records, valid = pages.random(max(count, 1))[:count], torch.ones(count, 8, dtype=torch.bool)
    valid[-1:, 3:] = False
    q, refinement, index = queries(16, 1, 3), cpu.Refinement(1, 1, 1, 0.05, *pages.noise()), 1 + 3 * torch.arange(count)
    found = cpu.attend(pages.layout, cpu.quantize_query(q, signs("K", 16)), records, valid, refinement)
    exact = torch.randn(2, KV_HEADS, 5, 16)
    slabs = [records[: count // 3].clone(), records[count // 3 :].clone()]
    for nodes, number in ((1, 1), (1, 2), (8, 1), (8, 3)):
        torch.set_num_threads(number)
        view = View([len(slab) for slab in slabs], index.tolist(), valid, 256, nodes, (KV_HEADS, 3, 16))
        alone, mine, refined = view.see(pages.layout, refinement, signs("K", 16), q, exact, slabs)
        assert equal(mine, cpu.tree(*found[:3], index, 256, nodes)) and refined == found[3]
        assert equal(alone, cpu.attend_exact(q, exact))
        for rows in (exact.bfloat16(), exact.half(), exact.transpose(1, 2).contiguous().transpose(1, 2).bfloat16()):
            alone, _, _ = view.see(pages.layout, refinement, signs("K", 16), q, rows, slabs, 3)
            assert equal(alone, cpu.attend_exact(q, rows[:, :, :3].float()))


def step(threads: int) -> list[torch.Tensor]:
    """One call of each threaded kernel."""
    torch.set_num_threads(threads)
    pages = Pages(80, 64, (4, 1), (2, 1))
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 40, KV_HEADS, 64, 80, generator=generator)
    records = cpu.encode(pages.layout, k, v, signs("K", 80), signs("V", 80), False).unflatten(0, (5, 8))
    q = torch.randn(KV_HEADS, 1, 3, 80, generator=generator)
    query, refinement = cpu.quantize_query(q, signs("K", 80)), cpu.Refinement(1, 1, 1, 0.05, *pages.noise())
    m, l, o, refined = cpu.attend(pages.layout, query, records, torch.ones(5, 8, dtype=torch.bool), refinement)
    return [records, m, l, o, torch.tensor(refined), *cpu.attend_exact(q, torch.stack((k[0], v[0])))]


def test_results_do_not_depend_on_the_number_of_threads(threads):
    wanted = step(1)
    for count in (2, 3, 2, 1):
        assert equal(step(count), wanted), count


def test_calls_from_several_threads_at_once(threads):
    wanted = step(1)
    with ThreadPoolExecutor(4) as pool:
        assert all(equal(found, wanted) for found in pool.map(step, [2, 1, 3, 2] * 8))
