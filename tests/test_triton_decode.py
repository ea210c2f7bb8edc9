"""The fused decode kernel, in Triton's interpreter, against the reference."""

import operator
from dataclasses import replace

import pytest
import torch
from cpu_pages import KV_HEADS, Pages, queries, signs

pytest.importorskip("triton")

import triton as language
import triton.language as tl
from triton_pages import assert_same_attention, layout, poison, refinement, wanted

from bitkv_dist.kernels import reference, triton
from bitkv_dist.kernels.triton import tables
from bitkv_dist.kernels.triton.decode import value_blocks, value_dims
from bitkv_dist.kernels.triton.planes import (
    PLAIN,
    PLAIN_WORDS,
    expansion,
    gcn_expansion,
    load_planes,
    no_dots,
    own_set,
    plane_dots,
    shifted,
    unscale,
    word_mask,
)
from bitkv_dist.partial import Partial, empty, merge

DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 3, 4, 8, 16)
OPERATIONS = {"and": operator.and_, "or": operator.or_, "shl": operator.lshift, "shr": operator.rshift}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel is given to write into holds NaN."""
    allocate = torch.Tensor.new_empty

    def fill(self, *shape, **kind):
        found = allocate(self, *shape, **kind)
        return found.fill_(float("nan")) if found.is_floating_point() else found.fill_(99)

    monkeypatch.setattr(torch.Tensor, "new_empty", fill)


# ------------------------------------------------------------------------------------------------------ expansion


def run_ptx(text: str, planes: list[int]) -> list[int]:
    """The eight registers that the assembly of `expand` yields for one register of each plane."""
    registers = {f"${8 + i}": word for i, word in enumerate(planes)}
    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        if name in ("", ".reg"):
            continue
        a, b = (registers[operand] if operand in registers else int(operand) for operand in operands[1:])
        result = OPERATIONS[name.split(".")[0]](a, b)
        registers[operands[0]] = result & 0xFFFFFFFF
    return [registers[f"${j}"] for j in range(8)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_assembly_expands_as_its_twin(bits, exact):
    """Every byte value in every byte: mask j yields code * 2^e(j), below bit 7 but for the sign that one plane turns."""
    torch.manual_seed(bits)
    for words in [*torch.randint(0, 1 << 32, (64, bits)).tolist(), [0xFFFFFFFF] * bits, [0x80000000] * bits]:
        for j, found in enumerate(run_ptx(expansion(bits, exact), words)):
            codes = [sum((word >> (8 * b + j) & 1) << (bits - 1 - plane) for plane, word in enumerate(words)) for b in range(4)]
            low = shifted(bits, bits - 1, j, exact)[1]
            assert [found >> (8 * b) & 255 for b in range(4)] == [code << low for code in codes]
            assert bits == 1 or max(codes) << low < 128


def run_gcn(text: str, planes: list[int]) -> list[int]:
    """The same of AMD's; the masks of `expand_words` come after the planes."""
    registers = {f"${9 + i}": word for i, word in enumerate([*planes, *(word_mask(bit) & 0xFFFFFFFF for bit in range(8))])}
    for line in text.split("\n\t"):
        name, _, rest = line.partition(" ")
        out, *operands = rest.split(", ")
        a, b, *c = (registers[operand] if operand in registers else int(operand) for operand in operands)
        found = {"v_and_b32": a & b, "v_and_or_b32": a & b | sum(c)}
        registers[out] = found[name] if name in found else (b << a if name == "v_lshlrev_b32" else b >> a) & 0xFFFFFFFF
    return [registers[f"${j}"] for j in range(8)]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_both_assemblies_expand_alike(bits):
    torch.manual_seed(bits)
    for words in [*torch.randint(0, 1 << 32, (64, bits)).tolist(), [0xFFFFFFFF] * bits, [0x80000000] * bits]:
        assert run_gcn(gcn_expansion(bits), words) == run_ptx(expansion(bits, False), words)


# ------------------------------------------------------------------------------------------------------- integers


@language.jit
def sum_values(
    planes, weights, out, P: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, SETS: tl.constexpr, GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """out int32 [D, GROUP] = weights int8 [P, GROUP] times codes."""
    BLOCKS: tl.constexpr = value_blocks(D // 8, SETS)
    column = tl.arange(0, SETS * GROUP)[None, :]
    column_set = column // GROUP
    operand = tl.load(weights + tl.arange(0, P)[:, None] * GROUP + column % GROUP)
    for b in tl.static_range(len(BLOCKS)):
        words = load_planes(planes + 4 * BLOCKS[b][0], P * D // 8, P // 4, BLOCKS[b][1], D // 8, BITS, ASSEMBLY)
        sums = plane_dots(words, operand, no_dots(8 * BLOCKS[b][1], SETS * GROUP, SETS), ASSEMBLY)
        scale = unscale(8 * BLOCKS[b][1] // SETS, column_set, BLOCKS[b][1], SETS, BITS)
        row = tl.arange(0, scale.shape[0])[:, None] + scale.shape[0] * column_set
        dim, inside = value_dims(D, BLOCKS[b][0], BLOCKS[b][1], row)
        found = (own_set(sums, column_set).to(tl.float32) * scale).to(tl.int32)
        tl.store(out + dim * GROUP + column % GROUP, found, mask=inside)


@pytest.mark.parametrize("dim", DIMS)
def test_value_integers_are_those_of_the_reference(dim):
    for case, bits in enumerate((1, 2, 3, 4)):
        torch.manual_seed(dim + bits)
        tokens, group = (64, 128)[case % 2], (1, 2, 4, 8)[(case + dim // 16) % 4]
        planes = torch.randint(0, 256, (bits * tokens * dim // 8 + 64,), dtype=torch.uint8)
        planes[:64] = 255
        weights = torch.randint(0, 128, (tokens, group), dtype=torch.int8)
        words = planes[: bits * tokens * dim // 8].view(torch.int32).view(bits, tokens // 4, dim // 8)
        codes = reference.unpack_planes(words, "V")
        for assembly in (PLAIN, PLAIN_WORDS):
            out = torch.full((dim, group), 99, dtype=torch.int32)
            sum_values[(1,)](
                planes, weights, out, P=tokens, D=dim, BITS=bits, SETS=8 // group, GROUP=group, ASSEMBLY=assembly.value
            )
            assert torch.equal(out.double(), codes.double().T @ weights.double()), (bits, assembly)


# --------------------------------------------------------------------------------------------------------- attend


@pytest.mark.parametrize("dim", [pytest.param(dim, marks=pytest.mark.slow) if dim in (80, 192, 256) else dim for dim in DIMS])
def test_decode_agrees_with_the_reference(dim):
    """Granules that are full, empty, partly valid; every depth; groups of every size; two queries at once."""
    for case, bits in enumerate((1, 2, 3, 4)):
        turn = case + dim // 16
        torch.manual_seed(turn)
        tokens, group, positions = (64, 128)[turn % 2], GROUPS[turn % 5], 1 + (turn % 4 == 3)
        pages = Pages(dim, tokens, (bits, bits), ((bits + case) % 4 + 1,) * 2)
        granules = 3 if turn % 3 == 0 else 1
        valid = torch.ones(granules, 512 // tokens, dtype=torch.bool)
        valid[0, 0] = valid[-1, -2:] = False
        if granules == 3:
            valid[1] = False
        records, q = pages.random(granules), queries(dim, positions, group)
        query = triton.quantize_query(q, signs("K", dim))
        *found, refined = triton.attend(layout(pages), query, poison(records, valid), valid, refinement(pages, None))
        assert_same_attention(found, wanted(pages, q, records, valid, None))
        assert refined == 0


@pytest.mark.parametrize("rule", [None, reference.Selection(0.05, 1, True)])
def test_as_on_amd(rule, monkeypatch):
    """Words instead of bytes, sixteen columns, warps of 64."""
    monkeypatch.setitem(tables.ARCHITECTURES, "interpreter", replace(tables.AMD, assembly=PLAIN_WORDS.value, stages=1))
    for dim, bits, group in ((64, 4, 3), (80, 2, 8)):
        torch.manual_seed(dim)
        depth = (bits, bits if rule is None else 1)
        pages = Pages(dim, 128, depth, depth)
        records, q, valid = pages.random(1), queries(dim, 1, group), torch.tensor([[False, True, True, True]])
        query = triton.quantize_query(q, signs("K", dim))
        *found, _ = triton.attend(layout(pages), query, poison(records, valid), valid, refinement(pages, rule))
        assert_same_attention(found, wanted(pages, q, records, valid, rule))


def test_decode_of_nothing_and_of_zeros():
    pages = Pages(64, 128, (1, 1), (1, 1))
    records = pages.encode(torch.zeros(4, KV_HEADS, 128, 64), torch.zeros(4, KV_HEADS, 128, 64)).unflatten(0, (1, 4))
    query = triton.quantize_query(torch.zeros(KV_HEADS, 1, 3, 64), signs("K", 64))
    m, l, o, _ = triton.attend(layout(pages), query, records, torch.ones(1, 4, dtype=torch.bool), refinement(pages, None))
    torch.testing.assert_close(m + l.log2(), torch.full_like(m, 9.0))
    assert (o / l.unsqueeze(-1)).abs().max() < 1e-15
    m, _, o, refined = triton.attend(
        layout(pages), query, records[:0], torch.ones(0, 4, dtype=torch.bool), refinement(pages, None)
    )
    assert m.shape == (0, KV_HEADS, 1, 3) and o.shape == (0, KV_HEADS, 1, 3, 64) and refined == 0


def test_values_of_zero_scale_keep_their_weight():
    """Half of the values are the centroid itself: their scale is 0, their probability is not."""
    torch.manual_seed(3)
    pages = Pages(64, 128, (1, 1), (1, 1))
    v = torch.randn(4, KV_HEADS, 128, 64)
    v[:, :, ::2] = 0.0
    v[:, :, 1::2] -= v[:, :, 1::2].mean(2, keepdim=True)
    records = pages.encode(torch.randn_like(v), v).unflatten(0, (1, 4)).contiguous()
    pages.record.view(records, "Vscan")[..., ::2] = 0.0
    q, valid = queries(64, 1, 2), torch.ones(1, 4, dtype=torch.bool)
    *found, _ = triton.attend(layout(pages), triton.quantize_query(q, signs("K", 64)), records, valid, refinement(pages, None))
    assert_same_attention(found, wanted(pages, q, records, valid, None))


# ---------------------------------------------------------------------------------------------------------- lanes


def spread(records: list[torch.Tensor], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One address space with the granules of every sequence, last ones first and beyond 2^31 bytes, and their offsets int64
    [B, slots]."""
    space = torch.empty((1 << 32) + sum(part.numel() for part in records) + 256, dtype=torch.uint8)  # never touched as a whole
    offsets, at = torch.full((len(records), slots), -(1 << 40)), len(space) // 16 * 16
    for sequence, part in enumerate(records):
        for slot, granule in enumerate(part):
            at -= granule.numel()
            space[at : at + granule.numel()] = granule.flatten()
            offsets[sequence, slot] = at
    return space, offsets


@pytest.mark.parametrize(("depth", "rule"), [((1, 1), None), ((4, 1), reference.Selection(0.05, 1, True))])
def test_lanes_of_a_ragged_batch(depth, rule):
    """Five granules and one in two lanes, a sink page, an open end, free slots; offsets beyond 2^31."""
    torch.manual_seed(11)
    pages, lanes, spans = Pages(64, 128, depth, depth), 2, torch.tensor([[1, 18], [0, 3]])
    records = [pages.random(5), pages.random(1)]
    q = [queries(64, 1, 3), queries(64, 1, 3)]
    base, offsets = spread(records, slots=6)
    table = triton.Table(base, offsets, triton.lane_bounds(spans, lanes, 4))
    each = [triton.quantize_query(part, signs("K", 64)) for part in q]
    query = triton.Query(*(torch.stack(parts) for parts in zip(*each, strict=True)))
    m, l, o, refined = triton.attend_lanes(layout(pages), query, table, refinement(pages, rule))
    count = 0
    for sequence, part in enumerate(records):
        page = torch.arange(len(part) * 4).view(-1, 4)
        valid = (page >= spans[sequence, 0]) & (page < spans[sequence, 1])
        expected = wanted(pages, q[sequence], part, valid, rule)
        count += 0 if rule is None else int(expected.refined.any(3).sum())
        own = Partial(*expected[:3])
        folded = [fold([own.rows(granule) for granule in range(lane, len(part), lanes)]) for lane in range(lanes)]
        for lane in range(lanes):
            assert_same_attention((m[sequence, lane], l[sequence, lane], o[sequence, lane]), folded[lane])
    assert refined == count


def fold(parts: list[Partial]) -> Partial:
    whole = empty((KV_HEADS, 1, 3), 64)
    for part in parts:
        whole = merge(whole, part)
    return whole


def test_bounds_of_lanes_count_every_page_once():
    for pages in (4, 8):
        for lanes in (1, 3, 256):
            spans = torch.tensor([[0, 0], [1, 1], [1, 2], [3, 3 * pages + 1], [pages, 40 * pages], [2 * pages + 1, 777]])
            bounds = triton.lane_bounds(spans, lanes, pages)
            for (first, end), per_lane in zip(spans.tolist(), bounds.tolist(), strict=True):
                seen = sorted(
                    (lane + turn // pages * lanes) * pages + turn % pages
                    for lane, (begin, stop) in enumerate(per_lane)
                    for turn in range(begin, stop)
                )
                assert seen == list(range(first, end))


# ---------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("dim", DIMS)
def test_exact_rows(dim):
    torch.manual_seed(dim)
    for case, count in enumerate((0, 1, 31, 33, 127, 200)):
        group = GROUPS[case % 5]
        q, rows = queries(dim, 1, group), torch.randn(2, KV_HEADS, 200, dim + 3)[..., :dim].half()
        rows[:, :, count:] = float("nan")
        found = triton.attend_exact(q, rows, torch.tensor(count))
        k, v = rows[:, :, :count].float().unsqueeze(1)
        expected = reference.attend_dense(q, k, v, None)
        assert_same_attention(found, [part[0] for part in expected], output=1e-5)
