"""What a snapshot says about itself, and whether it serves a run: manifest.json, read before any weight is.

Refusals are a ValueError of one line that goes on where "load-cache DIR: " ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.promise import BYTES, CLOSE, IDENTICAL, TURNED, free_of_sp
from bitkv_dist.snapshot.folder import FORMAT, MANIFEST

VERSION = 2
PREFILL, END = "prefill", "end"


@dataclass(frozen=True)
class SavedSequence:
    """One sequence. tokens: all ids so far; the first `cached` of them are in the cache, the rest (at most one) was sampled and
    not fed yet. The answer in progress began after `prompt_tokens` of them and took `draws` random numbers. ended: by a stop
    token or text."""

    tokens: list[int]
    cached: int
    prompt_tokens: int
    draws: int
    ended: bool

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cached :]

    def stopped(self, max_positions: int) -> str | None:
        """Why the sequence does not go on by itself, in a model of so many positions; None if it does."""
        if self.ended:
            return "stop"
        return "length" if self.cached >= max_positions else None


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file: what one rank held of the layers and global KV heads in these half-open ranges.

    snapshot: id of the one that it was written for. sequence, granules: of a file that holds nothing but sealed pages of one
    sequence, those in this half-open range, with digests as in Manifest, one per layer.
    """

    name: str
    bytes: int
    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    snapshot: str
    sequence: int | None = None
    granules: tuple[int, int] | None = None
    digests: list[str] | None = None


@dataclass(frozen=True)
class Manifest:
    """model: name, fingerprint, layers, kv_heads, head_dim. computed: what the last bits of logits depend on, and sp.

    digests: 16 hex digits for each layer and sequence (see tensors.digest); logits: the same for those of the last prompt
    positions, None if they are not saved. run: of a checkpoint, the settings that its run chose its tokens with.
    """

    id: str
    at: str  # prefill | end
    model: dict[str, Any]
    cache: dict[str, Any]
    rotation: str
    computed: dict[str, Any]
    sampling_seed: int
    sequences: list[SavedSequence]
    digests: list[list[str]]
    logits: str | None
    files: list[TensorFile]
    run: dict[str, Any] | None = None

    # -- on disk

    def text(self) -> str:
        """One line per field; the last is a digest of the others."""
        content = {"format": FORMAT, "version": VERSION} | vars(self)
        for name in ("sequences", "files"):
            content[name] = list(map(vars, content[name]))  # asdict would copy a million token ids one by one
        content["digest"] = content_digest(content)
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "\n}\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Refuse what is not a whole and unchanged manifest of this version."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{MANIFEST} cannot be read ({error.strerror}); copy the folder whole") from None
        except ValueError:
            raise ValueError(f"{MANIFEST} is truncated or not JSON; save the snapshot again") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{MANIFEST} is not that of a {FORMAT}; give a folder that --save-cache has made")
        if content.get("version") != VERSION:
            found = f"version {content.get('version')} of the format"
            raise ValueError(f"{found}, this program reads version {VERSION}; save the snapshot again")
        if content.pop("digest", None) != content_digest(content):
            raise ValueError(f"{MANIFEST} was changed after it was written; save the snapshot again")
        content["sequences"] = [SavedSequence(**each) for each in content["sequences"]]
        ranges = ("layers", "kv_heads", "granules")
        files = [each | {name: tuple(each[name]) for name in ranges if each[name]} for each in content["files"]]
        content["files"] = [TensorFile(**each) for each in files]
        del content["format"], content["version"]
        return cls(**content)

    def check_files(self, folder: Path) -> None:
        """Refuse a folder that lacks a file, or has it with another size."""
        for file in self.files:
            try:
                size = (folder / file.name).stat().st_size
            except OSError as error:
                raise ValueError(f"{file.name} is missing ({error.strerror}); copy it whole") from None
            if size != file.bytes:
                rule = f"{size} bytes, it was written with {file.bytes}"
                raise ValueError(f"{file.name} is truncated or another file ({rule}); copy it whole")

    # -- whether it serves a run

    def check_run(self, cache: CacheConfig, layers: int, kv_heads: int, head_dim: int) -> None:
        """Refuse another cache configuration or a model of another shape."""
        for name, here in {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}.items():
            if self.model[name] != here:
                rule = f"it has {self.model[name]} {name}, this one {here}"
                raise ValueError(f"is of another model, {self.model['name']} ({rule}); load it with that")
        for name, here in plain(cache).items():
            there = self.cache.get(name)
            if there != here:
                remedy = "run with the configuration of the snapshot"
                raise ValueError(f"cache.{name} is {there!r} there and {here!r} in this run; {remedy}")

    def check_same_run(self, settings: dict[str, Any], prompts: Sequence[list[int]]) -> None:
        """Refuse what is no checkpoint of a run with these settings and prompts."""
        remedy = "start that run again as it was, or give another folder"
        if self.run is None:
            raise ValueError("holds a snapshot that --save-cache has made; give another folder, or load it with --load-cache")
        for name, here in settings.items():
            if self.run.get(name) != here:
                raise ValueError(f"is of a run with {name} {self.run.get(name)!r}, here it is {here!r}; {remedy}")
        if len(prompts) != len(self.sequences):
            raise ValueError(f"is of a run with {len(self.sequences)} prompts, here are {len(prompts)}; {remedy}")
        for index, (prompt, saved) in enumerate(zip(prompts, self.sequences, strict=True)):
            if saved.tokens[: saved.prompt_tokens] != prompt:
                raise ValueError(f"is of a run with another prompt {index}; {remedy}")

    def check_model(self, fingerprint: str, rotation: str, dtype: str) -> None:
        """Refuse other weights, other rotations, and pages of another type."""
        if self.model["fingerprint"] != fingerprint:
            there = f"fingerprint {self.model['fingerprint']} of {self.model['name']} there, {fingerprint} here"
            how = "load it with the model, --dtype and --weights that it was saved with"
            raise ValueError(f"is of other weights ({there}); {how}")
        if self.rotation != rotation:
            raise ValueError(f"rotation digest {self.rotation} there, {rotation} here; save it again")
        if self.cache["codec"] == "exact" and self.computed["dtype"] != dtype:
            there = self.computed["dtype"]
            raise ValueError(f"codec exact keeps pages in the model's dtype, {there}; use --dtype {there}")

    def match(self, prompts: Sequence[list[int]]) -> list[int]:
        """For each prompt the index of the sequence that it begins with; a lone sequence serves any number of prompts."""
        held = len(self.sequences)
        if held not in (1, len(prompts)):
            rule = f"holds {held} sequences, for {held} prompts in the same order"
            raise ValueError(f"{rule}, not {len(prompts)}; give so many, or none to go on with all")
        sources = [index if held > 1 else 0 for index in range(len(prompts))]
        for index, (prompt, source) in enumerate(zip(prompts, sources, strict=True)):
            self.check_prefix(index, prompt, self.sequences[source])
        return sources

    def check_prefix(self, index: int, prompt: list[int], saved: SavedSequence) -> None:
        cached = saved.tokens[: saved.cached]
        pairs = enumerate(zip(cached, prompt, strict=False))
        first = next((at for at, (there, here) in pairs if there != here), min(len(cached), len(prompt)))
        remedy = "a prompt must begin with all tokens of the snapshot"
        if first < len(prompt) and first < len(cached):
            found = f"prompt {index} differs at token {first} ({cached[first]} there, {prompt[first]} here)"
            raise ValueError(f"{found}; {remedy}")
        if first < len(cached):
            found = f"prompt {index} ends at token {first}, where the snapshot goes on to {len(cached)}"
            raise ValueError(f"{found}; {remedy}")
        if len(prompt) == len(cached) and self.logits is None:
            found = f"prompt {index} has no token beyond the {first} cached ones, whose logits were not saved"
            raise ValueError(f"{found}; give a longer prompt, or none to go on")

    def check_goes_on(self, max_positions: int) -> None:
        """Refuse to go on without prompts where no sequence can."""
        if self.logits is None and all(sequence.stopped(max_positions) for sequence in self.sequences):
            raise ValueError("all its sequences have ended; give a prompt or --interactive to go on")

    def promise(self, here: dict[str, Any]) -> str:
        """What holds for the tokens of a run computed `here` against those of the run that saved."""
        there = self.computed
        free = free_of_sp(here["layout"], here["exchange"])
        same = all(there[name] == value for name, value in here.items() if name != "sp" or not free)
        if same and (free or here["exchange"] != "allreduce"):
            return IDENTICAL
        if not here["dtype"] == there["dtype"] == "float32":
            return BYTES
        return CLOSE if self.cache["codec"] == "exact" else TURNED


def plain(config: CacheConfig) -> dict[str, Any]:
    """A configuration as JSON reads it back."""
    return json.loads(json.dumps(config.identity()))


def content_digest(content: dict[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
