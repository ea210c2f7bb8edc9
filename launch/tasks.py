"""The tasks of `evaluate`: which cells there are, which are missing, and what is shown when all are there."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.engine import Engine
from bitkv_dist.evaluate import drift as drifts
from bitkv_dist.evaluate import perplexity
from bitkv_dist.evaluate import retrieval as riddles
from bitkv_dist.evaluate import sensitivity as raising
from bitkv_dist.evaluate.ledger import Ledger
from bitkv_dist.launch import tables
from bitkv_dist.launch.bench import Bench
from bitkv_dist.text import read_prompt_file

EXACT = "(exact)"  # the column that all others are compared with, whether or not it is shown
DRIFT_TOKENS = 2048
COLUMNS_AT_ONCE = 8  # of a sensitivity run; they are lost when it is stopped before they are done
SIDES = {"layer": ("KV",), "side": ("K", "V")}


def ppl(bench: Bench) -> None:
    """A cell is a column on a text; the columns that a text misses walk it together with the exact one."""
    caches, texts = bench.columns(), bench.texts()
    columns = {f"codec {name}": cache.identity() for name, cache in caches.items()}
    digests = {f"text {name}": bench.digest(path) for name, path in texts.items()}
    ledger = bench.ledger(("codec", "text"), columns | digests | {"positions": bench.asked.positions})
    missing = {text: [name for name in caches if ledger.find(name, text) is None] for text in texts}
    ids = {text: bench.encode(texts[text]) for text in texts if missing[text]}
    for text in ids:
        bench.check_positions(ids[text])
    for text in ids:
        walking = {EXACT: perplexity.exact_like(bench.run.cache)} | {name: caches[name] for name in missing[text]}
        progress = bench.progress(f"{text}: {len(missing[text])} columns")
        scores = perplexity.compare(bench.model, walking, ids[text], *bench.asked.positions, progress)
        ledger.add(scores[name].row(name, text, scores[EXACT]) for name in missing[text])
    rows = [ledger.find(name, text) for text in texts for name in caches]
    tables.show_ppl(rows, bench.asked.positions, bench.run.cache, bench.book_notes(caches))
    if bench.asked.plot:
        tables.plot_ppl(rows, bench.asked.plot)


def retrieval(bench: Bench) -> None:
    """A cell is a column, a context, a depth and a kind of question; the columns that miss a prompt read it together."""
    asked, caches, path = bench.asked, bench.columns(), bench.text()
    columns = {f"codec {name}": cache.identity() for name, cache in caches.items()}
    settings = columns | {"text": bench.digest(path), "trials": asked.trials}
    ledger = bench.ledger(("codec", "context", "depth", "task"), settings)
    check_riddles(bench)
    questions = list(itertools.product(asked.context, asked.depths, asked.kinds))
    missing = {question: [name for name in caches if ledger.find(name, *question) is None] for question in questions}
    missing = {question: names for question, names in missing.items() if names}
    text = read_prompt_file(str(path), "--text")
    prompts = {
        (context, depth, kind): [
            riddles.make_prompt(bench.tokenizer, text, kind, context, depth, trial) for trial in range(asked.trials)
        ]
        for context, depth, kind in missing
    }  # all of them before a model is loaded: one may not fit
    for turn, (question, names) in enumerate(missing.items(), 1):
        context, depth, kind = question
        engines = [Engine(bench.model, caches[name], bench.mesh, riddles.ANSWER) for name in names]
        progress = bench.progress(f"{turn} of {len(missing)}: {kind} at {depth:g} of {context}, {len(names)} columns")
        right = dict.fromkeys(names, 0)
        for prompt in prompts[question]:
            for name, found in zip(names, riddles.answers(engines, prompt, progress), strict=True):
                right[name] += found
        cell = {"context": context, "depth": depth, "task": kind}
        ledger.add({"codec": name} | cell | {"score": count / asked.trials} for name, count in right.items())
    cells = itertools.product(caches, *map(dict.fromkeys, (asked.context, asked.depths, asked.kinds)))
    tables.show_retrieval([ledger.find(*cell) for cell in cells], asked.depths, bench.run.cache)


def check_riddles(bench: Bench) -> None:
    asked = bench.asked
    if unknown := [kind for kind in asked.kinds if kind not in riddles.TASKS]:
        raise ValueError(f"kinds {unknown[0]}: must be one of {', '.join(riddles.TASKS)}; correct the name")
    if asked.trials < 1:
        raise ValueError(f"trials {asked.trials}: must be at least 1; leave it out for one prompt per cell")
    for depth in asked.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depths {depth:g}: must be between 0 (start) and 1 (end); give a share of the context")
    for context in asked.context:
        if context + riddles.ANSWER.max_new_tokens > bench.max_positions:
            most = bench.max_positions - riddles.ANSWER.max_new_tokens
            raise ValueError(f"context {context}: the model has {bench.max_positions} positions; give at most {most}")


def drift(bench: Bench) -> None:
    """One cell, as layers follow from each other."""
    cache, path, wanted = bench.cache(), bench.text(), bench.asked.context
    if cache.eviction != "none":
        raise ValueError(f"cache.eviction {cache.eviction}: drift compares every token's score; set it to none")
    ids = bench.encode(path)
    tokens = wanted[0] if wanted else min(DRIFT_TOKENS, len(ids), bench.max_positions)
    most = min(len(ids), bench.max_positions)
    if tokens > most or len(wanted or [0]) > 1:
        given = ",".join(map(str, wanted))
        limits = f"the text has {len(ids)} tokens, the model {bench.max_positions} positions"
        raise ValueError(f"context {given}: must be one number up to {most}; {limits}")
    name = Path(bench.asked.config).stem
    ledger = bench.ledger(("layer", "head"), {"cache": cache.identity(), "text": bench.digest(path), "context": tokens})
    if not ledger.rows:
        found = drifts.drift(bench.model, cache, ids[:tokens], progress=bench.progress(f"drift of {name}"))
        ledger.add(asdict(head) for head in found)
    tables.show_drift(ledger.rows, f"{name} on {tokens} tokens of {path.name}", cache)


def sensitivity(bench: Bench) -> None:
    """A cell is a raise; those that are missing walk the text some at a time, each time with the exact cache."""
    asked, path, config = bench.asked, bench.text(), bench.cache()
    if asked.by not in SIDES:
        raise ValueError(f"by {asked.by}: must be layer or side; leave it out to raise whole layers")
    if (asked.budget_bits is None) != (asked.output is None):
        raise ValueError("budget-bits and output: one is useless without the other; give both or none")
    steps = raising.raises(config, bench.shape.layers, SIDES[asked.by], asked.raise_bits)
    if asked.budget_bits is not None:
        raising.check_budget(config, bench.shape, asked.budget_bits)
    settings = {"cache": config.identity(), "text": bench.digest(path), "positions": asked.positions}
    ledger = bench.ledger(("step",), settings)

    measure(bench, ledger, path, {"base": config} | {str(step): raising.raised(config, [step]) for step in steps})
    base = ledger.find("base")
    gains = {step: base["kl"] - ledger.find(str(step))["kl"] for step in steps}
    if asked.output is None:
        tables.show_sensitivity(gains, [], [base])
        return
    chosen = raising.spend(config, bench.shape, gains, asked.budget_bits)
    schedule = raising.raised(config, chosen)
    name = f"schedule {raising.described(schedule)}"
    measure(bench, ledger, path, {name: schedule})
    found, where = ledger.find(name), "positions {}:{}".format(*asked.positions)
    cost, before = (f"KL {row['kl']:.4f} to exact at {row['stored_bits']:.3f} bits stored per element" for row in (found, base))
    comments = (
        f"From {asked.config} by bitkv evaluate --task sensitivity: {bench.run.generate.model}, {path.name}, {where}.",
        f"{cost}; before: {before}.",
    )
    asked.output.write_text(raising.as_yaml(schedule, comments), encoding="utf-8")
    tables.show_sensitivity(gains, chosen, [base, found])


def measure(bench: Bench, ledger: Ledger, path: Path, columns: dict[str, CacheConfig]) -> None:
    """Bring the KL and the stored bits of the columns that are missing into the ledger."""
    missing = [name for name in columns if ledger.find(name) is None]
    ids = bench.encode(path) if missing else []
    for first in range(0, len(missing), COLUMNS_AT_ONCE):
        names = missing[first : first + COLUMNS_AT_ONCE]
        where = bench.check_positions(ids)
        progress = bench.progress(f"columns {first + 1} to {first + len(names)} of {len(missing)}")
        scores = perplexity.compare(bench.model, {name: columns[name] for name in names}, ids, *where, progress)
        found = ((name, score.kl / score.tokens, score.stored_bits) for name, score in scores.items())
        ledger.add(dict(zip(("step", "kl", "stored_bits"), numbers, strict=True)) for numbers in found)
