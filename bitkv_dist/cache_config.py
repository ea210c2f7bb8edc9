"""How keys and values are kept: codec and depth, which tokens are read again with all their planes, which stay exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from bitkv_dist.calibrated import Origin, read_origin
from bitkv_dist.rules import between, check_types, listed, one_of, refuse, resolve
from bitkv_dist.schedule import LayerConfig, layer_ranges

GRANULE_TOKENS = 512  # consecutive tokens of one owner, one selection, one leaf of the merge
LANES = 256  # leaves of the merge tree: a constant of the format, and the largest number of sequence ranks

STORED_BITS = {"planes": (1, 2, 3, 4, 8), "minmax": (2, 4, 8), "exact": (16,), "tailored": (1, 2, 3, 4), "residual": (2,),
               "looped": (2,)}  # tailored: words count as the first bit; looped: of the residuals, its anchors have 4
CALIBRATED = ("tailored", "residual")  # codecs whose codebooks `bitkv calibrate` makes


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

    def check_model(self, layers: int, head_dim: int, positions: int | None = None, loops: int = 1,
                    kv_heads: int | None = None) -> None:
        """Refuse what a model of `layers` layers (those of all its loops), `head_dim` channels per head, `positions` positions
        and `kv_heads` KV heads (None: a rank may have some of them alone) cannot have."""
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
            for name, here in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
                if here is not None and (there := getattr(self.origin, name)) != here:
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
