"""Continue one or several prompts with a packed KV cache.

Text goes to stdout, from rank 0 only, everything else to stderr. A prompt file is UTF-8; a byte order mark and one final
newline are dropped and CRLF is read as LF. With --json - the report takes the place of the text on stdout.

--save-cache keeps the packed cache on disk, --load-cache starts from it: with the same prompts the run is repeated, of longer
prompts only the rest is read, without prompts the saved sequences go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bitkv_dist.config import RunConfig
from bitkv_dist.launch import flags, shell

if TYPE_CHECKING:
    import torch

    from bitkv_dist.engine import Result
    from bitkv_dist.launch.display import Texts
    from bitkv_dist.parallel.mesh import Mesh

NAME = "generate"
STDOUT = "-"
_VALUES = (
    ("--prefill", "generate.prefill", "exact, packed, or auto: exact if it fits into memory"),
    ("--prefill-memory", "generate.prefill_memory_gb", "GB that a layer's prompt keys may take; less means more exchange"),
    ("--chunk", "generate.chunk", "tokens per piece of prefill work; divides 512"),
    ("--max-new-tokens", "generate.max_new_tokens", "tokens to generate at most"),
    ("--temperature", "generate.temperature", "0 = greedy"),
    ("--top-p", "generate.top_p", "share of the probability to draw from; 1 = off"),
    ("--top-k", "generate.top_k", "number of tokens to draw from; 0 = off"),
    ("--sampling-seed", "generate.sampling_seed", "seed of the draws; without it another one each run"),
    ("--save-cache", "generate.save_cache", "folder for a snapshot of the cache; replaces the one that is there"),
    ("--save-cache-at", "generate.save_cache_at", "prefill (before the first token, to repeat) or end (to go on)"),
    ("--load-cache", "generate.load_cache", "folder of a snapshot to start from"),
    ("--checkpoint", "generate.checkpoint", "folder to keep the run in while it lasts; the same command goes on from there"),
    ("--checkpoint-every", "generate.checkpoint_every", "tokens from one checkpoint to the next"),
)
_SWITCHES = (
    ("--ignore-eos", "generate.ignore_eos", "go on after the end-of-sequence token"),
    ("--warmup", "generate.warmup", "run once before the timed run"),
    ("--digest", "generate.digest", "report a digest of all sealed bytes"),
    ("--graph", "generate.graph", "replay decode steps as a CUDA graph; on one rank, or sequence ranks that talk through nccl"),
)
_PAIRS = (
    ("--chat", "generate.chat", "read a prompt as the user's turn of the chat template"),
    ("--stream", "generate.stream", "show the first text while it is generated"),
)


def main(argv: list[str] | None = None) -> int:
    """The whole run on this rank; ValueError, before weights load, for what a user can put right."""
    asked = _parser().parse_args(argv)
    config = flags.read_config(asked)
    if not (asked.prompt or asked.prompt_file or asked.interactive or config.generate.load_cache):
        raise ValueError("prompt: none given; use --prompt, --prompt-file or --interactive")

    import transformers

    from bitkv_dist import model as models
    from bitkv_dist.parallel import mesh as meshes

    transformers.logging.set_verbosity_error()
    model_config = models.check(config.generate.model, config.parallel.tp, shell.launched_size())
    positions = models.max_positions_of(model_config)
    shape = (models.layers_of(model_config), models.head_dim_of(model_config), positions)
    config.cache.check_model(*shape, models.loops_of(model_config), model_config.num_key_value_heads)
    mesh = meshes.start(config.parallel, say=shell.say_for_all)
    run = _Run(asked, config, mesh, positions)
    try:
        prompts = mesh.broadcast(run.read_prompts() if run.leads else None)
        run.snapshots.check(prompts, model_config, asked.interactive)
        run.checkpoints.check(prompts, model_config, asked.interactive)
        run.start(prompts)
        if asked.interactive:
            run.talk(prompts)
        else:
            run.batch(prompts or run.snapshots.begun)
        run.end()
    finally:
        run.stop_bars()
    run.report()
    return 0


class _Run:
    """A run on one rank. What only rank 0 does stands behind `leads`."""

    def __init__(self, asked: argparse.Namespace, config: RunConfig, mesh: Mesh, max_positions: int) -> None:
        from bitkv_dist.launch.checkpoints import Checkpoints
        from bitkv_dist.launch.display import Bar, Console
        from bitkv_dist.launch.snapshots import Snapshots

        self._asked, self._config, self._mesh, self._max_positions = asked, config, mesh, max_positions
        self.leads = mesh.world.rank == 0
        self._console = Console(stderr=True, quiet=not self.leads, highlight=False, markup=False, soft_wrap=True)
        self._load_bar, self._prefill_bar = Bar(self._console), Bar(self._console, "tokens")
        self.snapshots = Snapshots(mesh, config, self._load_bar, self._console.print)
        self.checkpoints = Checkpoints(mesh, config, self._load_bar, self._console.print)
        self._tokenizer, self._chat = None, False
        self._turns: list[tuple[Result, list[str]]] = []  # each call's result and, on rank 0, its texts

    def read_prompts(self) -> list[list[int]]:
        """Token ids of all prompts, tokenised once, on rank 0, before weights load."""
        from transformers import GenerationConfig

        from bitkv_dist import checkpoint, sampling, text

        texts = [*(self._asked.prompt or []), *map(text.read_prompt_file, self._asked.prompt_file or [])]
        if self._asked.interactive and len(texts) > 1:
            raise ValueError(f"interactive with {len(texts)} prompts: a conversation starts from one; leave out the others")
        place = checkpoint.localise(self._config.generate.model, self._load_bar)
        self._tokenizer = checkpoint.read_tokenizer(place)
        with contextlib.suppress(OSError):  # a model may come without one
            sampling.refuse_unserved(GenerationConfig.from_pretrained(place))
        chat = self._config.generate.chat
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        self._chat = (self._asked.interactive and has_template) if chat is None else chat
        return [self._fitting(text.encode_prompt(self._tokenizer, prompt, self._chat)) for prompt in texts]

    def start(self, prompts: list[list[int]]) -> None:
        """Load the weights, agree with the other ranks, and load the snapshot that the run starts from."""
        import torch

        from bitkv_dist import model as models
        from bitkv_dist.engine import Engine
        from bitkv_dist.launch.display import start_up_line

        started = time.perf_counter()
        mesh, world, generate = self._mesh, self._mesh.world, self._config.generate
        self._console.print(*map(start_up_line, mesh.roll), sep="\n")
        dtype = getattr(torch, generate.dtype) if generate.dtype else None
        place = {"device": world.device, "weights": generate.weights, "ranks": mesh}
        model = models.load(generate.model, dtype=dtype, progress=self._load_bar, **place)
        self._engine = Engine(model, self._config.cache, mesh, generate)
        mesh.ready()
        self._load_s = time.perf_counter() - started
        grid = f"world size {world.size} (sp {mesh.sp} x tp {mesh.tp}, layout {mesh.split.layout}) by {world.launcher}"
        self._console.print(f"bitkv: {grid}, backend {world.backend}, device {world.device.type}, {model.dtype}")
        if (copies := mesh.split.replicas(model.kv_heads)) > 1:
            said = f"{model.kv_heads} KV heads for tp {mesh.tp}: each is kept by {copies} ranks, memory that sp would not take"
            self._console.print(f"bitkv: {said}")
        self._console.print(f"bitkv: rotation digest {self._engine.rotation_digest}, agreed by all ranks")
        self.checkpoints.load(self._engine, prompts)
        if self.checkpoints.fill is None:
            self.snapshots.load(self._engine, prompts)

    def batch(self, prompts: list[list[int]], keep: bool = False) -> None:
        """Generate for all prompts at once."""
        texts = self._texts(prompts) if self.leads else None
        engine, snapshots, checkpoints = self._engine, self.snapshots, self.checkpoints
        for sequence, answer in enumerate(checkpoints.answered if self.leads else ()):
            for token in answer:
                texts.push(sequence, token)

        def filled(logits: torch.Tensor) -> None:
            if not any(checkpoints.answered):  # else it saved what there was before it was cut short
                snapshots.filled(engine, logits)
            checkpoints.filled(engine, logits)

        fill = None if keep else checkpoints.fill or snapshots.fill
        result = engine.generate(
            prompts, texts and texts.push, self._show_prefill, keep=keep, fill=fill,
            on_filled=filled, on_step=partial(checkpoints.step, engine), answered=checkpoints.answered,
        )  # fmt: skip
        self._turns.append((result, texts.finish() if texts else []))

    def talk(self, prompts: list[list[int]]) -> None:
        """One conversation: each turn is appended to the cache."""
        from bitkv_dist.launch.dialogue import turns

        if prompts:
            self.batch(prompts)
        for ids in turns(self._mesh, self._encode_turn, patience_s=self._config.parallel.step_timeout_s / 4):
            self.batch([ids], keep=True)

    def end(self) -> None:
        self.snapshots.finish(self._engine)
        self.checkpoints.finish()

    def report(self) -> None:
        """The summary, and the JSON object where it was asked for; of a conversation each turn is one text."""
        if not self._turns:
            return
        from bitkv_dist.launch.display import summary
        from bitkv_dist.report import report

        last = report(self._engine, self._turns[-1][0], None, self._load_s)  # on every rank: it gathers
        if not self.leads:
            return
        self._console.print(*summary(last), sep="\n")
        results = [result for result, _ in self._turns]
        last |= self.snapshots.report() | self.checkpoints.report()
        last["text"] = [text for _, texts in self._turns for text in texts]
        for name in ("token_ids", "prompt_tokens", "finish_reason"):
            last[name] = [item for result in results for item in getattr(result, name)]
        line = json.dumps(last) + "\n"
        if self._asked.json == STDOUT:
            sys.stdout.write(line)
        elif self._asked.json is not None:
            self._asked.json.write_text(line, encoding="utf-8")

    def _texts(self, prompts: list[list[int]]) -> Texts:
        from bitkv_dist.launch.display import Texts

        generate = self._config.generate
        return Texts(self._tokenizer, prompts, generate.stop, live=generate.stream, visible=self._asked.json != STDOUT)

    def _encode_turn(self, line: str) -> list[int]:
        from bitkv_dist import text

        if not self._turns and not self.snapshots.begun:
            return self._fitting(text.encode_prompt(self._tokenizer, line, self._chat))
        said = self._turns[-1][0].token_ids[0] if self._turns else self.snapshots.begun[0]
        return self._fitting(text.encode_turn(self._tokenizer, line, self._chat, said[-1] if said else None))

    def _fitting(self, ids: list[int]) -> list[int]:
        earlier = sum(map(len, self.snapshots.begun)) if self._asked.interactive else 0
        earlier += sum(result.prompt_tokens[0] + len(result.token_ids[0]) for result, _ in self._turns)
        if earlier + len(ids) > self._max_positions:
            remedy = "end the conversation" if earlier else "shorten it"
            raise ValueError(f"prompt of {earlier + len(ids)} tokens: the model has {self._max_positions} positions; {remedy}")
        return ids

    def stop_bars(self) -> None:
        for bar in (self._load_bar, self._prefill_bar):
            bar.stop()

    def _show_prefill(self, done: float, total: int) -> None:
        self._prefill_bar("reading the prompt", done, total)


def _parser() -> argparse.ArgumentParser:
    parser = shell.Parser(NAME, __doc__)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable: all prompts form one batch")
    prompts.add_argument("--prompt-file", action="append", metavar="FILE", help="repeatable")
    prompts.add_argument("--interactive", action="store_true", help="read turns from stdin; each is appended to the cache")
    flags.add_run_flags(parser)
    group = parser.add_argument_group("generation")
    flags.add_field_flags(group, _VALUES)
    absent = argparse.SUPPRESS  # what is not given is not overridden
    stop = {"dest": "generate.stop", "action": "append", "default": absent, "metavar": "TEXT"}
    group.add_argument("--stop", **stop, help="repeatable: ends a text, and is not shown")
    for flag, field, says in _SWITCHES:
        group.add_argument(flag, dest=field, action="store_true", default=absent, help=says)
    for flag, field, says in _PAIRS:
        group.add_argument(flag, dest=field, action=argparse.BooleanOptionalAction, default=absent, help=says)
    group.add_argument("--json", type=_report_file, metavar="FILE", help="write the report there; - = to stdout, with no text")
    return parser


def _report_file(text: str) -> Path | str:
    return text if text == STDOUT else shell.output_file(text)


if __name__ == "__main__":
    shell.run(main, NAME)
