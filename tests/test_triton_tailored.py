"""The kernel for pages of codebook words, in Triton's interpreter, against the reference; and the engine with it."""

import functools
import importlib.util
import math
from pathlib import Path

import calibrations
import pytest
import simulated
import tiny
import torch
from safetensors.torch import load_file

pytest.importorskip("triton")

import triton as language
import triton.language as tl
from test_triton_engine import Found, alone, one_at_a_time, run  # noqa: F401
from triton_pages import assert_same_attention

from bitkv_dist import model
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.calibrated import read_origin
from bitkv_dist.codec import codebooks
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.tailored import TailoredCodec
from bitkv_dist.codec.tailored_triton import TailoredCodecTriton
from bitkv_dist.codec.worded import WordedCodec
from bitkv_dist.kernels import dispatch, triton
from bitkv_dist.kernels.reference import pack_bits
from bitkv_dist.kernels.triton import tables
from bitkv_dist.kernels.triton.words import word_indices
from bitkv_dist.partial import Partial

BOOKS = Path(__file__).parents[1] / "benchmarks" / "random_books.py"
HEADS = 3  # of which a page of 64 or 128 tokens leaves the last one fewer scales


@functools.cache
def books_module():
    spec = importlib.util.spec_from_file_location("random_books", BOOKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("books")


@functools.cache
def file_of(folder, dim: int, turned: int | None = None, scaling: float = 1.0) -> str:
    return books_module().write(folder / f"{dim}-{turned}-{scaling}", HEADS, dim, turned=turned, scaling=scaling)


def codec_of(kernels: str, path: str, dim: int, page: int, **fields):
    config = CacheConfig("tailored", 1, 1, calibration=path, page_tokens=page, sink_tokens=page, recent_tokens=32, **fields)
    with dispatch.forced(kernels):
        return make_codec(config, HeadShape(1, 0, HEADS, dim, torch.float32), 0)


def granules(codec, count: int) -> torch.Tensor:
    """Records of so many granules from page 1 on, of random keys and values."""
    generator = torch.Generator().manual_seed(5)
    pages = count * GRANULE_TOKENS // codec.tokens
    k, v = torch.randn(2, pages, HEADS, codec.tokens, codec.heads.head_dim, generator=generator)
    k *= torch.rand(pages, 1, codec.tokens, 1, generator=generator) + 0.5  # tokens of different scales
    return codec.encode(k, v, range(1, pages + 1)).unflatten(0, (count, -1))


def queries(group: int, dim: int) -> torch.Tensor:
    return torch.randn(HEADS, 1, group, dim, generator=torch.Generator().manual_seed(group)) * 4 * dim**-0.5


@pytest.fixture
def poisoned(monkeypatch):
    """What a kernel is given to write into holds NaN."""
    allocate = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape, **kind: allocate(self, *shape, **kind).fill_(99))


# -------------------------------------------------------------------------------------------------------- words


@language.jit
def indices(codes, out, FIRST: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    found = word_indices(codes, FIRST, P, TILE, 4, 3, BITS)
    tl.store(out + tl.arange(0, TILE)[:, None] * 4 + tl.arange(0, 4)[None, :], found)


@pytest.mark.parametrize("bits", [1, 4, 7, 8, 10, 11])
def test_indices_come_out_of_their_planes(bits):
    """Three groups padded to four, the second of two tiles."""
    wanted = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    planes = (wanted[:, None] >> torch.arange(bits)[:, None]) & 1
    found = torch.full((32, 4), -1, dtype=torch.int32)
    with dispatch.forced("triton"):
        indices[(1,)](pack_bits(planes.to(torch.uint8).unflatten(-1, (-1, 8))), found, FIRST=32, P=64, TILE=32, BITS=bits)
    assert torch.equal(found[:, :3].T.long(), wanted[:, 32:]) and not found[:, 3].any()


CASES = {  # head dim, query heads of a group, page tokens, correction, channels that RoPE turns, its factor
    "64, one head": (64, 1, 128, True, None, 1.0),
    "64, eight heads": (64, 8, 64, False, 32, 1.0),
    "96": (96, 3, 128, True, None, 1.25),
    "128": (128, 4, 64, True, None, 1.0),
    "narrow, more heads than a program serves": (16, 11, 64, True, None, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_the_reference(folder, poisoned, case):
    """Granules with some pages, without any, and with the first ones; what is no valid page holds NaN."""
    dim, group, page, correction, turned, scaling = CASES[case]
    path = file_of(folder, dim, turned, scaling)
    mine, plain = (codec_of(kernels, path, dim, page, correction=correction) for kernels in ("triton", "reference"))
    assert type(mine) is TailoredCodecTriton and mine.unserved is None and type(plain) is TailoredCodec
    records = granules(plain, 3)
    assert torch.equal(granules(mine, 3), records)
    valid = torch.zeros(records.shape[:2], dtype=torch.bool)
    valid[0, 1:4], valid[2, :2] = True, True
    q = queries(group, dim)
    found, reads = mine.attend(mine.prepare(q), torch.where(valid[:, :, None, None], records, 255), valid)
    wanted, wanted_reads = plain.attend(plain.prepare(q), records, valid)
    assert_same_attention(found, wanted, output=2e-5)
    assert (reads.bits, reads.elements, reads.scanned) == (wanted_reads.bits, wanted_reads.elements, wanted_reads.scanned)
    torch.testing.assert_close(found.m[valid.any(1)], wanted.m[valid.any(1)], atol=3e-5, rtol=0)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_every_architectures_tiles_give_the_same_attention(folder, monkeypatch, arch):
    """As they are cut there, run by the interpreter."""
    configured = tables.ARCHITECTURES
    here = tables.replace(configured[arch], assembly=configured["interpreter"].assembly)
    monkeypatch.setitem(tables.ARCHITECTURES, "interpreter", here)
    mine, plain = (codec_of(kernels, file_of(folder, 128), 128, 64) for kernels in ("triton", "reference"))
    records, q = granules(plain, 1)[:, :2], queries(4, 128)
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert_same_attention(mine.attend(q, records, valid)[0], plain.attend(q, records, valid)[0], output=2e-5)


def test_lanes_of_several_sequences_are_what_the_granules_give_merged(folder):
    """By tables, two lanes over three granules and a sequence without any page."""
    mine = codec_of("triton", file_of(folder, 64), 64, 64)
    records, per_granule = granules(mine, 3), GRANULE_TOKENS // 64
    q = torch.stack((queries(2, 64), queries(2, 64).flip(-1)))
    spans = torch.tensor([[5, 2 * per_granule + 2], [0, 0]])
    offsets = torch.arange(3)[None].expand(2, -1).contiguous() * records[0].numel()
    (first, second), refined = mine.attend_table(q, mine.table(records, offsets, mine.bounds(spans, 2)), 2)
    valid = torch.zeros(3, per_granule, dtype=torch.bool)
    valid.view(-1)[5 : 2 * per_granule + 2] = True
    plain = codec_of("reference", file_of(folder, 64), 64, 64)
    part, _ = plain.attend(q[0], records, valid)
    with dispatch.forced("triton"):
        wanted = Partial(*triton.tree(*part, torch.arange(3), 2, 2))
    assert_same_attention(first, wanted, output=2e-5)
    assert torch.isneginf(second.m).all() and not second.l.any() and not second.o.any() and int(refined) == 0


def test_a_page_does_not_depend_on_what_else_is_attended_to(folder):
    """Bits of a granule's partial, alone and among others and other sequences."""
    mine = codec_of("triton", file_of(folder, 64), 64, 128)
    records, q = granules(mine, 2), queries(4, 64)
    valid = torch.tensor([[False, True, True, False], [True, False, False, False]])
    both, _ = mine.attend(q, records, valid)
    for granule in range(2):
        single, _ = mine.attend(q, records[granule : granule + 1], valid[granule : granule + 1])
        assert all(torch.equal(a[0], b[granule]) for a, b in zip(single, both, strict=True))


def test_what_the_kernel_does_not_serve_is_named(folder, tmp_path):
    def unserved(path: str, dim: int, **fields) -> str:
        return codec_of("triton", path, dim, 64, **fields).unserved

    assert unserved(file_of(folder, 136), 136) == "head_dim 136"
    assert unserved(file_of(folder, 16), 16, eviction="heavy", eviction_keep=0.25) == "eviction: heavy"
    tensors = load_file(file_of(folder, 16))
    tensors["V.words"][0, 1, 1, 0, 7, 3] = 2049
    codebooks.save(tmp_path / "large.safetensors", read_origin(file_of(folder, 16)), tensors)
    assert unserved(str(tmp_path / "large.safetensors"), 16) == "codebooks of numbers above 2048"
    threshold = calibrations.make(tmp_path, "tailored", "threshold", heads=HEADS, dim=16)
    assert unserved(threshold, 16) == "codebooks of other than 8 channels"
    mine, plain = (codec_of(kernels, threshold, 16, 64) for kernels in ("triton", "reference"))
    assert not mine.takes_tables and mine.book_bytes == plain.book_bytes
    records, q, valid = granules(plain, 1), queries(2, 16), torch.ones(1, 8, dtype=torch.bool)
    assert all(torch.equal(a, b) for a, b in zip(mine.attend(q, records, valid)[0], plain.attend(q, records, valid)[0],
                                                 strict=True))  # fmt: skip
    with dispatch.forced("triton"):
        words = make_codec(CacheConfig("tailored", 2, 2, calibration=file_of(folder, 16)),
                           HeadShape(1, 0, HEADS, 16, torch.float32), 0)  # fmt: skip
    assert type(words) is WordedCodec and not words.takes_tables


# ------------------------------------------------------------------------------------------------------ the engine

PROMPTS = [tiny.prompt(604), tiny.prompt(91 + 64)]  # the steps seal pages, open a granule, and begin a sequence's first page


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny Llama of one layer, 2 KV heads, D = 64, and a file for it."""
    llama = tiny.save(tmp_path_factory.mktemp("llama"), intermediate_size=64, head_dim=64, num_hidden_layers=1)
    fingerprint = f"{model.load(str(llama), dtype=torch.float32, device=torch.device('cpu')).fingerprint:016x}"
    path = books_module().write(tmp_path_factory.mktemp("file") / "books", 2, 64, fingerprint=fingerprint)
    return llama, {"codec": "tailored", "key_bits": 1, "value_bits": 1, "calibration": path}


def test_a_recorded_step_answers_as_the_reference(served):
    """Tokens and sealed bytes; no length of a step is the host's."""
    found, wanted = (alone(kernels, *served, PROMPTS, max_new_tokens=6, graph=kernels == "triton")
                     for kernels in ("triton", "reference"))  # fmt: skip
    assert found.recorder.recorded == 1 and found.kernel["backend"] == "triton" and found.kernel["graph"]
    assert found.tokens == wanted.tokens and found.digest == wanted.digest and found.reads == wanted.reads
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=0)
    assert wanted.kernel["reason"] == "asked for"


def test_any_number_of_ranks_gives_the_same_bits(served):
    """Two granules on three ranks, with the exchange of a real step."""

    def short(mesh) -> Found:
        return run(mesh, *served, [tiny.prompt(700)], max_new_tokens=3)

    with dispatch.forced("triton"):
        (one,), several = (simulated.run(ranks, short) for ranks in (1, 3))
    for found in several:
        assert found.tokens == one.tokens and found.digest == one.digest and torch.equal(found.logits, one.logits)


def test_a_chunk_of_a_packed_prefill_is_read_by_the_reference(served):
    found = alone("triton", *served, [tiny.prompt(300)], max_new_tokens=2, prefill="packed", chunk=128)
    wanted = alone("reference", *served, [tiny.prompt(300)], max_new_tokens=2, prefill="packed", chunk=128)
    assert found.tokens == wanted.tokens and found.digest == wanted.digest
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4 * math.sqrt(2), rtol=0)
