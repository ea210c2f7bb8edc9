"""The C++ kernels against their plain-torch twins, for every instruction set that this machine has."""

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from cpu_pages import KINDS, KV_HEADS, Pages, both, isa, queries, relative, signs  # noqa: F401

from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes import NOISE
from bitkv_dist.kernels import cpu, reference
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import Partial, merge

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())

DIMS = (16, 64, 80, 96, 112, 128, 192, 256)  # C20
DEPTHS = [(bits, scan) for bits in (1, 2, 3, 4, 8) for scan in range(1, bits + 1)]


# -------------------------------------------------------------------------------------------------------- encode


@functools.cache
def encoded(
    dim: int, tokens: int, bits: int, scan_bits: int, unbiased: bool
) -> tuple[Pages, torch.Tensor, torch.Tensor, torch.Tensor]:
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
    assert cpu.encode(pages.layout, wide[:0], wide[:0], signs("K", 80), signs("V", 80), False).shape == (
        0,
        KV_HEADS,
        pages.record.bytes,
    )


# ------------------------------------------------------------------------------------------------------- integers


def call(name: str, *arguments) -> None:
    """A C function of the library: tensors are passed as addresses, numbers as int64."""
    getattr(cpu.load(), name)(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


OPERANDS = {
    "any": lambda *shape: torch.randint(-127, 128, shape),
    "large": lambda *shape: torch.randint(0, 2, shape) * 254 - 127,  # four of them exceed a byte
    "weights": lambda *shape: torch.randint(0, 128, shape),
    "few": lambda *shape: torch.randint(0, 128, shape) * (torch.rand(shape) < 0.03),
}


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize("width", [2, 8, 10, 12, 14, 16, 24, 32, 64])
def test_level_dot_is_the_integer_sum(width, kind):
    """Over words with the top bit set too (C07), operands of zeros, addresses that are not aligned."""
    torch.manual_seed(width)
    for rows, planes, height in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4), (2, 6, 16, 20, 32, 128)):
        memory = torch.randint(0, 256, (planes * height * width * 4 + 1,), dtype=torch.uint8)
        memory[-9:] = 255
        words = memory[1:]
        operands = OPERANDS[kind](rows, 4 * height + 3).to(torch.int8)[:, 1:]
        operands[:, 4:8] = 0
        out = torch.empty(rows, 8 * width + 1, dtype=torch.int32)
        call("bitkv_level_dot", words, planes, height, width, operands, operands.stride(0), rows, out, out.stride(0))
        bits = (words.view(planes, height, width, 4, 1) >> torch.arange(8)) & 1  # [s, k, i, b, j]
        powers = 2 ** torch.arange(planes - 1, -1, -1)
        level = 2 * torch.einsum("s,skibj->kibj", powers.double(), bits.double()) - (2**planes - 1)
        wanted = torch.einsum("rkb,kibj->rji", operands[:, : 4 * height].reshape(rows, height, 4).double(), level).flatten(1)
        assert torch.equal(out[:, :-1].double(), wanted), (rows, planes, height)
        assert (out[:, -1] == 99).all()


def test_level_dot_over_strides_of_70_000():
    torch.manual_seed(0)
    words = torch.randint(0, 256, (20 * 16 * 4,), dtype=torch.uint8)
    operands = torch.randint(-127, 128, (5, 70_001), dtype=torch.int8)
    out, near = torch.empty(5, 70_003, dtype=torch.int32), torch.empty(5, 128, dtype=torch.int32)
    call("bitkv_level_dot", words, 1, 20, 16, operands, operands.stride(0), 5, out, out.stride(0))
    call("bitkv_level_dot", words, 1, 20, 16, operands[:, :80].contiguous(), 80, 5, near, 128)
    assert torch.equal(out[:, :128], near) and (out[:, 128:] == 99).all()


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
    return (
        torch.zeros(len(positions), scores.shape[1], dtype=torch.bool).scatter_(1, positions.long(), True).expand(scores.shape)
    )


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

CHOICES = ((0.05, 1, True), (0.05, 1, False), (0.001, 7, True), (1.0, 0, False), (0.0, 0, True))
RULES = [reference.Selection(*choice) for choice in CHOICES]
STORED = [
    *(((bits, bits), (bits, bits)) for bits in (1, 2, 3, 4, 8)),
    *((depth, depth) for depth in ((2, 1), (4, 1), (4, 2), (8, 1), (8, 3))),
    *(((4, 2), (2, 2)), ((3, 1), (1, 1)), ((1, 1), (4, 1))),
]


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
            for granule in (0, 2):  # a weight between two integers may become the other one
                assert relative(o[granule], wanted.o[granule]) < 1e-3, where
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
    for found, wanted in zip(
        cpu.attend(pages.layout, query, shifted, valid, refinement),
        cpu.attend(pages.layout, query, records, valid, refinement),
        strict=True,
    ):
        assert found == wanted if isinstance(found, int) else torch.equal(found, wanted)


def twin_error(
    pages: Pages, q: torch.Tensor, records: torch.Tensor, rule: reference.Selection | None, window: Partial | None = None
) -> float:
    """Relative error that integer weights add to the attention output, against fp32 weights. window: the exact partial
    [HK, Q, G] of the first and the last page, which are then not sealed."""
    valid = torch.ones(records.shape[:2], dtype=torch.bool)
    if window is not None:
        valid[0, 0] = valid[-1, -1] = False
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
    def output(part: torch.Tensor) -> torch.Tensor:
        sealed = Partial(wanted.m, wanted.l, reference.rotate_back(part, signs("V", pages.dim)[:, None, None, :]))
        whole = functools.reduce(merge, [sealed.rows(granule) for granule in range(len(part))])
        return (whole if window is None else merge(whole, window)).normalised()

    return relative(output(o), output(exact))


@pytest.mark.parametrize(("depth", "rule"), [((1, 1), None), ((2, 2), None), ((4, 4), None), ((4, 1), RULES[0])])
def test_integer_weights_cost_less_than_one_percent(depth, rule):
    """Values with a mean half as large as their spread, scores that spread by 1.1 nats. Without a mean, outputs of
    random values nearly cancel, and the same absolute error is up to 2 %."""
    torch.manual_seed(5)
    for dim in (64, 128):
        pages = Pages(dim, 128, depth, depth)
        k, v = torch.randn(2, 16, KV_HEADS, 128, dim)
        q = queries(dim, 2, 4) / 3
        for mean, limit in ((0.5, 0.01), (0.0, 0.02)):
            records = pages.encode(k, v + mean * torch.randn(KV_HEADS, 1, dim)).unflatten(0, (4, 4))
            assert 1e-6 < twin_error(pages, q, records, rule) < limit


@pytest.mark.slow
def test_integer_weights_cost_less_than_half_a_percent_of_a_real_model(isa):  # noqa: F811
    if isa != cpu.choose(None):
        pytest.skip("the weights are the same integers in every instruction set")
    from bitkv_dist.evaluate.trace import trace
    from bitkv_dist.model import load
    from bitkv_dist.text import encode_prompt

    served = load("smollm2-135m", dtype=torch.float32, device=torch.device("cpu"))
    ids = encode_prompt(served.tokenizer, (Path(__file__).parents[1] / "configs/demo_prompt.txt").read_text())[:1024]
    errors = []

    def visit(found) -> None:
        if found.layer.index % 6:
            return
        q = found.q[:2, :, -4:].float().transpose(1, 2).contiguous() * found.scaling * math.log2(math.e)
        k, v = (x[:2, :1024].float().unflatten(1, (8, 128)).transpose(0, 1) for x in (found.k, found.v))
        exact = (torch.cat((x[0], x[-1]), 1)[None] for x in (k, v))
        window = Partial(*(part[0] for part in reference.attend_dense(q, *exact, None)))
        for depth, rule in (((1, 1), None), ((4, 1), RULES[0])):
            pages = Pages(64, 128, depth, depth)
            errors.append(twin_error(pages, q, pages.encode(k, v).unflatten(0, (2, 4)), rule, window))

    with torch.inference_mode():
        trace(served, CacheConfig(), ids, visit)
    assert len(errors) == 10 and max(errors) < 0.005, errors


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
@pytest.mark.parametrize(("key_bits", "value_bits", "refined"), [(1, 1, False), (4, 4, True), (4, 1, True)])
def test_what_is_not_finite_is_told(key_bits, value_bits, refined, spoilt):
    """And does not pass for an empty partial, whose rows would be zeros."""
    refine = {"scan_bits": 1, "refine": RefineConfig(value=0.05)} if refined else {}
    config = CacheConfig(key_bits=key_bits, value_bits=value_bits, **refine)
    codec = make_codec(config, HeadShape(1, 0, 2, 64, torch.float32), 0)
    k, v = torch.randn(2, 8, 2, 128, 64)
    records = codec.encode(k, v).view(2, 4, 2, -1)
    view, out = View([2], [0, 1], torch.ones(2, 4, dtype=torch.bool), 2, 1, (2, 3, 64)), torch.empty(1, 6, 64)
    q, exact = torch.randn(2, 1, 3, 64), torch.randn(2, 2, 5, 64)
    finite = []
    for query in (q, q.index_fill(2, torch.tensor([1]), spoilt)):
        alone, nodes, _ = codec.see(view, query, exact, [records])
        finite.append(codec.conclude(nodes.rows(0), alone, out))
    assert finite == [True, False]
