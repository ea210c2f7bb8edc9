"""Scan, select and refine of tiered caches, in Triton's interpreter, against the reference."""

import pytest
import torch
from cpu_pages import KV_HEADS, Pages, queries, signs

pytest.importorskip("triton")

from triton_pages import assert_same_attention, layout, poison, refinement, wanted

from bitkv_dist.kernels import reference, triton
from bitkv_dist.kernels.triton.scan import scan
from bitkv_dist.kernels.triton.select import select
from bitkv_dist.kernels.triton.tables import INTERPRETER

DIMS = (64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_scan_finds_the_integers_of_the_reference(dim):
    for case, (bits, group) in enumerate(((1, 3), (2, 8), (1, 1))):
        torch.manual_seed(dim + case)
        tokens = (64, 128)[(case + dim // 16) % 2]
        pages = Pages(dim, tokens, (4, bits), (4, bits))
        records, q, told = pages.random(1), queries(dim, 1, group), layout(pages)
        query = triton.quantize_query(q, signs("K", dim))
        dots = torch.full((1, KV_HEADS, 1, group, 512), 99, dtype=torch.int16 if bits == 1 else torch.int32)
        bases = torch.full((1, KV_HEADS, 1, group, told.pages), float("nan"))
        bounds = torch.tensor([[[1, told.pages]]], dtype=torch.int32)
        padded = 1 << (group - 1).bit_length()
        at_once = min(4, padded)
        scan[(1, KV_HEADS, padded // at_once)](
            records, torch.zeros(1, 1, dtype=torch.int64), bounds, dots, bases, query.codes, query.rotated,
            1, 1, KV_HEADS, group,
            D=dim, P=tokens, RECORD=told.record_bytes, KEY_BITS=bits, KEY_PLANES=told.planes[0], KEY_CENTROID=told.centroid[0],
            GROUP=at_once, PARTS=padded // at_once, COLS=8, ASSEMBLY=INTERPRETER.assembly,
        )  # fmt: skip
        keys = pages.load(records, "K")
        levels = reference.levels(keys, "K", 0).transpose(1, 2).flatten(2, 3)
        integers = reference.score_integers(query.codes.float(), levels)
        assert torch.equal(dots[..., tokens:].float(), integers[..., tokens:])
        assert (dots[..., :tokens] == 99).all(), "the first page is not sealed"
        centroids = reference.centroid_scores(reference.quantize_query(q, signs("K", dim)), keys.centroid.float())
        torch.testing.assert_close(bases[..., 1:], centroids[..., 1:], atol=2e-5, rtol=1e-6)


def selected(scores: torch.Tensor, group: bool, count: int, first_page: int = 0) -> tuple[torch.Tensor, ...]:
    """Integer scores int16 [G, 512] -> (listed tokens [R, LIST], their scores [G, LIST], scores that are left [G, 512])."""
    heads, room = len(scores), max(32, 1 << max(0, count - 1).bit_length())
    records = torch.full((4 * 256,), 0, dtype=torch.uint8)
    records.view(torch.float16).fill_(1.0)  # every scale
    dots = scores.clone()
    lists = 1 if group else heads
    tokens = torch.full((lists, room), 99, dtype=torch.int32)
    tops = torch.full((heads, room), 99, dtype=torch.int32)
    padded = 1 << (heads - 1).bit_length()
    ones, zeros = torch.ones(heads), torch.zeros(heads)
    bounds = torch.tensor([[[first_page, 4]]], dtype=torch.int32)
    select[(1, 1, 1)](
        records, torch.zeros(1, 1, dtype=torch.int64), bounds, dots, torch.zeros(heads, 4), ones, zeros,
        torch.full((5,), count, dtype=torch.int32), tokens, tops, 1, 1, 1, heads, 0.0,
        P=128, RECORD=256, KEY_BITS=1, KEY_SCAN=0, GROUP=padded, LISTS=1 if group else padded, LIST=room,
        ASSEMBLY=INTERPRETER.assembly,
    )  # fmt: skip
    return tokens, tops, dots


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_select_takes_the_tokens_of_the_reference(heads, group):
    """Integer scores within a narrow range: many ties, which go to the lower position."""
    torch.manual_seed(heads)
    for case, count in enumerate((0, 1, 26, 103, 384)):
        scores = torch.randint(-9, 9, (heads, 512), dtype=torch.int16)
        first = 128 * (case % 2)
        seen = scores.float()
        seen[:, :first] = float("-inf")
        rule = reference.Selection(0.0, count, group)
        mask = reference.select(seen[None, None, None], torch.tensor([512 - first]), rule)[0, 0, 0]
        tokens, tops, left = selected(scores, group, min(count, 512 - first), case % 2)
        for head in range(heads):
            listed = tokens[0 if group else head]
            positions = mask[head].nonzero().flatten()
            assert torch.equal(listed[: len(positions)].long(), positions) and (listed[len(positions) :] == -1).all()
            assert torch.equal(tops[head, : len(positions)].short(), scores[head, positions])
            assert torch.equal(left[head], torch.where(mask[head], -(1 << 15), scores[head]))


CHOICES = [
    reference.Selection(*choice)
    for choice in ((0.05, 1, True), (0.05, 1, False), (0.001, 7, True), (1.0, 0, False), (0.0, 0, True))
]
STORED = (((4, 1), (4, 1)), ((2, 1), (2, 1)), ((4, 2), (4, 2)), ((8, 4), (8, 4)), ((1, 1), (4, 1)))


@pytest.mark.parametrize("dim", DIMS)
def test_tiers_agree_with_the_reference(dim):
    """Every choice and depth, groups of every size, pages that are not sealed."""
    for case in range(2):
        turn = case + 2 * (dim // 16)
        torch.manual_seed(turn)
        (keys, values), rule = STORED[turn % 5], CHOICES[(turn // 2 + case) % 5]
        tokens, group = (64, 128)[turn % 2], (11, 4, 1, 3)[(case + dim // 16) % 4]
        pages = Pages(dim, tokens, keys, values)
        valid = torch.ones(1, 512 // tokens, dtype=torch.bool)
        valid[0, 0] = valid[0, -1] = False
        records, q = pages.random(1), queries(dim, 1 + (turn % 5 == 0), group)
        query = triton.quantize_query(q, signs("K", dim))
        *found, refined = triton.attend(layout(pages), query, poison(records, valid), valid, refinement(pages, rule))
        expected = wanted(pages, q, records, valid, rule)
        assert int(refined) == int(expected.refined.any(3).sum()), (turn, rule)
        assert_same_attention(found, expected)


def test_keys_alone_are_refined():
    """Then the reference normalises the weights of refined tokens together with the others', the kernels apart."""
    torch.manual_seed(1)
    pages = Pages(64, 128, (4, 1), (1, 1))
    records, q, valid = pages.random(1), queries(64, 1, 4), torch.ones(1, 4, dtype=torch.bool)
    query = triton.quantize_query(q, signs("K", 64))
    *found, _ = triton.attend(layout(pages), query, records, valid, refinement(pages, CHOICES[0]))
    assert_same_attention(found, wanted(pages, q, records, valid, CHOICES[0]), output=0.02)
