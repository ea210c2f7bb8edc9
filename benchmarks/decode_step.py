"""A whole decode step with a packed cache against `model.generate` of transformers, on CPU: how fast, and where does it go?

    python benchmarks/decode_step.py --threads 1 --json -
    python benchmarks/decode_step.py --threads 2 --config 4bit --dtype float32 --weights bfloat16 --prefills 2

The same prompt and greedy decoding for all: `generate` with its own cache in float32 and in bfloat16, and the engine in both;
the first of --dtype is called "ours", and its step is taken apart. First the engine is checked: with `--config exact` and
unrounded weights a part of the prompt must give `generate`'s token ids; with rounded weights, or in bfloat16, its logits must
stay close to those of float32. Then prefills in turn (a prefill ends with the first token; the parts of the last one are
printed), then decoding in turns of a few tokens each, warm-up excluded, medians with spread; at last the parts of a step of
ours, timed apart from the rest.
The ceiling is the time to stream the weights once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # both as `bitkv generate` has them, and before torch reads them
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
import transformers
from streaming import stream_gb_s
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from bitkv_dist import checkpoint, decoder, layer, model, report
from bitkv_dist.config import GenerateConfig, ParallelConfig, build
from bitkv_dist.engine import Engine
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.cpu import dense
from bitkv_dist.layer import PackedLayer
from bitkv_dist.parallel.heartbeat import Heart, Pulse
from bitkv_dist.parallel.mesh import Mesh
from bitkv_dist.parallel.world import World
from bitkv_dist.sampling import Sampler
from bitkv_dist.text import read_prompt_file

CHECKED_TOKENS, CHECKED_STEPS = 700, 16
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
PEERS = {f"hf-{short}": getattr(torch, dtype) for dtype, short in SHORT.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--config", default="tiered4", help="preset or YAML file of the cache")
    parser.add_argument("--dtype", default="float32,bfloat16", help="of ours: one or both of them")
    weights = ("auto", "model", "bfloat16")
    parser.add_argument("--weights", default="auto", choices=weights, help="what ours are kept in, in float32")
    parser.add_argument("--text", action="append", help="joined until there are enough tokens")
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="timed tokens of each contestant")
    parser.add_argument("--turn", type=int, default=8, help="tokens that a contestant decodes before it is the next one's turn")
    parser.add_argument("--prefills", type=int, default=3, help="timed prefills of each contestant")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the JSON object to this file; - is the last line, which is always printed")
    args = parser.parse_args()
    if strange := set(args.dtype.split(",")) - set(SHORT):
        parser.error(f"--dtype {', '.join(sorted(strange))}: must be one or both of {', '.join(SHORT)}")
    if strange := {name for name in args.peers.split(",") if name} - set(PEERS):
        parser.error(f"--peers {', '.join(sorted(strange))}: must be of {', '.join(PEERS)}")
    for name in ("tokens", "new_tokens", "turn", "prefills", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    args.text = args.text or ["tests/data/tale.txt", "tests/data/handbook.txt"]
    return args


class Ticks(BaseStreamer):
    """The times at which `generate` gave its tokens; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Stock:
    """`generate` of transformers with its own cache."""

    def __init__(self, place, dtype: torch.dtype) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()

    def run(self, max_new_tokens: int) -> list[float]:
        """Seconds of each token, the first of them with all that precedes it."""
        ticks, started = Ticks(), time.perf_counter()
        self.ids = self.module.generate(
            self.ids, past_key_values=self.cache, max_new_tokens=max_new_tokens, do_sample=False, streamer=ticks,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return [after - before for before, after in zip([started, *ticks.times[1:]], ticks.times[1:], strict=False)]

    def prefill(self, prompt: list[int]) -> float:
        self.ids, self.cache = torch.tensor([prompt]), DynamicCache(config=self.module.config)
        return self.run(1)[0]

    def decode(self, tokens: int) -> list[float]:
        """What `generate` does before its loop is not counted."""
        return self.run(tokens + 1)[1:]


class Ours:
    """The engine, a world of one."""

    def __init__(self, served: model.ServedModel, config: str, threads: int) -> None:
        world = World(0, 1, 0, 1, "here", "python", "none", torch.device("cpu"), threads)
        self.mesh = Mesh(world, 1, 1, ParallelConfig(), Heart(Pulse(), 0))
        self.served, self.cache = served, build(config, {}).cache
        self.logits: list[torch.Tensor] = []

    def prefill(self, prompt: list[int]) -> float:
        self.engine = Engine(self.served, self.cache, self.mesh, GenerateConfig(max_new_tokens=1, ignore_eos=True))
        self.ids = list(prompt)
        started = time.perf_counter()
        self.ids += self.engine.generate([prompt]).token_ids[0]
        return time.perf_counter() - started

    def decode(self, tokens: int) -> list[float]:
        times = []
        with torch.inference_mode():
            for _ in range(tokens):
                started = time.perf_counter()
                self.logits = [*self.logits[-CHECKED_STEPS:], self.engine.step([0])]
                self.ids += self.engine.decode(self.logits[-1], [[]], None, started).token_ids[0]
                times.append(time.perf_counter() - started)
        return times


def check(served: model.ServedModel, stock: Stock, prompt: list[int], threads: int, rounded: bool) -> dict:
    """The engine with an exact cache against `generate` in float32; raises where they differ by more than rounding does."""
    ours = Ours(served, "exact", threads)
    ours.prefill(prompt)
    stock.prefill(prompt)
    ours.decode(CHECKED_STEPS)
    stock.decode(CHECKED_STEPS)
    found, wanted = ours.ids[len(prompt) :], stock.ids[0, len(prompt) :].tolist()
    with torch.inference_mode():
        logits = stock.module(torch.tensor([ours.ids[:-1]])).logits[0, len(prompt) :]
    error = ((torch.cat(ours.logits) - logits).norm() / logits.norm()).item()
    assert error < (5e-2 if rounded else 1e-4), f"logits differ by {error:.1e}"
    assert rounded or found == wanted[: len(found)], f"token ids differ: {found}, generate gives {wanted}"
    return {"exact_logits_error": error, "exact_ids_equal": found == wanted[: len(found)], "checked_tokens": len(found)}


# -- where the time goes

COMPILED = {  # functions of our library
    "linear": "project feed_forward",
    "lm_head": "head",
    "attention": "see see_words finish attend attend_words attend_exact quantize_query rotate_back tree",
    "sealing": "encode",
}
OF_A_PROMPT = {
    "linear": [(decoder, "linear")],
    "attention": [(layer, "causal_attention")],
    "between": [(dense, "norm"), (dense, "place"), (dense, "gate")],
    "sealing": [(PackedLayer, "finish_prompt")],
}
Function = tuple[str, Any, str]  # part, owner, name


def functions_of_a_prompt() -> Iterator[Function]:
    for part, functions in OF_A_PROMPT.items():
        yield from ((part, owner, name) for owner, name in functions)


def functions_of_a_step(engine: Engine) -> Iterator[Function]:
    """In which a step of `engine` is not in the interpreter."""
    if cpu.load() is not None:
        for part, names in COMPILED.items():
            yield from ((part, cpu.load(), f"bitkv_{name}") for name in names.split())
    module = engine.model.module.model
    yield from (("torch", owner, name) for owner, name in ((module.embed_tokens, "forward"), (module.rotary_emb, "forward")))
    yield "torch", Sampler, "pick"
    for codec in {type(packed.codec) for packed in engine.cache.layers if not packed.codec.fused}:
        yield "attention", codec, "attend"  # plain torch does, or our kernels for a cache that evicts by mass
    yield from (("exchange", Mesh, name) for name in ("gather_sp", "swap_sp", "sum_sp", "largest_sp"))


class Clock:
    """Seconds inside the functions of each part; a function that calls others counts without them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.calls = 0
        self.inside = [0.0]  # seconds of the functions that the running one calls

    def timed(self, part: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            self.inside.append(0.0)
            started = time.perf_counter()
            found = function(*args, **kwargs)
            took = time.perf_counter() - started
            self.calls += 1
            self.spent[part] += took - self.inside.pop()
            self.inside[-1] += took
            return found

        return run


@contextmanager
def clocked(functions: Iterable[Function]) -> Iterator[Clock]:
    clock = Clock()
    with ExitStack() as stack:
        for part, owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield clock


def clock_s(calls: int) -> float:
    """Seconds that a clock itself takes for each call."""
    clock = Clock()
    nothing, started = clock.timed("", lambda: None), time.perf_counter()
    for _ in range(calls):
        nothing()
    return (time.perf_counter() - started - clock.spent[""]) / calls


def breakdown(ours: Ours, steps: int) -> dict[str, float]:
    """Milliseconds of a step by part. torch: embedding, rotary positions and sampling. python: all that is in none of the
    parts, with the small torch operations of a layer (copies of a row, slices), and without the clock."""
    with clocked(functions_of_a_step(ours.engine)) as clock:
        took = sum(ours.decode(steps)) - clock.calls * clock_s(10_000)
    parts = {part: clock.spent[part] / steps * 1e3 for part in (*COMPILED, "torch", "exchange")}
    return parts | {"python": took / steps * 1e3 - sum(parts.values())}


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtypes = list(dict.fromkeys(args.dtype.split(",")))
    loaded = {
        dtype: model.load(args.model, dtype=getattr(torch, dtype), device=torch.device("cpu"), weights=args.weights)
        for dtype in dtypes
    }
    served = loaded[dtypes[0]]
    prompt: list[int] = []
    for text in args.text:
        if len(prompt) < args.tokens:
            prompt += served.tokenizer(read_prompt_file(text, "--text")).input_ids
    prompt = prompt[: args.tokens]
    place = checkpoint.localise(args.model)
    peers = {name: Stock(place, PEERS[name]) for name in args.peers.split(",") if name}
    reference = peers.get("hf-fp32") or Stock(place, torch.float32)
    checks = {
        dtype: check(each, reference, prompt[:CHECKED_TOKENS], args.threads, "bfloat16" in (args.weights, dtype))
        for dtype, each in loaded.items()
    }

    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in served.module.parameters())
    rate = stream_gb_s()
    ceiling_ms = weight_bytes / rate / 1e6
    print(
        f"{weight_bytes / 1e6:.0f} MB of weights, {rate:.1f} GB/s streamed by {args.threads} thread(s): "
        f"{ceiling_ms:.1f} ms would be memory speed"
    )
    print("with an exact cache: " + ", ".join(f"{dtype} {checked}" for dtype, checked in checks.items()))

    names = ["ours", *(f"ours-{SHORT[dtype]}" for dtype in dtypes[1:])]
    ours_each = {name: Ours(each, args.config, args.threads) for name, each in zip(names, loaded.values(), strict=True)}
    runners: dict[str, Stock | Ours] = {**ours_each, **peers}
    for runner in runners.values():
        runner.prefill(prompt[:CHECKED_TOKENS])
        runner.decode(2)
    prefill_s: dict[str, list[float]] = defaultdict(list)
    decode_s: dict[str, list[float]] = defaultdict(list)
    prompt_parts: dict[str, dict[str, float]] = {}  # of the last prefill
    for _ in range(args.prefills):
        for name, runner in runners.items():
            with clocked(functions_of_a_prompt()) as clock:
                prefill_s[name].append(runner.prefill(prompt))
            if name in names:
                spent = {part: clock.spent[part] for part in OF_A_PROMPT}
                prompt_parts[name] = spent | {"rest": prefill_s[name][-1] - sum(spent.values())}
    for runner in runners.values():
        runner.decode(2)
    for _ in range(-(-args.new_tokens // args.turn)):
        for name, runner in runners.items():
            decode_s[name] += runner.decode(args.turn)
    ours = runners["ours"]
    kv = report.cache_report(ours.engine)
    parts = breakdown(ours, args.new_tokens)

    ms = {name: statistics.median(times) * 1e3 for name, times in decode_s.items()}
    prefills = {name: statistics.median(times) for name, times in prefill_s.items()}
    for name in runners:
        print(
            f"{name:9s} prefill {prefills[name]:6.2f} s ({min(prefill_s[name]):.2f} .. {max(prefill_s[name]):.2f})   "
            f"decode {ms[name]:6.1f} ms ({min(decode_s[name]) * 1e3:.1f} .. {max(decode_s[name]) * 1e3:.1f}), "
            f"{1e3 / ms[name]:5.1f} tokens/s   {ms[name] / ms['ours']:.2f} x ours"
        )
    for name, spent in prompt_parts.items():
        print(f"of a prompt, {name}: " + ", ".join(f"{part} {took:.2f} s" for part, took in spent.items()))
    print("of a step: " + ", ".join(f"{part} {took:.2f} ms" for part, took in parts.items()))
    print(f"cache: ratio {kv['ratio']:.2f}, ratio_total {kv['ratio_total']:.2f}, {kv['read_bits_per_element']:.2f} bits read")
    best = min((prefills[name] for name in peers), default=None)
    result = {
        "model": args.model, "config": args.config, "dtype": dtypes[0], "weights": str(served.weights).removeprefix("torch."),
        "prompt_tokens": len(prompt),
        "decoded_tokens": len(decode_s["ours"]), "threads": args.threads, "isa": dispatch.backend(torch.device("cpu"))[0],
        "ours_ms": ms["ours"], "ours_tokens_per_s": 1e3 / ms["ours"], "peers_ms": {name: ms[name] for name in peers},
        "decode_ratio": min(ms[name] for name in peers) / ms["ours"] if peers else None,
        "ours_prefill_s": prefills["ours"], "peers_prefill_s": {name: prefills[name] for name in peers},
        "prefill_ratio": prefills["ours"] / best if peers else None,
        "other_ms": {name: ms[name] for name in names[1:]}, "other_prefill_s": {name: prefills[name] for name in names[1:]},
        "other_prefill_ratio": {name: prefills[name] / best if peers else None for name in names[1:]},
        "other_exact_logits_error": {
            name: checks[dtype]["exact_logits_error"] for name, dtype in zip(names[1:], dtypes[1:], strict=True)
        },
        "prompt_parts_s": prompt_parts,
        "breakdown_ms": parts, "weight_bytes": weight_bytes, "stream_gb_s": rate, "ceiling_ms": ceiling_ms,
        "fraction_of_stream": ceiling_ms / ms["ours"], "kv_ratio": kv["ratio"], "kv_ratio_total": kv["ratio_total"],
        "read_bits_per_element": kv["read_bits_per_element"], **checks[dtypes[0]],
        "torch": torch.__version__, "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    line = json.dumps(result)
    if args.json and args.json != "-":
        with open(args.json, "w") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
