"""The C++ kernels against their plain-torch twins, for every instruction set that this machine has."""

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bitkv_dist import partial
from bitkv_dist.codec.planes import NOISE, page_layout
from bitkv_dist.config import CacheConfig
from bitkv_dist.kernels import cpu, reference
from bitkv_dist.rotation import layer_signs

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())

DIMS = (16, 64, 80, 96, 112, 128, 192, 256)  # C20
DEPTHS = [(bits, scan) for bits in (1, 2, 3, 4, 8) for scan in range(1, bits + 1)]
KV_HEADS = 2
KINDS = {
    "normal": lambda x: x,
    "outliers": lambda x: torch.where(torch.rand_like(x) < 0.02, 60 * x, x) + 200 * (torch.arange(x.shape[-1]) % 32 == 3),
    "constant": lambda x: torch.full_like(x, 2.0),
    "rows": lambda x: x[..., :1].expand_as(x),
    "one ulp off": lambda x: torch.full_like(x, 2.0).index_fill_(-1, torch.tensor([5]), 2.0 + 2**-22),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x.sign() * 40_000,
    "overflowing": lambda x: x * 1e20,
    "spread": lambda x: x * torch.logspace(-9, 6, x.shape[-2])[:, None],
    "some rows zero": lambda x: torch.where(torch.arange(x.shape[-2])[:, None] % 3 == 0, 0.0, x),
}


@pytest.fixture(params=cpu.ISAS, autouse=True)
def isa(request, monkeypatch):
    """Selects the instruction set; what a kernel is given to write into holds NaN."""
    try:
        cpu.choose(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: (found := allocate(*shape, **kind)).fill_(math.nan if found.is_floating_point() else 99))
    yield request.param
    cpu.choose(None)


@functools.cache
def signs(side: str, dim: int) -> torch.Tensor:
    return layer_signs(7, 3, 0, KV_HEADS, side, dim)


class Pages:
    """One shape of page records: how the kernels are told of it, and how the reference writes and reads it."""

    def __init__(self, dim: int, tokens: int, keys: tuple[int, int], values: tuple[int, int]) -> None:
        self.dim, self.tokens, self.depth = dim, tokens, {"K": keys, "V": values}
        scanned = max(keys[1], values[1])
        self.record = page_layout(CacheConfig(key_bits=keys[0], value_bits=values[0], scan_bits=scanned, page_tokens=tokens), dim)
        offsets = {name: field.offset for name, field in self.record.fields.items()}
        pairs = {name: tuple(offsets.get(side + name, 0) for side in "KV") for name in ("planes", "scan", "full", "low", "centroid")}
        bits, scan_bits = zip(keys, values, strict=True)
        self.layout = cpu.Layout(tokens, dim, KV_HEADS, 512 // tokens, self.record.bytes, bits=bits, scan_bits=scan_bits, **pairs)

    def encode(self, k: torch.Tensor, v: torch.Tensor, unbiased: bool = False) -> torch.Tensor:
        records = torch.zeros(*k.shape[:2], self.record.bytes, dtype=torch.uint8)
        for side, x in (("K", k), ("V", v)):
            plane = reference.encode(x, signs(side, self.dim), *self.depth[side], side, unbiased and side == "K")
            arrays = {side + name: part for name, part in plane._asdict().items() if side + name in self.record.fields}
            self.record.write(records, **arrays)
        return records

    def load(self, records: torch.Tensor, side: str) -> reference.Plane:
        found = {name: self.record.view(records, side + name) for name in reference.Plane._fields if side + name in self.record.fields}
        return reference.Plane(**{"low": records[..., None, :0], "full": found["scan"]} | found)

    def random(self, granules: int) -> torch.Tensor:
        """Records of random granules [n, pages, HK, bytes]; keys have a mean, so that centroids count."""
        k = torch.randn(granules * self.layout.pages, KV_HEADS, self.tokens, self.dim) + 2 * torch.randn(1, KV_HEADS, 1, self.dim)
        v = torch.randn_like(k)
        v[0, 0, 3], k[1, 1, 5] = 0.0, 2.0
        return self.encode(k, v).unflatten(0, (granules, -1)).contiguous()

    def noise(self) -> tuple[float, float]:
        bits, scan_bits = self.depth["K"]
        return 0.5 * math.log(2) * NOISE[scan_bits, bits], 0.5 * math.log(2) * NOISE[bits, bits]


def queries(dim: int, positions: int, group: int) -> torch.Tensor:
    return torch.randn(KV_HEADS, positions, group, dim) * 4.8 / math.sqrt(dim)


def both(pages: Pages, q: torch.Tensor, records: torch.Tensor, valid: torch.Tensor, rule: reference.Selection | None):
    """(reference.Attended, what cpu.attend returns) for the same records; in pages that are not valid ours finds ones: NaN in halves."""
    query = reference.quantize_query(q, signs("K", pages.dim))
    low = [bits - scan_bits for bits, scan_bits in pages.depth.values()]
    wanted = reference.attend(query, pages.load(records, "K"), pages.load(records, "V"), valid, *low, NOISE, rule)
    refinement = cpu.Refinement(rule is not None, *((rule.group, rule.min_tokens, rule.value) if rule else (0, 0, 0.0)), *pages.noise())
    poisoned = torch.where(valid[:, :, None, None], records, 255)
    return wanted, cpu.attend(pages.layout, cpu.quantize_query(q, signs("K", pages.dim)), poisoned, valid, refinement)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


# -------------------------------------------------------------------------------------------------------- encode


@functools.cache
def encoded(dim: int, tokens: int, bits: int, scan_bits: int, unbiased: bool) -> tuple[Pages, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(dim + bits)
    x = torch.randn(2, len(KINDS), KV_HEADS, tokens, dim)
    for page, change in enumerate(KINDS.values()):
        x[:, page] = change(x[:, page])
    pages = Pages(dim, tokens, (bits, scan_bits), (bits, scan_bits))
    return pages, *x, pages.encode(*x, unbiased)


def encode_wrongly(dim: int, tokens: int, bits: int, scan_bits: int, unbiased: bool) -> set[str]:
    """The kinds of pages whose bytes differ from the reference's."""
    pages, k, v, wanted = encoded(dim, tokens, bits, scan_bits, unbiased)
    found = cpu.encode(pages.layout, k, v, signs("K", dim), signs("V", dim), unbiased)
    return {kind for kind, same in zip(KINDS, (found == wanted).flatten(1).all(1), strict=True) if not same}


@pytest.mark.parametrize("dim", DIMS)
def test_encode_gives_the_bytes_of_the_reference(dim):
    for case, depth in enumerate(DEPTHS):
        if depth[0] < 8 or depth[1] in (1, 3, 8):
            assert not encode_wrongly(dim, (64, 128)[(case + dim // 16) % 2], *depth, case % 3 == 1), depth


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_encode_gives_the_bytes_of_the_reference_in_every_combination(dim):
    for tokens, depth, unbiased in itertools.product((64, 128), DEPTHS, (False, True)):
        assert not encode_wrongly(dim, tokens, *depth, unbiased), (tokens, depth, unbiased)


def test_encode_of_views_and_of_no_pages():
    torch.manual_seed(0)
    pages = Pages(80, 64, (4, 1), (2, 1))
    wide = torch.randn(2, 64, KV_HEADS, 83).transpose(1, 2)[..., 1:81]  # rows start at odd addresses
    found = cpu.encode(pages.layout, wide, wide, signs("K", 80), signs("V", 80), False)
    assert torch.equal(found, pages.encode(wide, wide))
    assert cpu.encode(pages.layout, wide[:0], wide[:0], signs("K", 80), signs("V", 80), False).shape == (0, KV_HEADS, pages.record.bytes)


# ------------------------------------------------------------------------------------------------------- integers


def call(name: str, *arguments) -> None:
    """A C function of the library: tensors are passed as addresses, numbers as int64."""
    getattr(cpu.load(), name)(*(cpu._pointer(a) if isinstance(a, torch.Tensor) else cpu._sizes(a)[0] for a in arguments))


@pytest.mark.parametrize("width", [2, 8, 10, 12, 14, 16, 24, 32])
def test_plane_dot_is_the_integer_sum(width):
    """Over words with the top bit set too (C07), rows of zeros, addresses that are not aligned."""
    torch.manual_seed(width)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9):
        height = 2 * rows + (66 if rows == 9 else 0)
        memory = torch.randint(0, 256, (height * width * 4 + 1,), dtype=torch.uint8)
        memory[-9:] = 255
        words = memory[1:]
        operands = torch.randint(-127, 128, (rows, 4 * height + 3), dtype=torch.int8)[:, 1:]
        operands[:, 4:8] = 0
        out = torch.empty(rows, 8 * width + 1, dtype=torch.int32)
        call("bitkv_plane_dot", words, height, width, operands, operands.stride(0), rows, out, out.stride(0))
        bits = (words.view(height, width, 4, 1) >> torch.arange(8)) & 1  # [k, i, b, j]
        wanted = torch.einsum("rkb,kibj->rji", operands[:, : 4 * height].reshape(rows, height, 4).double(), bits.double()).flatten(1)
        assert torch.equal(out[:, :-1].double(), wanted)
        assert (out[:, -1] == 99).all()


@pytest.mark.parametrize("dim", DIMS)
def test_query_codes_are_those_of_the_reference(dim):
    torch.manual_seed(dim)
    q = queries(dim, 3, 4)
    q[0, 0, 0], q[1, 1, 1], q[0, 2, 3] = 0.0, 1e-30, 1e18
    wanted, found = reference.quantize_query(q, signs("K", dim)), cpu.quantize_query(q, signs("K", dim))
    for name in cpu.Query._fields:
        assert torch.equal(getattr(found, name).float(), getattr(wanted, name)), name


# ------------------------------------------------------------------------------------------------------ selection


def selected(scores: torch.Tensor, group: bool, count: int) -> torch.Tensor:
    """scores [G, T] -> mask of the refined tokens."""
    positions = torch.empty(1 if group or len(scores) == 1 else len(scores), count, dtype=torch.int32)
    call("bitkv_select", *scores.shape, scores, group, count, positions)
    assert torch.equal(positions, positions.sort(-1).values)
    return torch.zeros(len(positions), scores.shape[1], dtype=torch.bool).scatter_(1, positions.long(), True).expand(scores.shape)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_select_takes_the_tokens_of_the_reference(heads, group):
    torch.manual_seed(heads)
    for total in (64, 128, 192, 512):
        for count in (0, 1, 3, total // 20, total - 1, total):
            scores = 5 * torch.randn(heads, total) + torch.randn(heads, 1)
            rule = reference.Selection(0.0, count, group)
            wanted = reference.select(scores[None, None, None], torch.tensor([total]), rule)[0, 0, 0]
            assert torch.equal(selected(scores, group, count), wanted), (total, count)


def test_select_gives_ties_to_the_lower_position():
    scores = torch.zeros(1, 128)
    scores[0, ::2] = -0.0  # both zeros are one value
    assert selected(scores, False, 5)[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    scores[0, 100] = 1.0
    assert selected(scores, True, 3)[0].nonzero().flatten().tolist() == [0, 1, 100]
    scores = torch.tensor([[-1e30, -3.0, -2.0, -2.0, 7.0] + [-5.0] * 59])
    assert selected(scores, False, 2)[0].nonzero().flatten().tolist() == [2, 4]


# -------------------------------------------------------------------------------------------------------- attend

RULES = [reference.Selection(0.05, 1, True), reference.Selection(0.05, 1, False), reference.Selection(0.001, 7, True), reference.Selection(1.0, 0, False),
         reference.Selection(0.0, 0, True)]  # fmt: skip
STORED = [((1, 1), (1, 1)), ((2, 2), (2, 2)), ((3, 3), (3, 3)), ((4, 4), (4, 4)), ((8, 8), (8, 8)), ((2, 1), (2, 1)), ((4, 1), (4, 1)), ((4, 2), (4, 2)),
          ((8, 3), (8, 3)), ((4, 2), (2, 2)), ((3, 1), (1, 1)), ((1, 1), (4, 1)), ((8, 1), (8, 1))]  # fmt: skip


@pytest.mark.parametrize("dim", DIMS)
def test_attend_agrees_with_the_reference(dim):
    """Granules that are full, empty, partly valid; three queries at once; groups of every size."""
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[0, 0], valid[1], valid[2, 3:] = False, False, False
    for case, (keys, values) in enumerate(STORED):
        torch.manual_seed(case + dim)
        pages = Pages(dim, (64, 128)[(case + dim // 16) % 2], keys, values)
        records, q = pages.random(3), queries(dim, 3, (1, 3, 4, 7, 8)[(case + dim // 16) % 5])
        refines = keys[0] > keys[1] or values[0] > values[1]
        for rule in RULES if refines else [None]:
            shape = valid[:, : pages.layout.pages]
            wanted, (m, l, o, refined) = both(pages, q, records, shape, rule)
            where = (keys, values, rule)
            assert torch.equal(m[1], wanted.m[1]) and not l[1].any() and not o[1].any(), where
            torch.testing.assert_close(m, wanted.m, atol=1e-5, rtol=0, msg=str(where))
            assert relative(l, wanted.l) < 1e-5, where
            for granule in (0, 2):
                assert relative(o[granule], wanted.o[granule]) < 2e-4, where
            assert refined == (0 if wanted.refined is None else int(wanted.refined.any(3).sum())), where


def test_attend_to_nothing_and_to_zeros():
    pages = Pages(64, 128, (4, 1), (4, 1))
    records = pages.encode(torch.zeros(4, KV_HEADS, 128, 64), torch.zeros(4, KV_HEADS, 128, 64)).unflatten(0, (1, 4))
    _, (m, l, o, _) = both(pages, torch.zeros(KV_HEADS, 1, 3, 64), records, torch.ones(1, 4, dtype=torch.bool), RULES[0])
    assert not m.any() and (l == 512).all() and not o.any()
    query, refinement = cpu.quantize_query(queries(64, 1, 3), signs("K", 64)), cpu.Refinement(0, 0, 0, 0.0, 0.0, 0.0)
    m, _, o, refined = cpu.attend(pages.layout, query, records[:0], torch.ones(0, 4, dtype=torch.bool), refinement)
    assert m.shape == (0, KV_HEADS, 1, 3) and o.shape == (0, KV_HEADS, 1, 3, 64) and refined == 0


def test_records_need_not_be_aligned():
    torch.manual_seed(1)
    pages = Pages(80, 64, (4, 1), (4, 1))
    records, valid = pages.random(2), torch.ones(2, 8, dtype=torch.bool)
    query, refinement = cpu.quantize_query(queries(80, 1, 3), signs("K", 80)), cpu.Refinement(1, 1, 1, 0.05, *pages.noise())
    shifted = torch.zeros(records.numel() + 1, dtype=torch.uint8)[1:].view_as(records).copy_(records)
    for found, wanted in zip(cpu.attend(pages.layout, query, shifted, valid, refinement), cpu.attend(pages.layout, query, records, valid, refinement), strict=True):
        assert found == wanted if isinstance(found, int) else torch.equal(found, wanted)


def twin_error(pages: Pages, q: torch.Tensor, records: torch.Tensor, rule: reference.Selection | None) -> float:
    """Relative output error of integer weights: o of cpu.attend against the same sum with fp32 weights."""
    valid = torch.ones(records.shape[:2], dtype=torch.bool)
    wanted, (_, _, o, _) = both(pages, q, records, valid, rule)
    query, keys, values = reference.quantize_query(q, signs("K", pages.dim)), pages.load(records, "K"), pages.load(records, "V")
    low = {side: bits - scan_bits for side, (bits, scan_bits) in pages.depth.items()}

    def scores(low_bits: int) -> torch.Tensor:
        depth = pages.depth["K"][1] + low_bits, pages.depth["K"][0]
        return reference.key_scores(query, keys, valid, low_bits, NOISE[depth])

    def rows(low_bits: int) -> torch.Tensor:
        scale = (values.full if low_bits else values.scan).float() * reference.level_unit(pages.depth["V"][1] + low_bits)
        found = reference.levels(values, "V", low_bits) * scale.unsqueeze(-1) + values.centroid.float().unsqueeze(-2)
        return found.transpose(1, 2).flatten(2, 3).unsqueeze(2)  # [n, HK, 1, T, D]

    if rule is None:
        exact = (scores(0) - wanted.m.unsqueeze(-1)).exp2() @ rows(0)
    else:
        p = (torch.where(wanted.refined, scores(low["K"]), scores(0)) - wanted.m.unsqueeze(-1)).exp2()
        exact = p.masked_fill(wanted.refined, 0.0) @ rows(0) + p.masked_fill(~wanted.refined, 0.0) @ rows(low["V"])
    return relative(o, exact)


@pytest.mark.parametrize(("depth", "rule"), [((1, 1), None), ((2, 2), None), ((4, 4), None), ((4, 1), RULES[0])])
def test_integer_weights_cost_less_than_one_percent(depth, rule):
    torch.manual_seed(5)
    for dim in (64, 128):
        pages = Pages(dim, 128, depth, depth)
        error = twin_error(pages, queries(dim, 2, 4), pages.random(4), rule)
        assert 1e-6 < error < 0.01, error


@pytest.mark.slow
def test_integer_weights_cost_less_than_half_a_percent_of_a_real_model(isa):
    if isa != cpu.choose(None):
        pytest.skip("the weights are the same integers in every instruction set")
    from bitkv_dist.evaluate.trace import traces
    from bitkv_dist.model import load

    served = load("smollm2-135m")
    ids = torch.randint(100, 40_000, (1024,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        for trace in traces(served, ids):
            if trace.layer % 6:
                continue
            q = trace.q[:2, :, -4:].float().transpose(1, 2) * trace.scaling * math.log2(math.e)
            k, v = (x[:2].float().unflatten(1, (8, 128)).transpose(0, 1) for x in (trace.k, trace.v))
            for depth, rule in (((1, 1), None), ((4, 1), RULES[0])):
                pages = Pages(64, 128, depth, depth)
                assert twin_error(pages, q.contiguous(), pages.encode(k, v).unflatten(0, (2, 4)), rule) < 0.005, (trace.layer, depth)
