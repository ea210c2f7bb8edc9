"""What a run is told: small frozen dataclasses, read from a YAML preset and overridden field by field.

Nothing is guessed and nothing is ignored: an unknown section or key, a value of the wrong type and a combination that no
code serves are each a one-line `ValueError` that names the field, the value, the rule and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from bitkv_dist.cache_config import CALIBRATED, GRANULE_TOKENS, LANES, STORED_BITS, CacheConfig, RefineConfig
from bitkv_dist.preset import read_preset
from bitkv_dist.rules import between, check_types, listed, near_miss, one_of, refuse, shown
from bitkv_dist.schedule import LayerConfig, layer_numbers
from bitkv_dist.split import LAYOUTS

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("auto", "model", "bfloat16")
EXCHANGES = ("auto", "allgather", "alltoall", "allreduce")
_CODEC_FIELDS = ("scan_bits", "refine", "score", "correction", "key_group_tokens", "value_group_channels", "layers",
                 "calibration", "calibration_digest")  # fmt: skip


@dataclass(frozen=True)
class ParallelConfig:
    """The grid of ranks, SP (outer) x TP (inner), and how long ranks wait for each other."""

    SECTION: ClassVar[str] = "parallel"

    tp: int = 1
    sp: int | None = None  # None = world size / tp
    device: str = "auto"  # auto | cpu | cuda ; which GPU follows from the local rank
    layout: str = "replicated"  # of the weights behind attention: replicated over SP | helix: shared by all ranks
    exchange: str = "auto"  # of attention: allgather | alltoall | allreduce | auto = alltoall with helix, else allgather
    bind: str = "auto"  # auto: each rank to its own cores, or those near its GPU, where the launcher has not | none
    cpu_isa: str = "auto"  # of the CPU kernels: auto = the machine's best | avx512bf16 | avx512 | avxvnni | avx2 | portable
    start_timeout_s: float = 600.0
    step_timeout_s: float = 30.0  # how long a rank may hang before the others give it up

    def __post_init__(self) -> None:
        check_types(self)
        between(self, "tp", 1, None)
        if self.sp is not None:
            between(self, "sp", 1, LANES)
        one_of(self, "device", ("auto", "cpu", "cuda"))
        one_of(self, "layout", LAYOUTS)
        one_of(self, "exchange", EXCHANGES)
        if self.exchange == "alltoall" and self.layout != "helix":
            rule = "it leaves each rank with some heads alone, and layout replicated needs all of them"
            refuse(self, "exchange", rule, "take allgather, or layout helix")
        one_of(self, "bind", ("auto", "none"))
        one_of(self, "cpu_isa", ("auto", "avx512bf16", "avx512", "avxvnni", "avx2", "portable"))
        for name in ("start_timeout_s", "step_timeout_s"):
            if getattr(self, name) <= 0:
                refuse(self, name, "must be above 0 seconds", "give the seconds to wait")


@dataclass(frozen=True)
class GenerateConfig:
    """The model, how a prompt is read into the cache, and how tokens are chosen and shown."""

    SECTION: ClassVar[str] = "generate"

    model: str = "smollm2-135m"  # built-in name, directory, .gguf file or hub id
    dtype: str | None = None  # None = float32 on CPU, bfloat16 on GPU
    weights: str = "auto"  # kept in: model = dtype | bfloat16, computing in dtype | auto = bfloat16 where that rounds nothing
    prefill: str = "exact"  # exact: layer by layer, no prompt token sees a sealed key | packed | auto: exact if it fits
    prefill_memory_gb: float | None = None  # of exact prefill: what one layer's prompt keys and values may take on a rank
    chunk: int = GRANULE_TOKENS  # tokens per piece of prefill work
    max_new_tokens: int = 128
    ignore_eos: bool = False
    warmup: bool = False
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    sampling_seed: int | None = None  # None = another one each run
    stop: tuple[str, ...] = ()
    chat: bool | None = None  # None = the model's chat template in interactive runs, plain continuation otherwise
    stream: bool = True
    digest: bool = False  # digest of the sealed bytes in the report
    graph: bool = False  # decode steps replay a CUDA graph; GPUs, tp 1
    save_cache: str | None = None  # folder for a snapshot of the cache
    save_cache_at: str = "prefill"  # prefill: before the first token, to replay the run | end: after the last, to go on
    load_cache: str | None = None  # folder of a snapshot that the prompts begin with; without prompts it goes on
    checkpoint: str | None = None  # folder that keeps the run while it lasts: the same run, started again, goes on from it
    checkpoint_every: int = 256  # tokens of each sequence from one checkpoint to the next; the first is taken after the prefill

    def __post_init__(self) -> None:
        check_types(self)
        if not self.model:
            refuse(self, "model", "must name a model", "give a built-in name, a directory, a .gguf file or a hub id")
        if self.dtype is not None:
            one_of(self, "dtype", DTYPES)
        one_of(self, "weights", WEIGHTS)
        one_of(self, "prefill", ("exact", "packed", "auto"))
        if self.prefill_memory_gb is not None:
            if self.prefill_memory_gb <= 0:
                refuse(self, "prefill_memory_gb", "must be above 0 GB", "leave it out to keep all prompt keys on every rank")
            if self.prefill == "packed":
                refuse(self, "prefill_memory_gb", "a packed prefill keeps no prompt keys", "leave it out")
        one_of(self, "chunk", [2**i for i in range(GRANULE_TOKENS.bit_length())], f"must divide {GRANULE_TOKENS}: ")
        between(self, "max_new_tokens", 0, None)
        between(self, "temperature", 0, None)
        between(self, "top_k", 0, None)
        if not 0 < self.top_p <= 1:
            refuse(self, "top_p", "must be above 0 and at most 1", "1 switches it off")
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if self.temperature == 0 and getattr(self, name) != off:
                refuse(self, name, "temperature 0 is greedy and reads no filter", f"set temperature above 0 or {name} {off:g}")
        if self.sampling_seed is not None:
            between(self, "sampling_seed", 0, 2**64 - 1)
        for name in ("save_cache", "load_cache", "checkpoint"):
            if getattr(self, name) == "":
                refuse(self, name, "must name a folder", "give its path or leave it out")
        one_of(self, "save_cache_at", ("prefill", "end"))
        if self.save_cache is None and self.save_cache_at != "prefill":
            refuse(self, "save_cache_at", "nothing is saved without save_cache", "give --save-cache DIR too")
        between(self, "checkpoint_every", 1, None)
        if self.checkpoint is None and self.checkpoint_every != 256:
            refuse(self, "checkpoint_every", "nothing is kept without checkpoint", "give --checkpoint DIR too")
        if "" in self.stop:
            refuse(self, "stop", "an empty stop string would stop at once", "leave it out")


@dataclass(frozen=True)
class RunConfig:
    """Everything one run is told."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        if self.cache.codec == "tailored" and self.parallel.tp > 1:
            rule = "codec tailored has one scale for all KV heads of a token, which tensor-parallel ranks share out"
            refuse(self.parallel, "tp", rule, f"take tp 1 and sp {self.parallel.tp}")


SECTIONS = {cls.SECTION: cls for cls in (CacheConfig, ParallelConfig, GenerateConfig)}


def build(preset: str, overrides: dict[str, Any]) -> RunConfig:
    """The configuration of a run: a preset (or YAML file), then `overrides` by dotted name, `{"cache.key_bits": 2}`.

    `cache.kv_bits: B` is a shorthand that only overrides know: B bits for keys and values, all of them scanned; 16 means
    the exact codec. An override that names another codec than the preset drops the preset's fields that only its own codec
    reads, so `--codec minmax` works on every preset, and eviction "none" the preset's share. Explicit overrides win over both.
    """
    tree = load_preset(preset)
    overrides = _expand_kv_bits(overrides, tree["cache"].get("codec", CacheConfig.codec))
    if "cache.codec" in overrides:
        tree["cache"] = _for_codec(overrides["cache.codec"], tree["cache"])
    if overrides.get("cache.eviction") == "none":  # of a preset that evicts: how much it keeps says nothing any more
        tree["cache"] = {name: value for name, value in tree["cache"].items() if name != "eviction_keep"}
    for name, value in overrides.items():
        _assign(tree, name, value)
    return RunConfig(**{section: _construct(cls, section, tree[section]) for section, cls in SECTIONS.items()})


def load_preset(name_or_path: str) -> dict[str, dict[str, Any]]:
    """The sections of a preset (a name) or of a YAML file (a path), unchecked but for the names of the sections."""
    tree = read_preset(name_or_path)
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ValueError(f"config {name_or_path!r}: unknown section {section!r}; {near_miss(section, SECTIONS)}")
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"{section} {shown(values)}: must be a mapping of fields; write field: value lines")
    return {section: tree.get(section) or {} for section in SECTIONS}


def _expand_kv_bits(overrides: dict[str, Any], preset_codec: str) -> dict[str, Any]:
    if "cache.kv_bits" not in overrides:
        return overrides
    explicit = {name: value for name, value in overrides.items() if name != "cache.kv_bits"}
    bits, codec = overrides["cache.kv_bits"], explicit.get("cache.codec")
    stored = STORED_BITS.get(str(codec or preset_codec), ())
    allowed = stored if codec else sorted({*stored, *STORED_BITS["exact"]})  # where no codec is asked for 16 changes it
    if stored and (type(bits) is not int or bits not in allowed):
        remedy = "take one of these or another codec" if codec else "take one of these; 16 keeps the cache exact"
        raise ValueError(f"cache.kv_bits {bits!r}: codec {codec or preset_codec} stores {listed(allowed)}; {remedy}")
    implied = {
        "cache.key_bits": bits,
        "cache.value_bits": bits,
        "cache.scan_bits": None,
        "cache.refine": None,
        "cache.layers": (),
    }
    if bits == 16:
        implied["cache.codec"] = "exact"
    return implied | explicit


def _for_codec(codec: str, cache: dict[str, Any]) -> dict[str, Any]:
    preset_codec = cache.get("codec", CacheConfig.codec)
    if codec == preset_codec:
        return cache
    kept = {name: value for name, value in cache.items() if name not in _CODEC_FIELDS}
    if codec in STORED_BITS and (len(STORED_BITS[codec]) == 1 or codec in CALIBRATED):  # words alone, unless bits are asked for
        return kept | {"codec": codec, "key_bits": STORED_BITS[codec][0], "value_bits": STORED_BITS[codec][0]}
    if len(STORED_BITS.get(preset_codec, ())) == 1 or preset_codec in CALIBRATED:
        kept = {name: value for name, value in kept.items() if name not in ("key_bits", "value_bits")}
    return kept | {"codec": codec}


def _assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    if not parents or parents[0] not in SECTIONS:
        raise ValueError(f"override {dotted!r}: must be section.field; {near_miss(dotted.split('.')[0], SECTIONS)}")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise ValueError(f"override {dotted!r}: {parent} is not a section; {near_miss(parent, SECTIONS)}")
    tree[leaf] = value


def _construct(cls: type, section: str, values: dict[str, Any]) -> Any:
    hints = get_type_hints(cls)
    known = [entry.name for entry in fields(cls)]
    arguments = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{section}.{name} {shown(value)}: unknown key; {near_miss(name, known)}")
        if get_origin(hints[name]) is tuple and isinstance(value, list):
            value = tuple(value)
        if RefineConfig in get_args(hints[name]) and isinstance(value, dict):
            value = _construct(RefineConfig, RefineConfig.SECTION, value)
        if LayerConfig in get_args(hints[name]):
            value = _layers(value)
        arguments[name] = value
    return cls(**arguments)


def _layers(entries: Any) -> Any:
    """The list of mappings under cache.layers as LayerConfig; anything else as it came, for the check of types to refuse."""
    if not isinstance(entries, tuple):
        return entries
    made = []
    for entry in entries:
        if not isinstance(entry, dict):
            return entries
        numbers = {"layers": layer_numbers(entry["layers"])} if "layers" in entry else {"layers": ()}
        made.append(_construct(LayerConfig, LayerConfig.SECTION, entry | numbers))
    return tuple(made)
