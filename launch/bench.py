"""What the tasks of `evaluate` measure with: texts, caches with one window, a model, and the file of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from bitkv_dist import checkpoint
from bitkv_dist import model as models
from bitkv_dist.cache_config import CALIBRATED, CacheConfig
from bitkv_dist.calibrated import Origin, read_origin
from bitkv_dist.codec.interface import HeadShape
from bitkv_dist.config import build
from bitkv_dist.evaluate import perplexity
from bitkv_dist.evaluate.ledger import Ledger
from bitkv_dist.launch import flags
from bitkv_dist.launch.display import Bar
from bitkv_dist.parallel import mesh as meshes
from bitkv_dist.preset import preset_names
from bitkv_dist.text import encode_prompt, read_prompt_file

BITS = {field for _, field, _ in flags.BITS}  # what flags say of the depth of all columns but exact ones
AMORTISED_TOKENS = 131072  # of all sequences together: over so many the size of codebooks is shown


class Bench:
    """What a task measures with: texts, caches, and a model that is loaded when the first missing cell needs it."""

    def __init__(self, asked: SimpleNamespace) -> None:
        self.asked = asked
        self.bits = {name: value for name, value in asked.overrides.items() if name in BITS}
        self.run = build("exact", {name: value for name, value in asked.overrides.items() if name not in BITS})
        self.model_config = models.check(self.run.generate.model)
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bars = {unit: Bar(self.console, unit) for unit in ("", "tokens")}

    # -- caches

    @property
    def window(self) -> dict[str, int]:
        """The window policy that all columns share."""
        return {name: getattr(self.run.cache, name) for name in ("page_tokens", "sink_tokens", "recent_tokens", "seed")}

    def columns(self) -> dict[str, CacheConfig]:
        """The caches of --compare by name, in their order, all with the common window."""
        window = {f"cache.{name}": value for name, value in self.window.items()}
        window |= {name: value for name, value in self.asked.overrides.items() if name.startswith("cache.eviction")}
        found = {Path(name).stem: self.built(name, window) for name in self.asked.compare}
        if len(found) < len(self.asked.compare):
            raise ValueError(f"compare {','.join(self.asked.compare)}: two of them have the same name; rename a file")
        self.check_presets(found, window)
        self.check_different(found)
        self.check_calibrations(found.values())
        return found

    def cache(self) -> CacheConfig:
        """The one cache of --config, with its own window where no flag says otherwise."""
        window = {name: value for name, value in self.asked.overrides.items() if name not in BITS}
        found = self.built(self.asked.config, window)
        self.check_calibrations([found])
        return found

    def built(self, name: str, overrides: dict[str, Any]) -> CacheConfig:
        """The cache of a preset, a YAML file, a calibration file, or a codec that a file of --calibration was made for."""
        if name in CALIBRATED:
            files = [path for path in self.asked.calibration if self.origin(path).codec == name]
            if len(files) != 1:
                rule = f"{len(files)} files of --calibration hold its codebooks, it takes one"
                remedy = f"give one made by bitkv calibrate --codec {name}, or name the files themselves"
                raise ValueError(f"codec {name}: {rule}; {remedy}")
            name = files[0]
        calibrated: dict[str, Any] = {}
        if Path(name).suffix == ".safetensors":
            name, calibrated = "exact", {"cache.codec": self.origin(name).codec, "cache.calibration": name}
        cache = build(name, overrides | calibrated).cache
        if cache.codec != "exact" and self.bits:
            cache = build(name, overrides | calibrated | self.bits).cache
        shape = self.shape
        cache.check_model(shape.layers, shape.head_dim, loops=shape.loops, kv_heads=shape.kv_heads)
        return cache

    def origin(self, path: str) -> Origin:
        try:
            return read_origin(path)
        except ValueError as error:
            raise ValueError(f"calibration {path!r}: {error}") from None

    def book_notes(self, caches: dict[str, CacheConfig]) -> list[str]:
        """What the stored bits leave out: the codebooks of calibrated caches, which all pages of all sequences share."""
        found = []
        for name, cache in caches.items():
            if cache.calibration is not None:
                size, shape = Path(cache.calibration).stat().st_size, self.shape
                elements = 2 * shape.layers * shape.kv_heads * shape.head_dim * AMORTISED_TOKENS
                share = f"{size * 8 / elements:.3f} bits per element of {AMORTISED_TOKENS:,} tokens"
                found.append(f"{name}: its codebooks, {size / 1e6:.1f} MB, are not in the stored bits ({share})")
                found.append(f"{name}: {cache.origin.described()}, digest {cache.origin.digest}")
        return found

    def check_presets(self, columns: dict[str, CacheConfig], window: dict[str, Any]) -> None:
        """Refuse bits that a preset does not have whose name says how many it has."""
        names = [name for name in self.asked.compare if name in preset_names() and any(map(str.isdigit, name))]
        for name in names if self.bits else ():
            if columns[name] != build(name, window).cache:
                rule = f"the name says its bits, and with {self.given_bits} it would have others"
                remedy = "leave it out, or name a codec such as tailored or a YAML file"
                raise ValueError(f"compare {name}: {rule}; {remedy}")

    @property
    def given_bits(self) -> str:
        return ", ".join(f"{field} {value}" for field, value in self.bits.items())

    def check_different(self, columns: dict[str, CacheConfig]) -> None:
        """Refuse bits that make two columns one."""
        seen: dict[str, str] = {}
        for name, cache in columns.items() if self.bits else ():
            first = seen.setdefault(repr(cache.identity()), name)
            if first != name:
                raise ValueError(f"compare {first},{name}: are the same cache with {self.given_bits}; leave one of them out")

    def check_calibrations(self, caches: Iterable[CacheConfig]) -> None:
        """Refuse a file of --calibration that no cache reads."""
        for path in set(self.asked.calibration) - {cache.calibration for cache in caches}:
            rule = f"nothing that is asked for is codec {self.origin(path).codec}"
            raise ValueError(f"calibration {path!r}: {rule}; name the codec or leave it out")

    # -- texts

    def texts(self) -> dict[str, Path]:
        """The files of --text by their names."""
        paths = {Path(text).name: Path(text) for text in self.asked.text}
        if len(paths) < len(self.asked.text):
            raise ValueError(f"text {' '.join(self.asked.text)}: two files have the same name; rename one")
        return paths

    def text(self) -> Path:
        if len(self.asked.text) > 1:
            raise ValueError(f"text {' '.join(self.asked.text)}: task {self.asked.task} takes one text; give one")
        return Path(self.asked.text[0])

    def digest(self, path: Path) -> str:
        return blake2b(read_prompt_file(str(path), "--text").encode(), digest_size=8).hexdigest()

    def encode(self, path: Path) -> list[int]:
        return encode_prompt(self.tokenizer, read_prompt_file(str(path), "--text"))

    def check_positions(self, ids: list[int]) -> tuple[int, int]:
        """--positions, which the text and the model must have."""
        first, last = self.asked.positions
        perplexity.check_positions(first, last, len(ids), self.run.generate.model, self.max_positions)
        return first, last

    # -- the model

    @property
    def max_positions(self) -> int:
        return models.max_positions_of(self.model_config)

    @property
    def shape(self) -> HeadShape:
        config = self.model_config
        heads = (models.layers_of(config), 0, config.num_key_value_heads, models.head_dim_of(config), torch.float32)
        return HeadShape(*heads, loops=models.loops_of(config))

    @cached_property
    def mesh(self) -> meshes.Mesh:
        return meshes.start(self.run.parallel)

    @cached_property
    def tokenizer(self) -> Any:
        place = checkpoint.localise(self.run.generate.model, self._bars[""])
        return checkpoint.read_tokenizer(place)

    @cached_property
    def model(self) -> models.ServedModel:
        dtype = getattr(torch, self.run.generate.dtype) if self.run.generate.dtype else None
        place = {"device": self.mesh.world.device, "weights": self.run.generate.weights}
        return models.load(self.run.generate.model, dtype=dtype, progress=self._bars[""], **place)

    # -- results

    def ledger(self, key: tuple[str, ...], settings: dict[str, Any]) -> Ledger:
        """The file of --json, or rows in memory. settings: what decides about the numbers, beside model and window."""
        generate = self.run.generate
        common = {"task": self.asked.task, "model": generate.model, "dtype": generate.dtype, "weights": generate.weights}
        common["window"] = self.window
        return Ledger(self.asked.json, key, common | settings)

    def progress(self, what: str, unit: str = "tokens") -> Callable[[float, int], None]:
        return lambda done, total: self._bars[unit](what, done, total)

    def stop_bars(self) -> None:
        for bar in self._bars.values():
            bar.stop()
