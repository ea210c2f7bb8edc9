"""Words of small integers: exact distances, ties, packed indices, stages; and the file that keeps them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import calibrations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.calibrated import KEY, read_origin
from bitkv_dist.codec import codebooks
from bitkv_dist.codec.books import LIMIT, Books, first_largest, nearest
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.plan.memory import Job, rank_bytes
from bitkv_dist.plan.models import MODELS


def by_definition(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Least squared distance in whole numbers, the first of equal ones."""
    distance = (x.long().unsqueeze(-2) - words.long().unsqueeze(-3)).square().sum(-1)
    return (distance == distance.amin(-1, keepdim=True)).int().argmax(-1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([(1, 2), (4, 16), (8, 37), (8, 1024)]), st.integers(1, 3), st.sampled_from([3, LIMIT]), st.integers(0))
def test_nearest_word(shape, lead, reach, seed):
    """Also for the largest numbers there are, where distances fill an fp32, and with ties."""
    width, count = shape
    torch.manual_seed(seed % 2**32)
    words = torch.randint(-reach, reach + 1, (2, 3, count, width)).float()
    x = torch.randint(-reach, reach + 1, (lead, 2, 3, 16, width)).float()
    assert torch.equal(nearest(x, words), by_definition(x, words))


@pytest.mark.parametrize("width", [4, 8])
def test_the_largest_distances_are_exact(width):
    """All corners of the cube, with what a first stage of at most 4 channels may leave over."""
    reach = 2 * LIMIT if width == 4 else LIMIT
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * width)
    x, words = corners * reach, torch.cat((corners * LIMIT, corners * (LIMIT - 1)))
    assert torch.equal(nearest(x, words), by_definition(x, words))


def test_both_ways_to_find_the_first_of_the_largest():
    torch.manual_seed(0)
    scores = torch.randint(0, 5, (64, 33)).float()
    on_device = torch.where(scores == scores.amax(-1, keepdim=True), torch.arange(33), 33).amin(-1)
    assert torch.equal(first_largest(scores), on_device)


def some_books(heads=2, dim=16, width=8, count=1024, stages=1, seed=0) -> Books:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-LIMIT, LIMIT, (heads, dim // width, stages, count, width), generator=generator).to(torch.int16)
    if stages == 2:
        words[:, :, 1] = words[:, :, 1] // 8
    channels = torch.stack([torch.randperm(dim, generator=generator) for _ in range(heads)])
    center, weight = torch.randn(heads, dim, generator=generator), torch.rand(heads, dim, generator=generator) + 0.5
    return Books(words, torch.full((heads, dim // width), 0.01), channels, center, weight)


@pytest.mark.parametrize(("width", "count", "stages", "bits"), [(8, 1024, 1, 10), (1, 2, 1, 1), (4, 16, 2, 4)])
def test_codes_and_words(width, count, stages, bits):
    """Each bit of each index where the layout says, and a vector that is a word comes back as that word."""
    books = some_books(width=width, count=count, stages=stages)
    torch.manual_seed(1)
    index = torch.randint(0, count, (3, 2, 16 // width, stages, 24))
    planes = torch.zeros(3, 2, 16 // width, stages, bits, 3, dtype=torch.uint8)
    for bit in range(bits):
        for token in range(24):
            planes[..., bit, token // 8] |= ((index[..., token] >> bit & 1) << (token % 8)).to(torch.uint8)
    x = books.decode(planes)
    assert x.shape == (3, 2, 24, 16)
    for page, head, token in ((0, 0, 0), (2, 1, 23), (1, 0, 8)):
        for group in range(16 // width):
            chosen = index[page, head, group, :, token]
            word = sum(books.words[head, group, stage, chosen[stage]].float() for stage in range(stages))
            for place in range(width):
                channel = int(books.channels[head, group * width + place])
                wanted = word[place] * 0.01 / books.weight[head, 0, channel] + books.center[head, 0, channel]
                assert x[page, head, token, channel] == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)
    if stages == 1:
        assert torch.equal(books.encode(x), planes)


def test_a_second_stage_codes_what_the_first_leaves():
    books = some_books(width=4, count=16, stages=2)
    torch.manual_seed(2)
    x = torch.randn(2, 2, 64, 16) * 4
    codes = books.encode(x)
    placed = ((x - books.center) * books.weight).gather(-1, books.channels[:, None].expand(x.shape))
    whole = books.integers(placed.unflatten(-1, (4, 4)).transpose(-2, -3))
    first, words = by_definition(whole, books.words[:, :, 0]), books.words[:, :, 0].float()
    left = whole - torch.stack([torch.stack([words[h, g][first[:, h, g]] for g in range(4)], 1) for h in range(2)], 1)
    second = by_definition(left, books.words[:, :, 1])
    for stage, index in enumerate((first, second)):
        for bit in range(4):
            plane = codes[..., stage, bit, :]
            assert torch.equal(plane >> 0 & 1, (index[..., ::8] >> bit & 1).to(torch.uint8))


# ------------------------------------------------------------------------------------------------------------ the file


def test_a_file_says_what_it_is(tmp_path):
    path = calibrations.make(tmp_path, heads=2, dim=16)
    origin = read_origin(path)
    assert (origin.codec, origin.form, origin.layers, origin.kv_heads, origin.head_dim) == ("tailored", "attended", 1, 2, 16)
    tensors = codebooks.tensors_of(path, origin.digest, torch.device("cpu"), (0, 2))
    assert tensors["K.words"].shape == (1, 2, 2, 1, 1024, 8) and load_file(path)["K.weighted"].shape == (1, 2)
    assert tensors["K.channels"].sort(-1).values.tolist() == [[list(range(16))] * 2]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_is_for_whom_the_umask_says(tmp_path, mask):
    """Also in a folder in which everybody may write, as /tmp."""
    path = Path(calibrations.make(tmp_path, heads=1, dim=16))
    tensors, origin = load_file(path), read_origin(str(path))
    tmp_path.chmod(0o1777)
    before = os.umask(mask)
    try:
        codebooks.save(path, origin, tensors)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(("codec", "tp"), [("residual", 1), ("residual", 2), ("residual", 4), ("tailored", 1)])
@pytest.mark.parametrize("correction", [True, False])
def test_a_rank_holds_the_books_of_its_heads(tmp_path, codec, tp, correction):
    """And says so, in `book_bytes` and in the plan: to the byte what is alive."""
    path, heads, layers, dim = calibrations.make(tmp_path, codec, layers=2, heads=4, dim=32), 4 // tp, 2, 32
    bits = {"tailored": 1, "residual": 2}[codec]
    config = CacheConfig(codec, bits, bits, page_tokens=64, calibration=path, correction=correction)
    plan = Job(replace(MODELS["llama-3.1-8b"], layers=layers, heads=8, kv_heads=4, head_dim=dim), config, 4096)
    for first in range(0, 4, heads):
        shape = HeadShape(layers, first, heads, dim, torch.float32, fingerprint="0" * 16)
        codecs = [make_codec(config, shape, layer) for layer in range(layers)]
        shared = codebooks.tensors_of(path, config.calibration_digest, torch.device("cpu"), (first, first + heads))
        held = [tensor for name, tensor in shared.items() if name != "inv_freq"]
        held += [tensor for each in codecs for books in each.books.values() for tensor in vars(books).values()]
        held += [each.correction for each in codecs]
        held += [table for each in codecs for tables in getattr(each, "tables", {}).values() for table in tables]
        storages = (tensor.untyped_storage() for tensor in held if isinstance(tensor, torch.Tensor))
        alive = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        assert sum(each.book_bytes for each in codecs) == alive == rank_bytes(plan, tp, 1).books
    assert alive == rank_bytes(plan, 1, 1).books // tp


def test_a_changed_file_is_refused(tmp_path):
    path = calibrations.make(tmp_path, heads=1, dim=16)
    tensors, origin = load_file(path), read_origin(path)
    for changed in ({"V.unit": tensors["V.unit"] * 2}, {"V.lost": tensors["V.lost"].bfloat16()}):
        save_file(tensors | changed, path, {KEY: json.dumps(origin.__dict__)})
        with pytest.raises(ValueError, match=r"calibration '.*': was changed after it was written; calibrate again"):
            codebooks.tensors_of(path, origin.digest, torch.device("cpu"), (0, 1))


def test_a_file_of_another_length_is_refused_by_its_header(tmp_path):
    """With the configuration, so before any weight; also where the header alone is whole."""
    path = Path(calibrations.make(tmp_path, heads=1, dim=16))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = f"its header tells of {len(whole):,}; copy it again or calibrate again"
    cases = ((whole[:-1], "is truncated"), (whole[:header], "is truncated"), (whole + b"x", "goes on behind its end"))
    for content, what in cases:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^cache.calibration '.*': {what}: has {len(content):,} bytes, {lengths}$"):
            CacheConfig("tailored", 1, 1, calibration=str(path))
    path.write_bytes(whole)
    assert CacheConfig("tailored", 1, 1, calibration=str(path)).calibration_digest == read_origin(str(path)).digest


OTHER_TENSORS = {  # what of a file is another, and the rule that it breaks
    "none": ({"K.words": None}, "no tensor K.words"),
    "no frequencies": ({"inv_freq": None}, "no tensor inv_freq"),
    "type": ({"V.words": lambda x: x.int()}, r"V.words as I32 \[1, 2, 2, 1, 1024, 8\], must be I16 \[1, 2, groups, stages, "),
    "rank": ({"K.words": lambda x: x[0]}, r"K.words as I16 \[2, 2, 1, 1024, 8\], must be I16 \[1, 2, groups, stages, words, "),
    "heads": ({"K.center": lambda x: x[:, :1]}, r"K.center as F32 \[1, 1, 16\], must be F32 \[1, 2, 16\]"),
    "layers": ({"K.lost": lambda x: x[:0]}, r"K.lost as F32 \[0, 2, 16\], must be F32 \[1, 2, 16\]"),
    "width": ({"V.words": lambda x: x[..., :4]}, "V.words of .* for 2 groups of 4 channels, must be .* 16 channels"),
    "one word": ({"V.words": lambda x: x[..., :1, :]}, "V.words of 1 words in 1 stages .*, must be two words or more"),
    "groups": ({"K.unit": lambda x: x[..., :1]}, r"K.unit as F32 \[1, 2, 1\], must be F32 \[1, 2, 2\]"),
    "frequencies": ({"inv_freq": lambda x: x.repeat(2)}, "inv_freq of more pairs than 16 channels have"),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_tensors_of_another_form_are_refused_by_the_header(tmp_path, case):
    """Files written by hand, whose digest is right: their content is not looked at."""
    changes, rule = OTHER_TENSORS[case]
    path = calibrations.make(tmp_path, heads=2, dim=16)
    tensors, origin = load_file(path), read_origin(path)
    for name, change in changes.items():
        found = tensors.pop(name)
        tensors |= {} if change is None else {name: change(found).contiguous()}
    codebooks.save(Path(path), origin, tensors)
    with pytest.raises(ValueError, match=f"^cache.calibration '.*': holds .*{rule}.*; calibrate again$"):
        CacheConfig("tailored", 1, 1, calibration=path)


@pytest.mark.parametrize("wrong", [-1, 16, 3])
def test_channels_that_are_no_permutation_are_refused(tmp_path, wrong):
    path = calibrations.make(tmp_path, heads=2, dim=16)
    tensors, origin = load_file(path), read_origin(path)
    tensors["V.channels"][0, 1, 5] = wrong
    digest = codebooks.save(Path(path), origin, tensors).digest
    with pytest.raises(ValueError, match=r"its tensor V.channels must name channels 0 to 15 once for each head; calibrate"):
        codebooks.tensors_of(path, digest, torch.device("cpu"), (0, 2))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = Path(calibrations.make(tmp_path, heads=1, dim=16))
    before, tensors, origin = path.read_bytes(), load_file(path), read_origin(str(path))

    def half(tensors, place, metadata):
        Path(place).write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(codebooks, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        codebooks.save(path, origin, tensors)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_words_are_fp16_where_that_is_exact():
    words = torch.tensor([[2048, -2048, 700]], dtype=torch.int16)
    assert codebooks.as_kernels_take(words).dtype == torch.float16
    for large in (2049, -32768):
        kept = codebooks.as_kernels_take(torch.tensor([[3, large]], dtype=torch.int16))
        assert kept.dtype == torch.int16 and kept.tolist() == [[3, large]]


def test_what_is_no_calibration_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\); make it with bitkv calibrate"):
        read_origin(str(path))
    for content in (b"", b"hello, this is text", (1 << 60).to_bytes(8, "little"), b"\x02\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a calibration file; make one with bitkv calibrate"):
            read_origin(str(path))
    whole = read_origin(calibrations.make(tmp_path, heads=1, dim=16)).__dict__
    for number, said in enumerate(([], 5, "x", {}, {"version": 1}, {"version": 1, "texts": 5}, whole | {"more": 1})):
        path = tmp_path / f"{number}.safetensors"
        save_file({"x": torch.zeros(1)}, path, {KEY: json.dumps(said)})
        with pytest.raises(ValueError, match="is not a calibration file; make one with bitkv calibrate"):
            read_origin(str(path))
    save_file({"x": torch.zeros(1)}, path, {KEY: json.dumps({"version": 99})})
    with pytest.raises(ValueError, match="is of version 99, this program reads 1; calibrate again"):
        read_origin(str(path))
