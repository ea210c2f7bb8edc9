"""The C++ kernels for pages of words against plain torch, for every instruction set that this machine has."""

import math
from collections.abc import Iterable
from pathlib import Path

import calibrations
import pytest
import torch
from cpu_pages import isa  # noqa: F401

from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.calibrated import VERSION, Origin
from bitkv_dist.codec.codebooks import save
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.rope import channel_pairs
from bitkv_dist.codec.words_cpu import TailoredCodecCpu, WordedCodecCpu
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.cpu.step import View
from bitkv_dist.partial import Partial

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.reason())

CLOSE = 3e-6  # relative difference that sums of floats in another order may make


@pytest.fixture(autouse=True)
def kernels(isa):  # noqa: F811
    with dispatch.forced(isa):
        yield


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def books(folder: Path, heads: int, dim: int, half: int | None = None, count: int = 1024, scaling: float = 1.0,
          centred: bool = False) -> str:  # fmt: skip
    """The path of a file of made-up books: octets of pairs in any order, of which RoPE turns the first `half`."""
    half, generator = dim // 2 if half is None else half, torch.Generator().manual_seed(dim + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, heads, *shape, generator=generator)

    pairs = channel_pairs(half, dim)
    tensors = {"inv_freq": 10000.0 ** -(torch.arange(half) / half), "K.lost": 0.05 * normal(dim).square()}
    for side in "KV":
        order = [pairs[torch.randperm(dim // 2, generator=generator)].flatten() for _ in range(heads)]
        tensors |= {
            f"{side}.words": (200 * normal(dim // 8, 1, count, 8)).round().clamp(-700, 700).to(torch.int16),
            f"{side}.unit": 0.003 * (1 + normal(dim // 8).square()),
            f"{side}.channels": torch.stack(order)[None].to(torch.int16),
            f"{side}.center": centred * normal(dim),
            f"{side}.weight": 0.7 + 0.3 * normal(dim).square(),
        }
    whole = "all KV heads"
    origin = Origin(VERSION, "tailored", "weighted", "made-up", "0" * 16, 1, heads, dim, scaling, whole, (), 0, 0, {}, "")
    path = folder / f"{heads}-{dim}-{half}-{count}-{centred}.safetensors"
    save(path, origin, tensors)
    return str(path)


def both(file: str, heads: int, dim: int, bits: int = 1, **fields):
    """The codec with kernels and that of plain torch."""
    config = CacheConfig("tailored", bits, bits, calibration=file, **{"page_tokens": 64, "sink_tokens": 64} | fields)
    shape = HeadShape(1, 0, heads, dim, torch.float32)
    with dispatch.forced("reference"):
        plain = make_codec(config, shape, 0)
    return make_codec(config, shape, 0), plain


def pages(codec, granules: int, seed: int = 0) -> torch.Tensor:
    """Records [granules, pages, HK, bytes] of random pages, far from the sequence's start, some scales and values 0."""
    heads, tokens, per_granule = codec.heads, codec.tokens, 512 // codec.tokens
    shape = (2, granules * per_granule, heads.kv_heads, tokens, heads.head_dim)
    k, v = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    k[0, :, 5], v[0, 0, 3] = 0.0, 0.0
    return codec.encode(k, v, range(777, 777 + len(k))).unflatten(0, (granules, per_granule)).contiguous()


def query(heads: int, group: int, dim: int, size: float = 4.0, count: int = 1) -> torch.Tensor:
    return torch.randn(heads, count, group, dim, generator=torch.Generator().manual_seed(group)) * size / math.sqrt(dim)


def mask(granules: int, per_granule: int) -> torch.Tensor:
    """Of granules whose first pages, last pages, or all but one are not sealed."""
    valid = torch.ones(granules, per_granule, dtype=torch.bool)
    valid[0, :2], valid[-1, 3:] = False, False
    valid[granules // 2, 1] = False
    return valid


def same(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def check(found: Partial, wanted: Partial) -> None:
    assert relative(found.m, wanted.m) < CLOSE
    for name in ("l", "o"):
        assert relative(getattr(found, name), getattr(wanted, name)) < 10 * CLOSE, name  # of exponentials of scores to 20


SHAPES = [(2, 3, 64), (1, 1, 32), (2, 4, 128), (3, 5, 80), (2, 8, 16), (2, 2, 24)]


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
def test_words_are_attended_to_as_in_plain_torch(tmp_path, heads, group, dim):
    file = books(tmp_path, heads, dim)
    for tokens, correction in ((64, True), (128, False)):
        codec, plain = both(file, heads, dim, page_tokens=tokens, sink_tokens=tokens, correction=correction)
        assert type(codec) is TailoredCodecCpu and codec.fused and codec.unserved is None and not plain.fused
        records, valid, q = pages(codec, 3), mask(3, 512 // tokens), query(heads, group, dim)
        assert torch.equal(records, pages(plain, 3))
        poisoned = torch.where(valid[:, :, None, None], records, 255)
        mass, wanted_mass = torch.empty(2, 3, heads, 1, group, 512 // tokens)
        found, reads = codec.attend(q, poisoned, valid, page_mass=mass)
        wanted, wanted_reads = plain.attend(q, records, valid, page_mass=wanted_mass)
        check(found, wanted)
        assert relative(mass, wanted_mass) < 10 * CLOSE and (mass[~valid[:, None, None, None].expand_as(mass)] == 0).all()
        assert reads == wanted_reads


@pytest.mark.parametrize("bits", [1, 3])
def test_other_books_are_served(tmp_path, bits):
    """Channels that RoPE leaves alone, a factor on what it turns, centres, fewer words."""
    file = books(tmp_path, 2, 48, half=8, count=256, scaling=1.3, centred=True)
    codec, plain = both(file, 2, 48, bits)
    assert codec.unserved is None
    records, valid, q = pages(codec, 2), mask(2, 8), query(2, 3, 48)
    check(codec.attend(q, records, valid)[0], plain.attend(q, records, valid)[0])


@pytest.mark.parametrize("granularity", ["group", "head"])
@pytest.mark.parametrize(("heads", "group", "dim", "bits", "tokens"), [
    (2, 3, 64, 4, 64), (2, 4, 128, 2, 128), (1, 1, 32, 3, 64), (3, 5, 80, 3, 128), (2, 2, 16, 4, 64)])  # fmt: skip
def test_chosen_tokens_take_their_planes_as_in_plain_torch(tmp_path, heads, group, dim, bits, tokens, granularity):
    file = books(tmp_path, heads, dim)
    for value, least in ((0.05, 1), (1.0, 0), (0.001, 7), (0.0, 0)):
        rule = RefineConfig(value=value, min_tokens=least, granularity=granularity)
        codec, plain = both(file, heads, dim, bits, page_tokens=tokens, sink_tokens=tokens, refine=rule)
        assert type(codec) is WordedCodecCpu and codec.fused and not plain.fused
        records, valid, q = pages(codec, 2), mask(2, 512 // tokens), query(heads, group, dim)
        poisoned = torch.where(valid[:, :, None, None], records, 255)
        found, reads = codec.attend(q, poisoned, valid)
        wanted, wanted_reads = plain.attend(q, records, valid)
        check(found, wanted)
        assert reads == wanted_reads, (value, least)


def test_nothing_sealed_and_no_granules(tmp_path):
    file = books(tmp_path, 2, 32)
    for bits in (1, 4):
        codec, _ = both(file, 2, 32, bits)
        records, q = pages(codec, 1), query(2, 3, 32)
        part, reads = codec.attend(q, records, torch.zeros(1, 8, dtype=torch.bool))
        assert torch.isneginf(part.m).all() and (part.l == 0).all() and (part.o == 0).all() and reads.bits == 0
        assert codec.attend(q, records[:0], torch.ones(0, 8, dtype=torch.bool))[0].o.shape == (0, 2, 1, 3, 32)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_step_has_the_bits_of_its_granules_merged(tmp_path, threads, bits):
    """Whatever the threads, the tree's nodes and the slabs, and whatever else is asked for."""
    heads, group, dim = 2, 3, 32
    codec, _ = both(books(tmp_path, heads, dim), heads, dim, bits)
    for count in (0, 1, 9, 40):
        records = pages(codec, 8)[torch.arange(count) % 8]
        valid = mask(max(count, 1), 8)[:count]
        q, exact, index = query(heads, group, dim), torch.randn(2, heads, 5, dim), 1 + 3 * torch.arange(count)
        threads(1)
        found, reads = codec.attend(q, records, valid)
        if count:
            alone = [codec.attend(q, records[i : i + 1], valid[i : i + 1])[0].rows(0) for i in range(count)]
            assert same(map(torch.stack, zip(*alone, strict=True)), found)
        slabs = [records[: count // 3].clone(), records[count // 3 :].clone()]
        for nodes, number in ((1, 1), (1, 2), (8, 1), (8, 3)):
            threads(number)
            assert same(codec.attend(q, records, valid)[0], found)
            view = View([len(slab) for slab in slabs], index.tolist(), valid, 256, nodes, (heads, group, dim))
            alone, mine, read = codec.see(view, q, exact, slabs)
            assert same(mine, cpu.tree(*found, index, 256, nodes))
            assert same(alone, cpu.attend_exact(q, exact)) and read == reads


def test_a_step_ends_in_the_models_space(tmp_path):
    codec, plain = both(books(tmp_path, 2, 32), 2, 32, 3)
    records, q, exact = pages(codec, 4), query(2, 3, 32), torch.randn(2, 2, 5, 32)
    view, out = View([4], [0, 1, 2, 3], torch.ones(4, 8, dtype=torch.bool), 4, 1, (2, 3, 32)), torch.empty(1, 6, 32)
    alone, nodes, _ = codec.see(view, q, exact, [records])
    assert codec.conclude(nodes.rows(0), alone, out)
    whole, _ = plain.attend(q, records, torch.ones(4, 8, dtype=torch.bool))
    rows = Partial(*cpu.attend_exact(q, exact))
    merged = Partial(*cpu.tree(*(torch.cat((a, b[None])) for a, b in zip(whole, rows, strict=True)), torch.arange(5), 8, 1))
    assert relative(out.view(2, 1, 3, 32), merged.rows(0).normalised()) < 10 * CLOSE
    spoilt = q.clone()
    spoilt[1, 0, 2, 7] = math.nan
    alone, nodes, _ = codec.see(view, spoilt, exact, [records])
    assert not codec.conclude(nodes.rows(0), alone, out)


def test_several_queries_at_once_are_left_to_plain_torch(tmp_path):
    codec, plain = both(books(tmp_path, 2, 32), 2, 32, 3)
    records, valid, q = pages(codec, 2), mask(2, 8), query(2, 3, 32, count=2)
    assert same(codec.attend(q, records, valid)[0], plain.attend(q, records, valid)[0])


def test_books_of_another_form_are_left_to_plain_torch(tmp_path):
    codec, plain = both(calibrations.make(tmp_path, "tailored", "threshold", heads=2, dim=32), 2, 32)
    assert codec.unserved.startswith("codec tailored with other words") and not codec.fused
    records, valid, q = pages(codec, 1), mask(1, 8), query(2, 3, 32)
    assert same(codec.attend(q, records, valid)[0], plain.attend(q, records, valid)[0])


def test_books_whose_words_are_no_power_of_two_are_left_to_plain_torch(tmp_path):
    codec, plain = both(books(tmp_path, 2, 32, count=200), 2, 32)
    assert codec.unserved is not None and not codec.fused
    records, valid, q = pages(codec, 1), mask(1, 8), query(2, 3, 32)
    assert same(codec.attend(q, records, valid)[0], plain.attend(q, records, valid)[0])


def test_heavy_hitters_are_not_fused_but_served(tmp_path):
    """Their masses are what `see` does not tell."""
    codec, _ = both(books(tmp_path, 2, 32), 2, 32, eviction="heavy", eviction_keep=0.5)
    assert codec.unserved is None and not codec.fused
