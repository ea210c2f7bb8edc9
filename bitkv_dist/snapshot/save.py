"""Writing a snapshot: every rank its part, layer range by layer range; rank 0 makes it visible when all parts are there."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from bitkv_dist.cache import PackedCache
from bitkv_dist.kernels import dispatch
from bitkv_dist.snapshot import tensors as parts
from bitkv_dist.snapshot.folder import MANIFEST, Replacement, flush
from bitkv_dist.snapshot.joint import jointly
from bitkv_dist.snapshot.manifest import END, PREFILL, Manifest, SavedSequence, TensorFile, plain

if TYPE_CHECKING:
    from bitkv_dist.engine import Engine

FILE_BYTES = 256 << 20  # of a rank's file, if more than one layer is in it; as much is copied at a time
LOGITS_FILE = "logits.safetensors"

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


def save(
    engine: Engine,
    folder: Path,
    logits: torch.Tensor | None = None,
    progress: Progress = lambda *_: None,
    run: dict[str, Any] | None = None,
    what: str = "save-cache",
) -> int:
    """Put the engine's cache, and all that a run needs to go on from it, into `folder`; collective. Returns the bytes written.

    logits: fp32 [sequences, vocabulary] of the last prompt positions, right after a prefill. run: see Manifest; what: the flag
    that asked for it. A failure on any rank raises on
    all of them and leaves the snapshot that was there (see folder.py). ValueError where the disk has no room or the folder is
    something else.
    """
    mesh = engine.mesh
    for layer in engine.cache.layers:
        for sequence in range(engine.cache.sequences):
            layer.evictor.settle(layer.states[sequence], sequence)
    replacement = Replacement(Path(mesh.broadcast(str(folder.expanduser().resolve()))))
    writer = _Writer(engine, replacement.writing)
    what = f"{what} {folder}: nothing was saved, what was there is unchanged"
    try:
        jointly(mesh, what, replacement.begin, leader_only=True)
        ident = mesh.broadcast(secrets.token_hex(16))
        sizes = jointly(mesh, what, writer.layer_bytes)
        jointly(mesh, what, lambda: writer.check_space(sizes, logits), leader_only=True)
        ranges, written = layer_ranges(sizes), []
        for done, layers in enumerate(ranges, start=1):
            written.append(jointly(mesh, what, lambda layers=layers: writer.write(layers, ident)))
            progress("saving the cache", done, len(ranges))
        return jointly(mesh, what, lambda: writer.finish(replacement, ident, written, logits, run), leader_only=True)[0]
    finally:
        replacement.abandon()


class _Writer:
    """This rank's part of a snapshot."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self.engine, self.place = engine, place
        self.is_copy = engine.mesh.split.replica(engine.model.kv_heads) > 0  # another TP rank writes the same heads
        self.leads_heads = engine.mesh.sp_rank == 0  # writes what all sequence ranks have alike

    def layer_bytes(self) -> list[int]:
        """Bytes that this rank writes of each layer."""
        if self.is_copy:
            return [0] * self.engine.model.layers
        found = []
        for layer in self.engine.cache.layers:
            total = 0
            for state in layer.states:
                pages = sum(1 for _ in state.pages())
                total += pages * layer.cache.heads.kv_heads * layer.codec.record_bytes
                total += sum(tensor.nbytes for tensor in parts.kept(state).values()) if self.leads_heads else 0
            found.append(total)
        return found

    def check_space(self, sizes: list[list[int]], logits: torch.Tensor | None) -> None:
        ids = 8 * sum(map(len, self.engine.histories))  # as text in the manifest
        require_space(self.place, sum(map(sum, sizes)) + ids + (0 if logits is None else logits.nbytes))

    def write(self, layers: range, ident: str) -> tuple[TensorFile, np.ndarray] | None:
        """The file of a range of layers, and the digests uint64 [layers, sequences] of what is in it; None: this rank has
        none."""
        if self.is_copy:
            return None
        cache = self.engine.cache
        first = cache.heads.first_kv_head
        held: dict[str, torch.Tensor] = {}
        digests = np.zeros((len(layers), cache.sequences), dtype=np.uint64)
        for row, index in enumerate(layers):
            for sequence, state in enumerate(cache.layers[index].states):
                pages, records = parts.owned_pages(state)
                kept = parts.kept(state) if self.leads_heads else {}
                held[parts.index_key(sequence)] = torch.tensor(pages, dtype=torch.int64)
                held |= {parts.key(index, sequence, name): tensor for name, tensor in ({parts.PAGES: records} | kept).items()}
                total = parts.digest_pages(records, pages, first) + parts.digest_kept(kept, first)
                digests[row, sequence] = total % parts.MODULUS
        name = f"rank{self.engine.mesh.world.rank:04d}-layers{layers[0]:04d}-{layers[-1]:04d}.safetensors"
        size = write_tensors(self.place / name, held, ident)
        return TensorFile(name, size, (layers[0], layers[-1] + 1), (first, first + cache.heads.kv_heads)), digests

    def finish(
        self, replacement: Replacement, ident: str, written: list, logits: torch.Tensor | None, run: dict[str, Any] | None
    ) -> int:
        """On rank 0: look whether all parts have arrived, write logits and manifest, and make the snapshot visible."""
        engine = self.engine
        written = [list(filter(None, everyone)) for everyone in written]
        files = [file for everyone in written for file, _ in everyone]
        digests = [row for everyone in written for row in sum(digests for _, digests in everyone).tolist()]
        for file in files:
            path = self.place / file.name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise ValueError(f"rank 0 does not see {file.name} as it was written; save where all hosts see the same files")
        logits_digest = None
        if logits is not None:
            content = {parts.LOGITS: logits.cpu().unsqueeze(1)}
            logits_digest = f"{parts.digest_kept(content, 0):016x}"
            files.append(TensorFile(LOGITS_FILE, write_tensors(self.place / LOGITS_FILE, content, ident), (0, 0), (0, 1)))
        model = engine.model
        manifest = Manifest(
            id=ident,
            at=END if logits is None else PREFILL,
            model={
                "name": model.name,
                "fingerprint": f"{model.fingerprint:016x}",
                "layers": model.layers,
                "kv_heads": model.kv_heads,
                "head_dim": model.head_dim,
            },
            cache=plain(engine.cache_config),
            rotation=engine.rotation_digest,
            computed=circumstances(engine),
            sampling_seed=engine.sampler.seed,
            sequences=saved_sequences(engine),
            digests=[[f"{digest:016x}" for digest in layer] for layer in digests],
            logits=logits_digest,
            files=files,
            run=run,
        )
        (self.place / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        flush(self.place / MANIFEST)
        replacement.commit()
        return sum(file.bytes for file in files)


def check_room(engine: Engine, folder: Path, lengths: list[int], what: str = "save-cache", copies: int = 1) -> None:
    """Refuse, before a long prefill, a folder without room for the sealed pages of prompts of these lengths; collective."""
    blank = PackedCache(engine.cache_config, engine.heads, 1)
    state = blank.layers[0].states[0]
    pages = sum(state.held_at(length) - state.sink for length in lengths) // engine.cache_config.page_tokens
    needed = pages * engine.model.kv_heads * sum(layer.codec.record_bytes for layer in blank.layers)
    place = folder.expanduser().resolve().parent
    jointly(engine.mesh, f"{what} {folder}", lambda: require_space(place, copies * needed), leader_only=True)


def require_space(place: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(place).free
    if needed_bytes > free_bytes:
        found = f"needs {needed_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB are free there"
        raise ValueError(f"{found}; free some or save elsewhere")


def saved_sequences(engine: Engine) -> list[SavedSequence]:
    found = []
    for index, tokens in enumerate(engine.histories):
        prompt_tokens, draws = engine.sampler.progress(index, len(tokens))
        cached = engine.cache.length(index)
        found.append(SavedSequence(list(tokens), cached, prompt_tokens, draws, index in engine.ended))
    return found


def circumstances(engine: Engine) -> dict[str, str | int]:
    """What the last bits of logits depend on, besides the cache and the weights; on sp only with some layouts and exchanges."""
    device = engine.model.device
    return {
        "tp": engine.mesh.tp,
        "sp": engine.mesh.sp,
        "layout": "helix" if engine.mesh.split.helix else "replicated",
        "exchange": engine.mesh.exchange,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernel": dispatch.backend(device)[0],
        "torch": str(torch.__version__),
    }


def layer_ranges(sizes: list[list[int]]) -> list[range]:
    """Consecutive layers whose bytes on every rank (sizes[rank][layer]) stay below FILE_BYTES, or single layers."""
    found, first, total = [], 0, 0
    largest = [max(layer) for layer in zip(*sizes, strict=True)]
    for layer, size in enumerate(largest):
        if layer > first and total + size > FILE_BYTES:
            found.append(range(first, layer))
            first, total = layer, 0
        total += size
    return [*found, range(first, len(largest))]


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], ident: str) -> int:
    """A flushed safetensors file that names its snapshot; returns its bytes."""
    save_file(tensors, path, {"snapshot": ident})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes it for its owner alone, whatever the umask
    flush(path)
    return path.stat().st_size
