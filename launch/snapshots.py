"""--save-cache and --load-cache of a generate run: refused before weights load, loaded, saved, reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitkv_dist.config import RunConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from bitkv_dist.engine import Engine, Fill
    from bitkv_dist.parallel.mesh import Mesh
    from bitkv_dist.snapshot.load import Loaded
    from bitkv_dist.snapshot.manifest import Manifest
    from bitkv_dist.snapshot.save import Progress

PREFILL, END = "prefill", "end"


class Snapshots:
    """Every rank makes the same calls. `begun`: the sequences that the run starts from where it has no prompts."""

    def __init__(self, mesh: Mesh, config: RunConfig, progress: Progress, say: Callable[[str], None]) -> None:
        generate = config.generate
        self._mesh, self._config, self._progress, self._say = mesh, config, progress, say
        self._saves_to = Path(generate.save_cache) if generate.save_cache else None
        self._found: tuple[Path, Manifest] | None = None
        self._loaded: Loaded | None = None
        self._logits: torch.Tensor | None = None
        self._report: dict[str, Any] = {}
        self.begun: list[list[int]] = []

    def check(self, prompts: list[list[int]], model: PreTrainedConfig, interactive: bool) -> None:
        """Refuse what rank 0 can see before weights load."""
        self._found = self._mesh.broadcast(self._checked(prompts, model, interactive) if self._mesh.world.rank == 0 else None)
        if self._found and not prompts:
            self.begun = [sequence.tokens for sequence in self._found[1].sequences]

    def _checked(self, prompts: list[list[int]], model: PreTrainedConfig, interactive: bool) -> tuple[Path, Manifest] | None:
        from bitkv_dist import model as models
        from bitkv_dist.snapshot.folder import Replacement, find
        from bitkv_dist.snapshot.joint import about
        from bitkv_dist.snapshot.manifest import Manifest

        generate = self._config.generate
        if self._saves_to:
            with about(f"save-cache {self._saves_to}"):
                Replacement(self._saves_to).check()
        if not generate.load_cache:
            return None
        with about(f"load-cache {generate.load_cache}"):
            folder = find(Path(generate.load_cache))
            manifest = Manifest.read(folder)
            shape = (models.layers_of(model), model.num_key_value_heads, models.head_dim_of(model))
            manifest.check_run(self._config.cache, *shape)
            manifest.check_files(folder)
            if interactive and len(manifest.sequences) > 1:
                rule = f"holds {len(manifest.sequences)} sequences, a conversation has one"
                raise ValueError(f"{rule}; load it without --interactive")
            if prompts:
                manifest.match(prompts)
            elif not interactive:
                manifest.check_goes_on(models.max_positions_of(model))
        if not (prompts or interactive) and self._saves_to and generate.save_cache_at == PREFILL and manifest.logits is None:
            raise ValueError("generate.save_cache_at 'prefill': without prompts there is no prefill; use --save-cache-at end")
        return folder, manifest

    def load(self, engine: Engine, prompts: list[list[int]]) -> None:
        """Fill the engine's cache with the snapshot, if the run starts from one."""
        if self._saves_to:
            from bitkv_dist.snapshot.save import check_room

            check_room(engine, self._saves_to, list(map(len, prompts or self.begun)))
        if self._found is None:
            return
        from bitkv_dist.snapshot.load import load

        folder, manifest = self._found
        started = time.perf_counter()
        loaded = self._loaded = load(engine, folder, manifest, prompts or None, self._progress)
        self._report |= {
            "loaded": str(folder),
            "promise": loaded.promise,
            "prefix_tokens": loaded.prefix_tokens,
            "prefilled_tokens": loaded.prefilled_tokens,
            "prefill": "packed" if loaded.prefilled_tokens else None,
            "load_s": time.perf_counter() - started,
        }
        rest = f"{loaded.prefilled_tokens:,} more are read packed" if loaded.prefilled_tokens else "no prefill is left"
        self._say(f"bitkv: {loaded.prefix_tokens:,} tokens loaded from {folder}, {rest}; tokens: {loaded.promise}")

    @property
    def fill(self) -> Fill | None:
        """What takes the place of the first prefill."""
        return self._loaded and self._loaded.fill

    def filled(self, engine: Engine, logits: torch.Tensor) -> None:
        """After each prefill, before the first token of its answer."""
        self._logits = logits
        if self._saves_to and self._config.generate.save_cache_at == PREFILL and "saved" not in self._report:
            self._save(engine)

    def finish(self, engine: Engine) -> None:
        """After the last token."""
        if self._saves_to and self._config.generate.save_cache_at == END and engine.cache is not None:
            if any(engine.pending):
                self._logits = None  # they are not those of the last token any more
            self._save(engine)

    def _save(self, engine: Engine) -> None:
        from bitkv_dist.snapshot.save import save

        started = time.perf_counter()
        saved = save(engine, self._saves_to, self._logits, self._progress, before=self._loaded and self._loaded.saved)
        seconds = time.perf_counter() - started
        self._report |= {"saved": str(self._saves_to), "saved_bytes": saved.bytes, "save_s": seconds}
        self._say(f"bitkv: cache saved in {self._saves_to}, {saved.bytes / 1e6:,.1f} MB")

    def report(self) -> dict[str, Any]:
        """The report's `snapshot`, where there is one."""
        return {"snapshot": {"loaded": None, "saved": None} | self._report} if self._report else {}
