"""The Triton encoder, in Triton's interpreter: the bytes of the reference."""

import importlib
import itertools

import pytest
import torch
from cpu_pages import KINDS, KV_HEADS, Pages, signs

pytest.importorskip("triton")

encoder = importlib.import_module("bitkv_dist.kernels.triton.encode")  # the package exports a function of that name

DIMS = (64, 80, 96, 128, 192, 256)
DEPTHS = [(bits, scan) for bits in (1, 2, 3, 4) for scan in range(1, bits + 1)]
WHOLE_PAGE = 1 << 15  # elements: the interpreter has no registers to run out of, and each tile costs it the same

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    monkeypatch.setattr(encoder, "TILE_ELEMENTS", WHOLE_PAGE)


def pages_of(kinds: list[str], tokens: int, dim: int) -> torch.Tensor:
    """k and v fp32 [2, kinds, HK, P, D]."""
    torch.manual_seed(dim + tokens)
    x = torch.randn(2, len(kinds), KV_HEADS, tokens, dim)
    for page, kind in enumerate(kinds):
        x[:, page] = KINDS[kind](x[:, page])
    return x


def encode_wrongly(
    kinds: list[str], dim: int, tokens: int, keys: tuple[int, int], values: tuple[int, int], unbiased: bool
) -> set[str]:
    """The kinds of pages whose bytes differ from the reference's."""
    pages = Pages(dim, tokens, keys, values)
    k, v = pages_of(kinds, tokens, dim)
    found = encoder.encode(pages.layout, k, v, signs("K", dim), signs("V", dim), unbiased)
    wanted = pages.encode(k, v, unbiased)
    return {kind for kind, same in zip(kinds, (found == wanted).flatten(1).all(1), strict=True) if not same}


@pytest.mark.parametrize("dim", DIMS)
def test_encode_gives_the_bytes_of_the_reference(dim):
    """Every depth, each with another kind of page."""
    kinds = list(KINDS)
    for case, depth in enumerate(DEPTHS):
        tokens = (64, 128)[(case + dim // 16) % 2]
        kind = kinds[(case + dim // 16) % len(kinds)]
        assert not encode_wrongly([kind], dim, tokens, depth, depth, case % 3 == 1), (depth, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("dim", (16, 112, *DIMS))
def test_encode_gives_the_bytes_of_the_reference_in_every_combination(dim):
    for tokens, depth, unbiased in itertools.product((64, 128), [*DEPTHS, (8, 1), (8, 3), (8, 8)], (False, True)):
        assert not encode_wrongly(list(KINDS), dim, tokens, depth, depth, unbiased), (tokens, depth, unbiased)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("dim", "tokens"), [(64, 128), pytest.param(80, 128, marks=SLOW), pytest.param(256, 64, marks=SLOW)])
def test_pages_in_tiles_of_the_size_that_a_gpu_takes(dim, tokens, monkeypatch):
    """The tile of a program changes neither the words that it puts together nor the sums over the page."""
    for elements in (4096, 2048):
        monkeypatch.setattr(encoder, "TILE_ELEMENTS", elements)
        assert not encode_wrongly(["outliers"], dim, tokens, (4, 1), (2, 1), False)


def test_keys_and_values_of_different_depths():
    for keys, values in (((4, 2), (2, 2)), ((3, 1), (1, 1)), ((1, 1), (4, 1)), ((8, 3), (1, 1))):
        assert not encode_wrongly(["normal"], 80, 64, keys, values, False), (keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_encode_of_views_in_the_types_of_models(dtype):
    """Rows of the window as the cache cuts pages out of it; rows that start at odd addresses; no pages."""
    torch.manual_seed(0)
    pages = Pages(80, 64, (4, 1), (2, 1))
    window = torch.randn(2, KV_HEADS, 200, 80).to(dtype)
    k, v = window[:, :, 7:135].unflatten(2, (2, 64)).transpose(1, 2)
    wide = torch.randn(2, 64, KV_HEADS, 83).to(dtype).transpose(1, 2)[..., 1:81]
    for keys, values in ((k, v), (wide, v)):
        found = encoder.encode(pages.layout, keys, values, signs("K", 80), signs("V", 80), False)
        assert torch.equal(found, pages.encode(keys.float(), values.float()))
    nothing = encoder.encode(pages.layout, k[:0], v[:0], signs("K", 80), signs("V", 80), False)
    assert nothing.shape == (0, KV_HEADS, pages.record.bytes)
