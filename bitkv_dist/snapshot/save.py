"""Writing a snapshot: every rank its part, file by file; rank 0 makes it visible when all parts are there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
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
from bitkv_dist.snapshot.pieces import Piece, bounded, layer_bytes, pieces
from bitkv_dist.snapshot.saved import Saved

if TYPE_CHECKING:
    from bitkv_dist.engine import Engine

LOGITS_FILE = "logits.safetensors"

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all
Written = tuple[TensorFile, np.ndarray]  # a file, and the digests uint64 [layers, sequences] of what is in it


def save(
    engine: Engine,
    folder: Path,
    logits: torch.Tensor | None = None,
    progress: Progress = lambda *_: None,
    run: dict[str, Any] | None = None,
    what: str = "save-cache",
    before: Saved | None = None,
) -> Saved:
    """Put the engine's cache, and all that a run needs to go on from it, into `folder`; collective.

    logits: fp32 [sequences, vocabulary] of the last prompt positions, right after a prefill. run: see Manifest; what: the flag
    that asked for it. before: the snapshot in `folder`, if it is one of this cache: what has not changed since is not written
    again. A failure on any rank raises on all of them and leaves the snapshot that was there (see folder.py). ValueError where
    the disk has no room or the folder is something else.
    """
    mesh = engine.mesh
    for layer in engine.cache.layers:
        for sequence in range(engine.cache.sequences):
            layer.evictor.settle(layer.states[sequence], sequence)
    replacement = Replacement(Path(mesh.broadcast(str(folder.expanduser().resolve()))))
    writer = _Writer(engine, replacement, before)
    what = f"{what} {folder}: nothing was saved, what was there is unchanged"
    try:
        jointly(mesh, what, replacement.begin, leader_only=True)
        ident = mesh.broadcast(secrets.token_hex(16))
        found = pieces(engine.cache, bounded(jointly(mesh, what, lambda: layer_bytes(engine.cache))))
        sizes = jointly(mesh, what, lambda: [writer.new_bytes(piece) for piece in found])
        jointly(mesh, what, lambda: writer.check_space(sizes, logits), leader_only=True)
        written, steps = [], bounded(sizes)
        for done, step in enumerate(steps, start=1):
            some = found[step.start : step.stop]
            written += jointly(mesh, what, lambda some=some: [writer.write(piece, ident) for piece in some])
            progress("saving the cache", done, len(steps))
        files = [file for everyone in written for file in everyone if file is not None]
        size = jointly(mesh, what, lambda: writer.finish(replacement, ident, files, logits, run), leader_only=True)[0]
        writer.saved.bytes, writer.saved.new_bytes = size
        return writer.saved
    finally:
        replacement.abandon()


class _Writer:
    """This rank's part of a snapshot. saved: what it has written, or taken over, of it."""

    def __init__(self, engine: Engine, replacement: Replacement, before: Saved | None) -> None:
        self.engine, self.place, self.old_place = engine, replacement.writing, replacement.target
        self.before, self.saved = before or Saved(engine.cache), Saved(engine.cache)
        self.is_copy = engine.mesh.split.replica(engine.model.kv_heads) > 0  # another TP rank writes the same heads
        self.leads_heads = engine.mesh.sp_rank == 0  # writes what all sequence ranks have alike

    def old_file(self, piece: Piece) -> TensorFile | None:
        """The file with this piece in the folder that is replaced, if it has one."""
        if piece.sequence is None:
            return None
        return self.before.held(self.engine.cache, piece, piece.name(self.engine.mesh.world.rank), self.old_place)

    def new_bytes(self, piece: Piece) -> int:
        """Bytes that this rank has to write of a piece."""
        if self.is_copy or self.old_file(piece) is not None:
            return 0
        total = 0
        for index, sequence, slots in piece.slots(self.engine.cache):
            layer = self.engine.cache.layers[index]
            total += len(slots) * layer.cache.heads.kv_heads * layer.codec.record_bytes
            if piece.sequence is None and self.leads_heads:
                total += sum(tensor.nbytes for tensor in parts.kept(layer.states[sequence]).values())
        return total

    def check_space(self, sizes: list[list[int]], logits: torch.Tensor | None) -> None:
        ids = 8 * sum(map(len, self.engine.histories))  # as text in the manifest
        require_space(self.place, sum(map(sum, sizes)) + ids + (0 if logits is None else logits.nbytes))

    def write(self, piece: Piece, ident: str) -> Written | None:
        """The file of a piece; None: this rank has nothing of it."""
        if self.is_copy:
            return None
        return self.take_over(piece) or self.write_new(piece, ident)

    def take_over(self, piece: Piece) -> Written | None:
        """The file that holds the piece already, where the file system gives it another name."""
        old = self.old_file(piece)
        if old is None:
            return None
        try:
            os.link(self.old_place / old.name, self.place / old.name)
        except OSError:  # refused there, or too many: it is written anew
            return None
        digests = np.zeros((len(piece.layers), self.engine.cache.sequences), dtype=np.uint64)
        digests[:, piece.sequence] = [int(digest, 16) for digest in old.digests]
        self.saved.add(piece, old, self.place / old.name)
        return old, digests

    def write_new(self, piece: Piece, ident: str) -> Written | None:
        cache, rank = self.engine.cache, self.engine.mesh.world.rank
        first, rest = cache.heads.first_kv_head, piece.sequence is None
        held: dict[str, torch.Tensor] = {}
        digests, pages = np.zeros((len(piece.layers), cache.sequences), dtype=np.uint64), 0
        for layer, sequence, slots in piece.slots(cache):
            state = cache.layers[layer].states[sequence]
            records = parts.records(state, slots)
            kept = parts.kept(state) if rest and self.leads_heads else {}
            held[parts.index_key(sequence)] = torch.tensor(slots, dtype=torch.int64)
            held |= {parts.key(layer, sequence, name): tensor for name, tensor in ({parts.PAGES: records} | kept).items()}
            total = parts.digest_pages(records, slots, first) + parts.digest_kept(kept, first)
            digests[layer - piece.layers[0], sequence] = total % parts.MODULUS
            pages += len(slots)
        if not (rest or pages):
            return None
        name = piece.name(rank)
        size = write_tensors(self.place / name, held, ident)
        heads = (first, first + cache.heads.kv_heads)
        file = TensorFile(name, size, (piece.layers.start, piece.layers.stop), heads, ident)
        if not rest:
            own = [f"{digest:016x}" for digest in digests[:, piece.sequence].tolist()]
            file = replace(file, sequence=piece.sequence, granules=(piece.granules.start, piece.granules.stop), digests=own)
            self.saved.add(piece, file, self.place / name)
        return file, digests

    def finish(
        self,
        replacement: Replacement,
        ident: str,
        written: list[Written],
        logits: torch.Tensor | None,
        run: dict[str, Any] | None,
    ) -> tuple[int, int]:
        """On rank 0: look whether all parts have arrived, write logits and manifest, and make the snapshot visible. Returns the
        bytes of its files and those of the new ones."""
        engine, files = self.engine, [file for file, _ in written]
        digests = np.zeros((engine.model.layers, engine.cache.sequences), dtype=np.uint64)
        for file, own in written:
            digests[slice(*file.layers)] += own
        for file in files:
            path = self.place / file.name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise ValueError(f"rank 0 does not see {file.name} as it was written; save where all hosts see the same files")
        logits_digest = None
        if logits is not None:
            content = {parts.LOGITS: logits.cpu().unsqueeze(1)}
            logits_digest = f"{parts.digest_kept(content, 0):016x}"
            size = write_tensors(self.place / LOGITS_FILE, content, ident)
            files.append(TensorFile(LOGITS_FILE, size, (0, 0), (0, 1), ident))
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
            digests=[[f"{digest:016x}" for digest in layer] for layer in digests.tolist()],
            logits=logits_digest,
            files=files,
            run=run,
        )
        (self.place / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        flush(self.place / MANIFEST)
        replacement.commit()
        return sum(file.bytes for file in files), sum(file.bytes for file in files if file.snapshot == ident)


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


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], ident: str) -> int:
    """A flushed safetensors file that names its snapshot; returns its bytes."""
    save_file(tensors, path, {"snapshot": ident})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes it for its owner alone, whatever the umask
    flush(path)
    return path.stat().st_size
