"""What a run is told: small frozen dataclasses, read from a YAML preset and overridden field by field.

Nothing is guessed and nothing is ignored: an unknown section or key, a value of the wrong type and a combination that no
code serves are each a one-line `ValueError` that names the field, the value, the rule and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from bitkv_dist.calibrated import Origin, read_origin
from bitkv_dist.preset import read_preset
from bitkv_dist.rules import between, check_types, listed, near_miss, one_of, refuse, resolve, shown
from bitkv_dist.schedule import LayerConfig, layer_numbers, layer_ranges
from bitkv_dist.split import LAYOUTS

GRANULE_TOKENS = 512  # consecutive tokens of one owner, one selection, one leaf of the merge
LANES = 256  # leaves of the merge tree: a constant of the format, and the largest number of sequence ranks

STORED_BITS = {"planes": (1, 2, 3, 4, 8), "minmax": (2, 4, 8), "exact": (16,), "tailored": (1, 2, 3, 4), "residual": (2,),
               "looped": (2,)}  # tailored: words count as the first bit; looped: of the residuals, its anchors have 4
CALIBRATED = ("tailored", "residual")  # codecs whose codebooks `bitkv calibrate` makes
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("auto", "model", "bfloat16")
EXCHANGES = ("auto", "allgather", "alltoall", "allreduce")
_CODEC_FIELDS = ("scan_bits", "refine", "score", "correction", "key_group_tokens", "value_group_channels", "layers",
                 "calibration", "calibration_digest")  # fmt: skip


@dataclass(frozen=True)
class RefineConfig:
    """Which sealed tokens are read again with all their planes."""

    SECTION: ClassVar[str] = "cache.refine"

    rule: str = "fraction"  # fraction: fixed share of the sealed tokens | mass: smallest set that reaches the weight
    value: float = 0.05
    scope: str = "granule"  # granule: chosen inside each 512 tokens | global: among all sealed tokens
    granularity: str = "group"  # group: one set per GQA group | head: one per query head
    min_tokens: int = 1  # at least so many, per granule (or per sequence with scope global)
    skip_below: float | None = None  # a granule with no token above 2^-skip_below of the exact tokens' weight refines nothing

    def __post_init__(self) -> None:
        check_types(self)
        one_of(self, "rule", ("fraction", "mass"))
        one_of(self, "scope", ("granule", "global"))
        one_of(self, "granularity", ("group", "head"))
        between(self, "value", 0, 1)
        between(self, "min_tokens", 0, GRANULE_TOKENS)
        if self.skip_below is not None and self.skip_below <= 0:
            refuse(self, "skip_below", "must be above 0 bits", "20 skips what is below a millionth")
        if self.scope == "global":
            if self.rule == "mass":
                refuse(self, "scope", "rule mass chooses inside each granule", "take rule fraction or scope granule")
            if self.skip_below is not None:
                refuse(self, "skip_below", "scope global refines nothing in granules that do not matter", "leave it out")
        if self.rule == "mass" and self.value == 0:
            refuse(self, "value", "a mass of 0 selects nothing", "give the weight to cover, such as 0.95")


@dataclass(frozen=True)
class CacheConfig:
    """How keys and values are kept: the codec, its depth, and which tokens stay exact."""

    SECTION: ClassVar[str] = "cache"

    codec: str = "planes"  # planes | minmax | exact | tailored | residual | looped
    key_bits: int = 4
    value_bits: int = 4
    scan_bits: int | None = None  # planes read for every token; None = all of them, so nothing is refined
    refine: RefineConfig | None = None  # filled in with its defaults when planes are left to refine
    score: str = "mse"  # scale of the scanned code: mse | unbiased | fitted
    correction: bool = True  # log-normal correction of the scores of sealed tokens
    calibration: str | None = None  # tailored, residual: the file of codebooks
    calibration_digest: str | None = None  # of its content, filled in; given, another file is refused
    key_group_tokens: int | None = None  # minmax: tokens per scale of a key channel (64)
    value_group_channels: int | None = None  # minmax: channels per scale of a value (32)
    layers: tuple[LayerConfig, ...] = ()  # layers that are kept differently: see for_layer
    page_tokens: int = 128
    sink_tokens: int = 128  # rounded up to whole pages: see sink_rounded
    recent_tokens: int = 128
    seed: int = 0
    eviction: str = "none"  # none | window: the newest sealed pages stay | heavy: those that receive most attention
    eviction_keep: float | None = None  # below 1: share of the sealed tokens that stay; else so many tokens, in whole pages

    def __post_init__(self) -> None:
        check_types(self)
        one_of(self, "codec", STORED_BITS)
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) not in STORED_BITS[self.codec]:
                rule = f"codec {self.codec} stores {listed(STORED_BITS[self.codec])}"
                refuse(self, name, rule, "take one of these or another codec")
        one_of(self, "score", ("mse", "unbiased", "fitted"))
        one_of(self, "page_tokens", (64, 128))
        between(self, "sink_tokens", 0, None)
        between(self, "recent_tokens", 0, None)
        between(self, "seed", 0, 2**64 - 1)
        self._only_for(("planes",), ("score",))
        self._only_for(("planes", "tailored"), ("scan_bits", "refine"))
        self._only_for(("planes", "looped", *CALIBRATED), ("correction",))
        self._only_for(("minmax",), ("key_group_tokens", "value_group_channels"))
        self._only_for(CALIBRATED, ("calibration", "calibration_digest"))
        if self.codec == "planes":
            self._check_scan()
        if self.codec == "tailored":
            self._check_words()
        if self.codec == "minmax":
            self._check_groups()
        if self.codec in CALIBRATED:
            self._check_calibration()
        self._check_layers()
        self._check_eviction()

    def _only_for(self, codecs: tuple[str, ...], names: Iterable[str]) -> None:
        if self.codec in codecs:
            return
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                remedy = f"leave it out or set codec: {' or '.join(codecs)}"
                refuse(self, name, f"only codec {', '.join(codecs)} reads it", remedy)

    def _check_scan(self) -> None:
        deepest = max(self.key_bits, self.value_bits)
        if self.scan_bits is not None:
            between(self, "scan_bits", 1, deepest)
        if self.refines:
            resolve(self, "refine", self.refine or RefineConfig())
        elif self.refine is not None:
            refuse(self, "refine", "all planes are scanned, nothing is left to refine", f"set scan_bits below {deepest}")

    def _check_words(self) -> None:
        """The words are what is scanned, whatever lies below them."""
        if (self.key_bits == 1) != (self.value_bits == 1):
            rule = f"value_bits are {self.value_bits}, and what words leave over is kept of keys and values alike"
            refuse(self, "key_bits", rule, "take 1 for both, or 2 to 4 for both")
        if self.scan_bits is None and self.key_bits > 1:
            resolve(self, "scan_bits", 1)
        if self.scan_bits not in (None, 1):
            refuse(self, "scan_bits", "codec tailored scans its words, which count as one bit", "leave it out")
        self._check_scan()
        if self.refines and (self.refine.rule, self.refine.scope, self.refine.skip_below) != ("fraction", "granule", None):
            rule = "codec tailored refines a share of the tokens of each granule"
            refuse(self, "refine", rule, "take rule fraction and scope granule without skip_below")

    def _check_groups(self) -> None:
        resolve(self, "key_group_tokens", 64 if self.key_group_tokens is None else self.key_group_tokens)
        resolve(self, "value_group_channels", 32 if self.value_group_channels is None else self.value_group_channels)
        one_of(self, "key_group_tokens", [n for n in (16, 32, 64, 128) if n <= self.page_tokens])
        one_of(self, "value_group_channels", (8, 16, 32, 64, 128))

    def _check_calibration(self) -> None:
        if self.calibration is None:
            remedy = "make one with bitkv calibrate and give --calibration FILE"
            refuse(self, "calibration", f"codec {self.codec} needs a file of codebooks", remedy)
        origin = self.origin
        if origin.codec != self.codec:
            rule = f"holds codebooks of codec {origin.codec}, not {self.codec}"
            refuse(self, "calibration", rule, f"set codec: {origin.codec} or give another file")
        if self.calibration_digest not in (None, origin.digest):
            refuse(self, "calibration_digest", f"the file has {origin.digest}", "give the file that was meant, or leave it out")
        resolve(self, "calibration_digest", origin.digest)

    def _check_eviction(self) -> None:
        one_of(self, "eviction", ("none", "window", "heavy"))
        keep = self.eviction_keep
        if self.eviction == "none":
            if keep is not None:
                refuse(self, "eviction_keep", "nothing is evicted without a rule", "set eviction: window or heavy")
            return
        if self.codec == "looped":
            rule = "codec looped seals a page of all loops at once and gives none of them up"
            refuse(self, "eviction", rule, "leave it out or set codec: planes")
        if keep is None:
            refuse(self, "eviction", "how much stays is not said", "set eviction_keep to a share such as 0.25, or to tokens")
        if keep < 0 or (keep >= 1 and keep % 1):
            rule = "must be a share of the sealed tokens below 1, or a whole number of tokens"
            refuse(self, "eviction_keep", rule, "take 0.25 or 4096")
        if keep == 0 and self.eviction == "heavy":
            refuse(self, "eviction_keep", "leaves rule heavy nothing to choose", "set eviction: window")
        learns = "score fitted" if self.score == "fitted" else "refine.rule mass"
        if self.score == "fitted" or (self.refine is not None and self.refine.rule == "mass"):
            refuse(self, "eviction", f"{learns} learns from all pages of the prompt", "take score mse and rule fraction")

    def kept_pages(self, sealed_pages: int) -> int:
        """How many of so many sealed pages stay."""
        if self.eviction == "none":
            return sealed_pages
        keep = self.eviction_keep
        most = math.ceil(keep * sealed_pages) if keep < 1 else math.ceil(keep / self.page_tokens)
        return min(sealed_pages, most)

    @property
    def origin(self) -> Origin:
        """What the calibration file says about itself; ValueError where it cannot."""
        try:
            return read_origin(self.calibration)
        except ValueError as error:
            raise ValueError(f"{self.SECTION}.calibration {self.calibration!r}: {error}") from None

    def identity(self) -> dict[str, Any]:
        """All fields that decide about bytes and numbers: a calibration file by its content, not by where it lies."""
        return {name: value for name, value in asdict(self).items() if name != "calibration"}

    def _check_layers(self) -> None:
        if self.layers and self.codec == "looped":
            refuse(self, "layers", "codec looped keeps the layers of all loops alike", "leave it out or set codec: planes")
        seen: set[int] = set()
        for entry in self.layers:
            if twice := seen.intersection(entry.layers):
                refuse(self, "layers", f"layer {min(twice)} is in two entries", "put all it needs into one")
            seen.update(entry.layers)
            try:
                self.for_layer(entry.layers[0])
            except ValueError as error:
                raise ValueError(f"cache.layers {layer_ranges(entry.layers)}: {error}") from None

    def for_layer(self, index: int) -> CacheConfig:
        """How one layer is kept: its entry in `layers` over the common fields.

        Where it stores fewer planes than the common scan reads, all of them are scanned.
        """
        entry = next((entry for entry in self.layers if index in entry.layers), None)
        if entry is None:
            return replace(self, layers=())
        changed = dict(entry.overrides)
        refine_value = changed.pop("refine_value", None)
        deepest = max(changed.get("key_bits", self.key_bits), changed.get("value_bits", self.value_bits))
        if "scan_bits" not in changed and self.scan_bits is not None:
            changed["scan_bits"] = min(self.scan_bits, deepest)
        refine = self.refine
        if refine_value is not None:
            refine = replace(refine or RefineConfig(), value=refine_value)
        elif (changed.get("scan_bits", self.scan_bits) or deepest) >= deepest:
            refine = None
        return replace(self, layers=(), refine=refine, **changed)

    def check_model(self, layers: int, head_dim: int, positions: int | None = None, loops: int = 1) -> None:
        """Refuse what a model of `layers` layers (those of all its loops), `head_dim` channels per head and `positions`
        positions cannot have."""
        if self.codec == "looped" and loops < 2:
            rule = "the model runs its layers once, so that no loop can be the anchor of others"
            refuse(self, "codec", rule, "take a model that loops (ouro), or another codec such as planes")
        for name in ("sink_tokens", "recent_tokens"):
            if positions is not None and getattr(self, name) > positions:
                rule = f"the model has {positions} positions"
                refuse(self, name, rule, f"take at most {positions}; --kv-bits 16 keeps all tokens exact")
        group = min(self.value_group_channels or 1, head_dim)
        if head_dim % group:
            most = head_dim & -head_dim
            raise ValueError(f"cache.value_group_channels {group}: must divide the head dim {head_dim}; take {most}")
        if self.calibration is not None:
            for name, here in (("layers", layers), ("head_dim", head_dim)):
                if (there := getattr(self.origin, name)) != here:
                    rule = f"was made for {self.origin.model}, whose {name} are {there}; this model's are {here}"
                    refuse(self, "calibration", rule, "calibrate with this model")
        last = max((layer for entry in self.layers for layer in entry.layers), default=0)
        if last >= layers:
            raise ValueError(
                f"cache.layers {last}: the model has layers 0 to {layers - 1}; take the entry out or another model"
            )

    @property
    def key_scan_bits(self) -> int:
        """Planes of every sealed key that a decode step reads."""
        return min(self.scan_bits or self.key_bits, self.key_bits)

    @property
    def value_scan_bits(self) -> int:
        """Planes of every sealed value that a decode step reads."""
        return min(self.scan_bits or self.value_bits, self.value_bits)

    @property
    def refines(self) -> bool:
        """Whether keys or values have planes that the scan leaves out."""
        return (self.key_scan_bits, self.value_scan_bits) != (self.key_bits, self.value_bits)

    @property
    def sink_rounded(self) -> int:
        """Tokens at the start that are never sealed: `sink_tokens` in whole pages."""
        return -(-self.sink_tokens // self.page_tokens) * self.page_tokens


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
    cpu_isa: str = "auto"  # of the CPU kernels: auto (the best of the machine) | avx512 | avxvnni | avx2 | portable
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
        one_of(self, "cpu_isa", ("auto", "avx512", "avxvnni", "avx2", "portable"))
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
    reads, so `--codec minmax` works on every preset. Explicit overrides win over both.
    """
    tree = load_preset(preset)
    overrides = _expand_kv_bits(overrides)
    if "cache.codec" in overrides:
        tree["cache"] = _for_codec(overrides["cache.codec"], tree["cache"])
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


def _expand_kv_bits(overrides: dict[str, Any]) -> dict[str, Any]:
    if "cache.kv_bits" not in overrides:
        return overrides
    explicit = {name: value for name, value in overrides.items() if name != "cache.kv_bits"}
    bits = overrides["cache.kv_bits"]
    allowed = sorted({bits for codec in STORED_BITS.values() for bits in codec})
    if type(bits) is not int or bits not in allowed:
        raise ValueError(f"cache.kv_bits {bits!r}: must be one of {listed(allowed)}; 16 keeps the cache exact")
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
