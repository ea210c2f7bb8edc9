"""Strict configuration: what is accepted, what is refused, and a refusal's one line: field, value, rule, remedy."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from bitkv_dist import config
from bitkv_dist.cache_config import CacheConfig, RefineConfig
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.preset import preset_names

ROOT = Path(__file__).resolve().parent.parent
EXPECTED_PRESETS = [
    "1bit", "2bit", "4bit", "demo", "exact", "heavy", "minmax2", "minmax4", "streaming", "tiered2", "tiered4", "tiered4-2",
]  # fmt: skip


def refusal(preset="4bit", **overrides) -> str:
    with pytest.raises(ValueError) as caught:
        build(preset, {name.replace("__", "."): value for name, value in overrides.items()})
    message = str(caught.value)
    assert "\n" not in message and ": " in message and ";" in message  # where and what: rule; remedy
    return message


def test_presets_are_the_ones_promised():
    assert set(EXPECTED_PRESETS) <= set(preset_names())
    for name in preset_names():
        build(name, {})


@pytest.mark.parametrize(
    ("preset", "stored", "scanned", "refines"),
    [
        ("exact", (16, 16), (16, 16), False),
        ("4bit", (4, 4), (4, 4), False),
        ("2bit", (2, 2), (2, 2), False),
        ("1bit", (1, 1), (1, 1), False),
        ("tiered4", (4, 4), (1, 1), True),
        ("tiered4-2", (4, 4), (2, 2), True),
        ("tiered2", (2, 2), (1, 1), True),
        ("minmax2", (2, 2), (2, 2), False),
    ],
)
def test_preset_depths(preset, stored, scanned, refines):
    cache = build(preset, {}).cache
    assert (cache.key_bits, cache.value_bits) == stored
    assert (cache.key_scan_bits, cache.value_scan_bits) == scanned
    assert cache.refines is refines is (cache.refine is not None)


def test_minmax_groups():
    for name in ("minmax2", "minmax4"):
        cache = build(name, {}).cache
        assert (cache.key_group_tokens, cache.value_group_channels) == (64, 32)
    assert CacheConfig(codec="minmax").key_group_tokens == 64
    assert CacheConfig().key_group_tokens is None


def test_scan_depth_is_per_kind():
    cache = CacheConfig(key_bits=4, value_bits=1, scan_bits=2)
    assert (cache.key_scan_bits, cache.value_scan_bits, cache.refines) == (2, 1, True)
    assert cache.refine == RefineConfig()
    assert CacheConfig(key_bits=4, value_bits=2, scan_bits=4).refine is None


@pytest.mark.parametrize(
    ("asked", "page", "rounded"), [(0, 128, 0), (1, 128, 128), (128, 128, 128), (129, 128, 256), (65, 64, 128)]
)
def test_sink_is_rounded_up_to_pages(asked, page, rounded):
    assert CacheConfig(sink_tokens=asked, page_tokens=page).sink_rounded == rounded


def test_kv_bits_sets_both_and_scans_all():
    cache = build("tiered4", {"cache.kv_bits": 2}).cache
    assert (cache.key_bits, cache.value_bits, cache.scan_bits, cache.refine) == (2, 2, None, None)
    cache = build("4bit", {"cache.kv_bits": 2, "cache.key_bits": 3}).cache
    assert (cache.key_bits, cache.value_bits) == (3, 2)


@pytest.mark.parametrize("preset", EXPECTED_PRESETS)
def test_16_bits_mean_exact_on_every_preset(preset):
    before = build(preset, {}).cache
    kept = {"eviction": before.eviction, "eviction_keep": before.eviction_keep}  # what a bounded cache keeps is exact
    assert build(preset, {"cache.kv_bits": 16}).cache == CacheConfig(codec="exact", key_bits=16, value_bits=16, **kept)


def test_no_eviction_drops_the_share_that_a_preset_keeps():
    for preset in ("streaming", "heavy"):
        assert build(preset, {"cache.eviction": "none"}).cache == build("4bit", {}).cache
    with pytest.raises(ValueError, match="eviction_keep"):
        build("heavy", {"cache.eviction": "none", "cache.eviction_keep": 0.5})


@pytest.mark.parametrize("preset", EXPECTED_PRESETS)
@pytest.mark.parametrize("codec", ["planes", "minmax", "exact"])
def test_another_codec_drops_what_only_the_presets_codec_reads(preset, codec):
    if (preset, codec) == ("1bit", "minmax"):
        assert "codec minmax stores 2, 4, 8" in refusal(preset, cache__codec=codec)
        return
    cache = build(preset, {"cache.codec": codec}).cache
    assert cache.codec == codec
    if build(preset, {}).cache.codec == codec:
        assert cache == build(preset, {}).cache


def test_overrides_reach_nested_fields():
    run = build("tiered4", {"cache.refine.value": 0.1, "parallel.sp": 4, "generate.stop": ["a", "b"]})
    assert (run.cache.refine.value, run.cache.refine.rule, run.parallel.sp) == (0.1, "fraction", 4)
    assert run.generate.stop == ("a", "b")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"cache.kye_bits": 2}, ("cache.kye_bits 2", "did you mean key_bits?")),
        ({"cache.refine.vale": 0.1}, ("cache.refine.vale 0.1", "did you mean value?")),
        ({"cash.key_bits": 2}, ("cash", "did you mean cache?")),
        ({"key_bits": 2}, ("key_bits", "section.field")),
        ({"cache.codec.bits": 2}, ("cache.codec.bits",)),
        ({"cache.codec": "plane"}, ("cache.codec 'plane'", "did you mean planes?")),
        ({"cache.key_bits": True}, ("cache.key_bits True", "whole number")),
        ({"cache.key_bits": 3.5}, ("cache.key_bits 3.5", "whole number")),
        ({"cache.key_bits": 4.0}, ("cache.key_bits 4.0", "whole number")),
        ({"cache.key_bits": "4"}, ("cache.key_bits '4'", "whole number")),
        ({"cache.key_bits": None}, ("cache.key_bits None", "whole number")),
        ({"cache.key_bits": 5}, ("cache.key_bits 5", "codec planes stores 1, 2, 3, 4, 8")),
        ({"cache.value_bits": 0}, ("cache.value_bits 0",)),
        ({"cache.codec": "minmax", "cache.key_bits": 3}, ("cache.key_bits 3", "codec minmax stores 2, 4, 8")),
        ({"cache.kv_bits": 3.5}, ("cache.kv_bits 3.5", "1, 2, 3, 4, 8, 16")),
        ({"cache.kv_bits": True}, ("cache.kv_bits True",)),
        ({"cache.kv_bits": 32}, ("cache.kv_bits 32",)),
        ({"cache.kv_bits": 16, "cache.codec": "planes"}, ("cache.kv_bits 16", "codec planes stores 1, 2, 3, 4, 8")),
        ({"cache.kv_bits": 3, "cache.codec": "minmax"}, ("cache.kv_bits 3", "codec minmax stores 2, 4, 8")),
        ({"cache.scan_bits": 0}, ("cache.scan_bits 0",)),
        ({"cache.scan_bits": 5}, ("cache.scan_bits 5", "between 1 and 4")),
        ({"cache.refine.value": 0.1}, ("cache.refine", "nothing is left to refine", "set scan_bits below 4")),
        ({"cache.codec": "minmax", "cache.scan_bits": 1}, ("cache.scan_bits 1", "only codec planes, tailored reads it")),
        ({"cache.codec": "minmax", "cache.correction": False}, ("cache.correction False", "only codec planes")),
        ({"cache.key_group_tokens": 64}, ("cache.key_group_tokens 64", "only codec minmax reads it")),
        ({"cache.codec": "minmax", "cache.key_group_tokens": 48}, ("cache.key_group_tokens 48",)),
        ({"cache.codec": "minmax", "cache.page_tokens": 64, "cache.key_group_tokens": 128}, ("key_group_tokens 128",)),
        ({"cache.page_tokens": 100}, ("cache.page_tokens 100", "64, 128")),
        ({"cache.sink_tokens": -1}, ("cache.sink_tokens -1", "at least 0")),
        ({"cache.seed": 2**64}, ("cache.seed", "between 0 and 18446744073709551615")),
        ({"cache.correction": "yes"}, ("cache.correction 'yes'", "true or false")),
        ({"cache.correction": 1}, ("cache.correction 1", "true or false")),
        ({"cache.refine": 3}, ("cache.refine 3", "mapping")),
        ({"parallel.sp": 0}, ("parallel.sp 0", "between 1 and 256")),
        ({"parallel.sp": 257}, ("parallel.sp 257",)),
        ({"parallel.tp": 1.0}, ("parallel.tp 1.0", "whole number")),
        ({"parallel.device": "gpu"}, ("parallel.device 'gpu'", "auto, cpu, cuda")),
        ({"parallel.cpu_isa": "sse2"}, ("parallel.cpu_isa 'sse2'", "auto, avx512bf16, avx512, avxvnni, avx2, portable")),
        ({"parallel.step_timeout_s": 0}, ("parallel.step_timeout_s 0.0", "above 0")),
        ({"generate.chunk": 300}, ("generate.chunk 300", "must divide 512", "nearest is 256")),
        ({"generate.chunk": 1024}, ("generate.chunk 1024", "nearest is 512")),
        ({"generate.prefill": "fast"}, ("generate.prefill 'fast'", "exact, packed")),
        ({"generate.max_new_tokens": -1}, ("generate.max_new_tokens -1",)),
        ({"generate.temperature": float("nan")}, ("generate.temperature nan", "finite")),
        ({"generate.temperature": -0.1}, ("generate.temperature -0.1",)),
        ({"generate.top_p": 0.9}, ("generate.top_p 0.9", "set temperature above 0")),
        ({"generate.top_k": 5}, ("generate.top_k 5", "set temperature above 0")),
        ({"generate.temperature": 1, "generate.top_p": 0}, ("generate.top_p 0",)),
        ({"generate.stop": "x"}, ("generate.stop 'x'", "list of texts")),
        ({"generate.stop": ["x", ""]}, ("generate.stop", "empty stop string")),
        ({"generate.dtype": "fp16"}, ("generate.dtype 'fp16'", "float16")),
        ({"generate.model": ""}, ("generate.model ''",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(overrides, parts):
    message = refusal(**{name.replace(".", "__"): value for name, value in overrides.items()})
    for part in parts:
        assert part in message


def test_refinement_fields():
    for name, value in (("value", 1.5), ("min_tokens", -1), ("min_tokens", 513), ("rule", "top"), ("scope", "page")):
        assert f"cache.refine.{name} {value!r}" in refusal("tiered4", **{f"cache__refine__{name}": value})
    assert "mass of 0" in refusal("tiered4", cache__refine={"rule": "mass", "value": 0})


def test_direct_construction_is_checked_too():
    with pytest.raises(ValueError, match=r"cache\.key_bits"):
        CacheConfig(key_bits=7)
    with pytest.raises(ValueError, match=r"generate\.stop"):
        GenerateConfig(stop=["a"])
    assert isinstance(GenerateConfig(temperature=1).temperature, float)
    assert isinstance(ParallelConfig(step_timeout_s=5).step_timeout_s, float)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("cache: [1]", "cache [1]: must be a mapping"),
        ("cache: 0", "cache 0: must be a mapping"),
        ("[1, 2]", "must be a mapping of sections"),
        ("cach: {}", "did you mean cache?"),
        ("cache: {key_bits: 2, key_bits: 3}", "key 'key_bits' is given twice in line 1"),
        ("a: b: c", "not valid YAML"),
        ("cache: {codec: null}", "cache.codec None"),
        ("cache: {1: 2}", "cache.1 2: unknown key"),
    ],
)
def test_yaml_refusals(tmp_path, text, part):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert part in refusal(str(path))


def test_yaml_file(tmp_path):
    path = tmp_path / "a dir" / "it's & run.yaml"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbfcache: {key_bits: 3}\r\ngenerate:\r\nparallel: {step_timeout_s: 5}\r\n")
    run = build(str(path), {})
    assert (run.cache.key_bits, run.cache.value_bits, run.parallel.step_timeout_s) == (3, 4, 5.0)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert build(str(empty), {}) == config.RunConfig()


def test_unreadable_files(tmp_path):
    assert "did you mean 4bit?" in refusal("4bits")
    assert "No such file" in refusal(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"generate: {model: caf\xe9}")
    assert "not UTF-8" in refusal(str(tmp_path / "latin.yaml"))


def test_validation_does_not_rest_on_assert():
    code = "from bitkv_dist.config import build\ntry: build('4bit', {'cache.kv_bits': 3.5})\nexcept ValueError as e: print(e)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cache.kv_bits 3.5: ")


def test_config_imports_no_torch():
    code = "import sys, bitkv_dist.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_field_is_read_somewhere():
    """A field that nothing reads is a promise nobody keeps."""
    read = set()
    for path in [*ROOT.glob("bitkv_dist/**/*.py"), *ROOT.glob("launch/*.py")]:
        tree = ast.parse(path.read_text())
        attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        if path.name != "config.py":
            read.update(attributes)
        else:  # a property such as sink_rounded reads fields; a check alone does not count
            properties = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.decorator_list]
            read.update(n.attr for p in properties for n in ast.walk(p) if isinstance(n, ast.Attribute))
    for cls in (CacheConfig, RefineConfig, ParallelConfig, GenerateConfig):
        for field in dataclasses.fields(cls):
            assert field.name in read, f"{cls.SECTION}.{field.name} is read nowhere"
