"""Reading a snapshot into an engine's cache, at any number of ranks: each takes the pages and heads that are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from bitkv_dist.cache_config import GRANULE_TOKENS
from bitkv_dist.snapshot import tensors as parts
from bitkv_dist.snapshot.joint import about, brief, jointly
from bitkv_dist.snapshot.manifest import Manifest, TensorFile
from bitkv_dist.snapshot.pieces import bounded
from bitkv_dist.snapshot.save import LOGITS_FILE, Progress, circumstances
from bitkv_dist.snapshot.saved import saved_of

if TYPE_CHECKING:
    from bitkv_dist.engine import Engine
    from bitkv_dist.layer import PackedLayer
    from bitkv_dist.sequence import SequenceState


class Loaded:
    """An engine whose cache holds a snapshot. `fill` goes where a prefill would.

    promise: what holds for the tokens. prefix_tokens: tokens of all sequences that need no prefill. prefilled_tokens: those of
    the prompts beyond them. saved: for the next save in the same folder.
    """

    def __init__(self, engine: Engine, folder: Path, manifest: Manifest, prompts: list[list[int]] | None, sources: list[int],
                 logits: torch.Tensor | None) -> None:
        self._engine, self._prompts, self._sources, self._logits = engine, prompts, sources, logits
        self.saved = saved_of(engine, folder, manifest, sources)
        self.promise = manifest.promise(circumstances(engine))
        held = [manifest.sequences[source].cached for source in sources]
        self._rests = [prompt[cached:] for prompt, cached in zip(prompts or [], held, strict=bool(prompts))]
        self.prefix_tokens, self.prefilled_tokens = sum(held), sum(map(len, self._rests))

    def fill(self, prompts: list[list[int]], progress: Callable[[float, int], None]) -> torch.Tensor:
        """Logits to go on from, fp32 [sequences, vocabulary]: the saved ones, or those after a packed prefill of what the
        prompts have beyond the snapshot; without prompts those of the sequences that have not ended."""
        engine = self._engine
        if self._logits is None and self._prompts is None:
            live = [sequence for sequence in range(len(self._sources)) if sequence not in engine.ended]
            return engine.step(live) if live else torch.empty(0, 0)
        saved = None if self._logits is None else self._logits[self._sources].to(engine.model.device)
        if not self.prefilled_tokens:
            return saved
        read = iter(engine.read(self._rests, progress))
        return torch.stack([next(read) if rest else saved[row] for row, rest in enumerate(self._rests)])


@torch.inference_mode()
def load(engine: Engine, folder: Path, manifest: Manifest, prompts: list[list[int]] | None = None,
         progress: Progress = lambda *_: None, what: str = "load-cache") -> Loaded:
    """Open the engine's cache with the snapshot in it; collective. Prompts begin with its tokens (see Manifest.match); None: go
    on with its own sequences. what: the flag that asked for it. ValueError, and no cache, where the files are not those
    of the manifest or of this model.
    """
    model = engine.model
    what = f"{what} {folder}"
    with about(what):
        manifest.check_model(f"{model.fingerprint:016x}", engine.rotation_digest, circumstances(engine)["dtype"])
        sources = list(range(len(manifest.sequences))) if prompts is None else manifest.match(prompts)
    saved = [manifest.sequences[source] for source in sources]
    engine.open(prompts or [sequence.tokens[: sequence.cached] for sequence in saved])
    reader = _Reader(engine, folder, manifest, sources)
    try:
        ranges = sorted({file.layers for file in manifest.files if file.name != LOGITS_FILE})
        steps = [(layers, batch) for layers in ranges for batch in reader.batches(layers)]
        for done, (layers, batch) in enumerate(steps, start=1):
            jointly(engine.mesh, what, lambda layers=layers, batch=batch: reader.read(range(*layers), batch))
            if done == len(steps) or steps[done][0] != layers:
                found = jointly(engine.mesh, what, reader.complete)
                with about(what):
                    reader.check(range(*layers), found)
                reader.restore()
            progress("loading the cache", done, len(steps))
        jointly(engine.mesh, what, reader.read_logits)
    except BaseException:
        engine.cache = None
        raise
    if prompts is None:
        engine.histories = [list(sequence.tokens) for sequence in saved]
        engine.pending = [list(sequence.pending) for sequence in saved]
        stopped = ((index, sequence.stopped(model.max_positions)) for index, sequence in enumerate(saved))
        engine.ended = {index: reason for index, reason in stopped if reason}
    loaded = Loaded(engine, folder, manifest, prompts, sources, reader.logits)
    if not loaded.prefilled_tokens:
        engine.sampler.resume(manifest.sampling_seed, [(sequence.prompt_tokens, sequence.draws) for sequence in saved])
    return loaded


class _Reader:
    """What this rank takes from the files. `sources`: of which saved sequence each sequence of the cache is a copy."""

    def __init__(self, engine: Engine, folder: Path, manifest: Manifest, sources: list[int]) -> None:
        self.engine, self.folder, self.manifest, self.sources = engine, folder, manifest, sources
        first = engine.heads.first_kv_head
        self.heads = range(first, first + engine.heads.kv_heads)
        self.targets: list[_Pages] = []  # of the layers that are being read
        self.waiting: list[tuple[SequenceState, int, dict[str, torch.Tensor]]] = []
        self.logits: torch.Tensor | None = None  # fp32 [saved sequences, vocabulary]

    def batches(self, layers: tuple[int, int]) -> list[list[TensorFile]]:
        """The files with these layers, so many at a time that no step takes long; the same on every rank."""
        files = [file for file in self.manifest.files if file.layers == layers]
        return [files[some.start : some.stop] for some in bounded([[file.bytes for file in files]])]

    def read(self, layers: range, files: list[TensorFile]) -> None:
        """Fill the sealed pages of some layers with what is in some of their files."""
        if not self.targets:
            copies = [(*copy, self.manifest.sequences[copy[1]].cached, self.heads) for copy in enumerate(self.sources)]
            self.targets = [_Pages(self.engine.cache.layers[index], *copy) for index in layers for copy in copies]
        for file in files:
            if file.kv_heads[0] < self.heads.stop and self.heads.start < file.kv_heads[1]:
                with self.open(file, self.heads) as part:
                    for target in self.targets:
                        if file.sequence in (None, target.source):
                            target.take(part)

    def complete(self) -> tuple[np.ndarray, np.ndarray]:
        """All files of some layers have been read. Returns the digests uint64 [layers, sequences] of this rank's pages, and
        those of what all sequence ranks have alike, which waits for `restore`."""
        own, common = [], []
        for target in self.targets:
            target.check_complete()
            kept = target.kept()
            own.append(target.digest % parts.MODULUS)
            common.append(parts.digest_kept(kept, self.heads.start))
            self.waiting.append((target.state, self.manifest.sequences[target.source].cached, kept))
        self.targets = []
        return tuple(np.array(found, dtype=np.uint64).reshape(-1, len(self.sources)) for found in (own, common))

    def check(self, layers: range, found: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Compare what all ranks have read of some layers with the manifest."""
        tp, copies = self.engine.mesh.tp, self.engine.mesh.split.replicas(self.engine.model.kv_heads)
        digests = [[int(self.manifest.digests[layer][source], 16) for source in self.sources] for layer in layers]
        grid = (-1, tp // copies, copies, len(layers), len(self.sources))  # TP ranks that keep the same heads are neighbours
        pages, kept = (np.stack(part).reshape(grid).sum(axis=1) for part in zip(*found, strict=True))
        wrong = np.argwhere((pages.sum(axis=0) + kept != np.array(digests, dtype=np.uint64)).any(axis=(0, 1)))
        if len(wrong):
            row, sequence = wrong[0]
            what = f"layer {layers[row]} of sequence {self.sources[sequence]} does not have its digest"
            raise ValueError(f"{what}: a file was changed after it was written; save it again")

    def restore(self) -> None:
        for state, length, kept in self.waiting:
            parts.restore(state, length, kept)
        self.waiting = []

    def read_logits(self) -> None:
        """Fill `logits`, where they were saved."""
        if self.manifest.logits is None:
            return
        (file,) = (file for file in self.manifest.files if file.name == LOGITS_FILE)
        with self.open(file, range(1)) as part:
            content = {parts.LOGITS: part.tensor(parts.LOGITS).clone()}
        if f"{parts.digest_kept(content, 0):016x}" != self.manifest.logits:
            raise ValueError(f"{file.name} was changed after it was written; save it again")
        self.logits = content[parts.LOGITS].squeeze(1)

    @contextmanager
    def open(self, file: TensorFile, heads: range) -> Iterator[_Part]:
        """ValueError for what is no whole safetensors file of this snapshot. heads: those to read."""
        try:
            with safe_open(self.folder / file.name, "pt") as tensors:
                if (tensors.metadata() or {}).get("snapshot") != file.snapshot:
                    raise ValueError(f"{file.name} belongs to another snapshot; copy it whole")
                yield _Part(file, tensors, heads)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file.name} cannot be read ({brief(error)}); copy it whole") from None


class _Pages:
    """One layer of a sequence: puts the sealed pages that this rank owns of a saved one, of so many tokens, in their places as
    the files come, and keeps its other tensors, cut to this rank's heads, until all files have come."""

    def __init__(self, layer: PackedLayer, sequence: int, source: int, tokens: int, heads: range) -> None:
        self.layer, self.sequence, self.source, self.heads = layer, sequence, source, heads
        self.state, config, owns = layer.states[sequence], layer.cache.config, layer.cache.shard.owns
        self.per_granule = GRANULE_TOKENS // config.page_tokens
        pages = range(config.sink_rounded // config.page_tokens, self.state.held_at(tokens) // config.page_tokens)
        wanted = [page for page in pages if owns(page // self.per_granule, sequence)]
        for page in wanted:  # in this order, whatever that of the files is
            self.state.sealed.page(*divmod(page, self.per_granule))
        self.row_of = {page: row for row, page in enumerate(wanted)}
        self.found = torch.zeros(len(wanted), len(heads), dtype=torch.bool)
        self.pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}  # name -> (first of this rank's heads, tensor)
        self.digest = 0

    def take(self, part: _Part) -> None:
        """Whatever of it is in a file."""
        prefix = parts.key(self.layer.index, self.source, "")
        for name in part.names:
            if name.startswith(prefix) and name != prefix + parts.PAGES:
                self.pieces.setdefault(name.removeprefix(prefix), []).append((part.place.start, part.tensor(name)))
        index = part.pages(self.source)
        if self.row_of.keys().isdisjoint(index):
            return  # before its pages are read: they are of other ranks
        stored = part.tensor(prefix + parts.PAGES)
        shape = (len(index), self.layer.codec.record_bytes, torch.uint8)
        if (stored.shape[0], *stored.shape[2:], stored.dtype) != shape:
            raise part.unfit("its pages have another shape")
        rows = [row for row, page in enumerate(index) if page in self.row_of]
        pages, records = [index[row] for row in rows], stored[rows]
        place = [self.row_of[page] for page in pages]
        if self.found[place, part.place].any() or len(set(pages)) < len(pages):
            raise part.unfit(f"a page of sequence {self.source} is in another file too")
        self.found[place, part.place] = True
        for page, record in zip(pages, records, strict=True):
            self.state.sealed.page(*divmod(page, self.per_granule))[part.place].copy_(record)
        self.digest += parts.digest_pages(records, pages, self.heads.start + part.place.start)

    def check_complete(self) -> None:
        if not self.found.all():
            row, head = (~self.found).nonzero()[0].tolist()
            page = next(page for page, at in self.row_of.items() if at == row)
            lost = f"page {page} of sequence {self.source}, layer {self.layer.index}, head {self.heads[head]} is in no file"
            raise ValueError(f"{lost}; copy it whole")

    def kept(self) -> dict[str, torch.Tensor]:
        """What all sequence ranks have alike."""
        layer = self.layer.index
        try:
            found = {name: torch.cat([piece for _, piece in sorted(some, key=first)], 1) for name, some in self.pieces.items()}
        except RuntimeError as error:
            raise ValueError(f"layer {layer} does not fit together ({brief(error)})") from None
        if parts.EXACT not in found or any(tensor.shape[1] != len(self.heads) for tensor in found.values()):
            raise ValueError(f"layer {layer} of sequence {self.source} is not complete; copy it whole")
        return found


class _Part:
    """An open file. `place`: its heads among this rank's; tensors are cut to these heads."""

    def __init__(self, file: TensorFile, tensors: safe_open, heads: range) -> None:
        self._file, self._tensors = file, tensors
        self.names = tensors.keys()
        start, stop = max(file.kv_heads[0], heads.start), min(file.kv_heads[1], heads.stop)
        self.place = slice(start - heads.start, stop - heads.start)
        self._cut = slice(start - file.kv_heads[0], stop - file.kv_heads[0])
        self._pages: dict[int, list[int]] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """[rows, heads, ..]"""
        tensor = self._tensors.get_tensor(name)
        heads = self._file.kv_heads[1] - self._file.kv_heads[0]
        if tensor.ndim < 3 or tensor.shape[1] != heads:
            raise self.unfit(f"{name} is not of {heads} heads")
        return tensor[:, self._cut]

    def pages(self, source: int) -> list[int]:
        """The global pages of a saved sequence that it has."""
        if source not in self._pages:
            self._pages[source] = self._tensors.get_tensor(parts.index_key(source)).flatten().tolist()
        return self._pages[source]

    def unfit(self, why: str) -> ValueError:
        return ValueError(f"{self._file.name} does not hold what it should ({why}); copy it whole")


def first(pair: tuple[int, torch.Tensor]) -> int:
    return pair[0]
