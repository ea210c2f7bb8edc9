"""--checkpoint of a generate run: kept while the run lasts, so that the same command, started again, goes on from there.

A lost rank ends a job. What a long run cannot lose is small: the sealed pages, the exact window and the token ids, which any
number of ranks takes up again. So a checkpoint is a snapshot, taken after the prefill and every so many tokens.
"""

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
    from bitkv_dist.snapshot.manifest import Manifest
    from bitkv_dist.snapshot.save import Progress
    from bitkv_dist.snapshot.saved import Saved

FLAG = "checkpoint"
# What makes it the same run, besides prompts, model and cache. Drawn seeds are kept in the checkpoint.
SETTINGS = ("dtype", "weights", "prefill", "chunk", "max_new_tokens", "ignore_eos", "temperature", "top_p", "top_k",
            "sampling_seed", "stop")  # fmt: skip


class Checkpoints:
    """Every rank makes the same calls; without --checkpoint they do nothing."""

    def __init__(self, mesh: Mesh, config: RunConfig, progress: Progress, say: Callable[[str], None]) -> None:
        generate = config.generate
        self._mesh, self._config, self._progress, self._say = mesh, config, progress, say
        self._place = Path(generate.checkpoint) if generate.checkpoint else None
        self._found: tuple[Path, Manifest] | None = None
        self._fill: Fill | None = None
        self._saved: Saved | None = None  # what is in `place`
        self._report: dict[str, Any] = {"every": generate.checkpoint_every, "resumed_tokens": None, "saved": 0, "save_s": 0.0}
        self._report["new_bytes"] = 0  # of files that were written; those of unchanged pages are taken over
        self.answered: list[list[int]] = []

    @property
    def settings(self) -> dict[str, Any]:
        values = {name: getattr(self._config.generate, name) for name in SETTINGS}
        return values | {"stop": list(values["stop"])}

    @property
    def fill(self) -> Fill | None:
        """What takes the place of the prefill, where the run goes on; `answered` is what it has of each answer."""
        return self._fill

    def check(self, prompts: list[list[int]], model: PreTrainedConfig, interactive: bool) -> None:
        """Look for a checkpoint, and refuse what rank 0 can see before weights load."""
        if self._place is None:
            return
        if interactive:
            remedy = "use --save-cache DIR --save-cache-at end"
            raise ValueError(f"{FLAG} {self._place}: a conversation is kept turn by turn, not token by token; {remedy}")
        if not prompts:
            raise ValueError(f"{FLAG} {self._place}: a checkpoint belongs to prompts; give --prompt or --prompt-file")
        saved = self._config.generate.save_cache
        if saved and Path(saved).expanduser().resolve() == self._place.expanduser().resolve():
            rule = "is removed when the answer is complete, and --save-cache names it too"
            raise ValueError(f"{FLAG} {self._place}: {rule}; give another folder")
        self._found = self._mesh.broadcast(self._checked(prompts, model) if self._mesh.world.rank == 0 else None)
        if self._found:
            sequences = self._found[1].sequences
            self.answered = [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]

    def _checked(self, prompts: list[list[int]], model: PreTrainedConfig) -> tuple[Path, Manifest] | None:
        from bitkv_dist import model as models
        from bitkv_dist.snapshot.folder import Replacement, exists, find
        from bitkv_dist.snapshot.joint import about
        from bitkv_dist.snapshot.manifest import Manifest

        with about(f"{FLAG} {self._place}"):
            Replacement(self._place).check()
            if not exists(self._place):
                return None
            folder = find(self._place)
            manifest = Manifest.read(folder)
            manifest.check_same_run(self.settings, prompts)
            shape = (models.layers_of(model), model.num_key_value_heads, models.head_dim_of(model))
            manifest.check_run(self._config.cache, *shape)
            manifest.check_files(folder)
        return folder, manifest

    def load(self, engine: Engine, prompts: list[list[int]]) -> None:
        """Fill the engine's cache, where the run goes on."""
        if self._place is None:
            return
        if self._found is None:
            from bitkv_dist.snapshot.save import check_room

            copies = 1 if self._config.cache.eviction == "none" else 2  # a new one beside the old, pages that stay but once
            check_room(engine, self._place, list(map(len, prompts)), FLAG, copies)
            return
        from bitkv_dist.engine import LENGTH, REASONS
        from bitkv_dist.snapshot.load import load

        folder, manifest = self._found
        begun = any(self.answered)
        loaded = load(engine, folder, manifest, None if begun else prompts, self._progress, FLAG)
        most = max(map(len, self.answered))
        for sequence, answer in enumerate(self.answered):
            full = begun and len(engine.histories[sequence]) >= engine.model.max_positions
            if len(answer) < most or full:  # the others went on without it
                engine.ended.setdefault(sequence, REASONS[LENGTH])
        self._fill, self._saved = loaded.fill, loaded.saved
        self._report["resumed_tokens"] = most
        self._say(f"bitkv: goes on after token {most} of the answer, from checkpoint {folder}; tokens: {loaded.promise}")

    def filled(self, engine: Engine, logits: torch.Tensor) -> None:
        """After the prefill."""
        if self._place is not None and self._found is None:
            self._save(engine, logits)

    def step(self, engine: Engine, tokens: int) -> None:
        """Between two steps of decode, after so many tokens of the answer."""
        if self._place is not None and tokens % self._config.generate.checkpoint_every == 0:
            self._save(engine, None)

    def _save(self, engine: Engine, logits: torch.Tensor | None) -> None:
        from bitkv_dist.snapshot.save import save

        started = time.perf_counter()
        try:
            self._saved = save(engine, self._place, logits, run=self.settings, what=FLAG, before=self._saved)
            self._report["saved"] += 1
            self._report["new_bytes"] += self._saved.new_bytes
        except (ValueError, RuntimeError) as error:  # of any rank, on all of them
            if logits is not None:
                raise
            self._say(f"bitkv: {error}; the run goes on")  # what it would lose is less than what it has
        self._report["save_s"] += time.perf_counter() - started

    def finish(self) -> None:
        """The answer is complete: nothing is left to go on to."""
        if self._place is None:
            return
        from bitkv_dist.snapshot.folder import discard

        self._mesh.gather_objects(None)  # no rank is behind
        if self._mesh.world.rank == 0:
            discard(self._place)

    def report(self) -> dict[str, Any]:
        """The report's `checkpoint`, where there is one."""
        return {} if self._place is None else {"checkpoint": self._report}
