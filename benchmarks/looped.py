"""Do loop-anchored residuals (codec looped) beat a plain rotated INT2 at equal bytes? A small looped model, trained here.

    python benchmarks/looped.py --train looped-tiny --text tests/data/handbook.txt       # minutes
    python benchmarks/looped.py --model looped-tiny --text tests/data/tale.txt

The model reads bytes, has 2 layers of weights in 4 loops, and learns a text and, in half of its rows, to repeat what stands up
to 128 bytes before, so that it has a reason to look back. Every query attends to sealed keys, as in `bitkv evaluate`.
Columns: KL of the exact to the packed prediction in nats, the largest change of a logit, how often the best token stays, and
the relative error of attention outputs at the true queries.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bitkv_dist import model as served_models
from bitkv_dist import ouro
from bitkv_dist.cache import PackedCache, Step
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.exact import ExactCodec
from bitkv_dist.codec.interface import make_codec
from bitkv_dist.codec.looped import LoopedCodec, anchor_of
from bitkv_dist.evaluate.perplexity import exact_like, head_shape
from bitkv_dist.kernels import reference
from bitkv_dist.kernels.prefill import causal_attention
from bitkv_dist.model import ServedModel
from bitkv_dist.prefill import packed_chunks
from bitkv_dist.rotation import layer_signs
from bitkv_dist.schedule import LayerConfig

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, "total_ut_steps": 4,
}  # fmt: skip
LENGTH, ROWS, REPEATS = 512, 4, (8, 128)  # tokens of a row, rows of a step, after how many tokens a row says the same again

BRANCH = 0.3  # what attention and MLP add to a hidden state of 1, before training


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """256 bytes, a token each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.save_pretrained(folder)
    return tokenizer


def batch(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows int64 [ROWS, LENGTH] of `data`; in every other one its first tokens come again and again."""
    starts = torch.randint(0, len(data) - LENGTH, (ROWS,), generator=generator).tolist()
    repeats = torch.randint(*REPEATS, (ROWS,), generator=generator).tolist()
    rows = [data[start : start + (LENGTH if i % 2 else repeats[i])] for i, start in enumerate(starts)]
    return torch.stack([row.repeat(-(-LENGTH // len(row)))[:LENGTH] for row in rows])


def train(folder: Path, texts: list[Path], steps: int, seed: int = 0) -> float:
    """Trains a model on texts and saves it; returns the mean of the last losses, nats per byte."""
    ouro.register()
    torch.manual_seed(seed)
    generator, tokenizer = torch.Generator().manual_seed(seed), save_tokenizer(folder)
    model = AutoModelForCausalLM.from_config(ouro.OuroConfig(**SIZES)).train()
    with torch.no_grad():  # else what a token is drowns in the first loop's norms, and few steps teach little
        model.model.embed_tokens.weight *= 1 / model.config.initializer_range
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(BRANCH)
            layer.post_attention_layernorm_2.weight.fill_(BRANCH)
    data = torch.tensor(tokenizer.encode("\n".join(path.read_text() for path in texts)))
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps, pct_start=0.1)
    losses, started = [], time.perf_counter()
    for step in range(steps):
        ids = batch(data, generator)
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1}: loss {mean(losses[-20:]):.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    model.eval().save_pretrained(folder)
    return mean(losses[-20:])


class GroupedCodec(ExactCodec):
    """Plain rotation and INT2 whose scales are as fine as equal bytes allow: one for GROUP channels of a token, and the page's
    centroid. What it stands for is kept in the model's dtype; `bits` is what it would store per element."""

    GROUP = 16

    def __init__(self, config: CacheConfig, heads, layer: int) -> None:
        super().__init__(config, heads, layer)
        self.signs = {side: layer_signs(config.seed, layer, 0, heads.kv_heads, side, heads.head_dim) for side in "KV"}
        self.bits = 2 + 16 / self.GROUP + 16 / config.page_tokens

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().encode(self.rounded(k.float(), "K").to(k.dtype), self.rounded(v.float(), "V").to(v.dtype))

    def rounded(self, x: torch.Tensor, side: str) -> torch.Tensor:
        """x fp32 [pages, HK, P, D] through the code and back."""
        z = reference.rotate(x, self.signs[side][:, None, :])
        centroid = z.mean(-2, keepdim=True).half().float()
        codes = reference.quantize((z - centroid).unflatten(-1, (-1, self.GROUP)), 2, 2)
        z = ((codes.code.float() - 1.5) * codes.full.float().unsqueeze(-1)).flatten(-2) + centroid
        return reference.rotate_back(z, self.signs[side][:, None, :])


class Listener:
    """Stands in for a cache layer: attends exactly, and keeps queries [HK, G, n, D], keys and values [HK, n, D]."""

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> tuple[Listener, Listener]:
        self.k, self.v = k[0], v[0]
        return self, self

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        self.q, self.scaling = q[0].unflatten(0, (len(self.k), -1)), scaling
        return causal_attention(self.q, self.k, self.v, scaling).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def output_error(self, coded: tuple[torch.Tensor, torch.Tensor], sink: int) -> float:
        """Of the last page's queries, with coded keys and values [pages, HK, P, D] in the place of those behind the sink."""
        k, v = (x.clone() for x in (self.k, self.v))
        tokens = len(coded[0]) * coded[0].shape[2]
        for x, pages in zip((k, v), coded, strict=True):
            x[:, sink : sink + tokens] = pages.transpose(0, 1).flatten(1, 2)
        q = self.q[:, :, sink + tokens :]
        truth, found = (causal_attention(q, *x, self.scaling) for x in ((self.k, self.v), (k, v)))
        return ((found - truth).norm() / truth.norm()).item()


def variants(window: dict, layers: int, loops: int) -> dict[str, CacheConfig | type[GroupedCodec]]:
    """The caches that are compared. window: page, sink and recent tokens."""
    last = LayerConfig(tuple(range(layers - layers // loops, layers)), key_bits=4, value_bits=4)
    return {
        "looped": CacheConfig("looped", 2, 2, **window),
        "int2": CacheConfig(key_bits=2, value_bits=2, **window),
        "int2, last loop int4": CacheConfig(key_bits=2, value_bits=2, layers=(last,), **window),
        "int2, 16 channels a scale": GroupedCodec,
        "int3": CacheConfig(key_bits=3, value_bits=3, **window),
        "int4": CacheConfig(key_bits=4, value_bits=4, **window),
    }


@torch.inference_mode()
def predictions(model: ServedModel, window: dict, ids: list[int], first: int, last: int) -> list[dict]:
    """What each cache does to the logits after positions first .. last - 1, the text fed a page at a time."""
    heads, exact = head_shape(model), exact_like(CacheConfig(**window))
    caches = {"": PackedCache(exact, heads, 1)}
    for name, config in variants(window, model.layers, model.loops).items():
        grouped = config is GroupedCodec
        caches[name] = PackedCache(exact if grouped else config, heads, 1)
        for layer in caches[name].layers if grouped else ():
            layer.codec = GroupedCodec(exact, heads, layer.index)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in caches}
    for name, cache in caches.items():
        for hidden in packed_chunks(model, cache, Step([0]), ids[:last], window["page_tokens"]):
            found[name].append(model.head(hidden[0]))
    truth = torch.cat(found.pop(""))[first:]
    rows = []
    for name, parts in found.items():
        logits = torch.cat(parts)[first:]
        log_p, exact_log_p = logits.log_softmax(-1), truth.log_softmax(-1)
        kl = (exact_log_p.exp() * (exact_log_p - log_p)).sum(-1)
        codec = caches[name].layers[0].codec
        bits = codec.bits if isinstance(codec, GroupedCodec) else caches[name].stored_bits_per_element
        rows.append({
            "cache": name, "stored_bits": bits, "saved": 1 - bits / 16, "kl": kl.mean().item(),
            "largest_logit_change": (logits - truth).abs().max().item(),
            "logit_range": (truth.amax(-1) - truth.amin(-1)).mean().item(),
            "top1": (logits.argmax(-1) == truth.argmax(-1)).float().mean().item(),
        })  # fmt: skip
    return rows


@torch.inference_mode()
def outputs(model: ServedModel, window: dict, ids: list[int]) -> dict[str, list[float]]:
    """Of each cache, per loop: the relative error of attention outputs, true queries of the last page over coded keys."""
    page, sink = window["page_tokens"], -(-window["sink_tokens"] // window["page_tokens"]) * window["page_tokens"]
    end = len(ids) // page * page - page
    hidden, heads = model.embed(torch.tensor([ids])), head_shape(model)
    heard = [Listener() for _ in range(model.layers)]
    positions = torch.arange(len(ids)).unsqueeze(0)
    for index, listener in enumerate(heard):
        hidden = model.layer(index, hidden, positions, model.rotary(hidden, positions), listener)
    pages = [[x[:, sink:end].unflatten(1, (-1, page)).transpose(0, 1) for x in (each.k, each.v)] for each in heard]
    stack, exact = model.layers // model.loops, exact_like(CacheConfig(**window))
    found = {}
    for name, config in variants(window, model.layers, model.loops).items():
        grouped = config is GroupedCodec
        codecs = [
            GroupedCodec(exact, heads, index) if grouped else make_codec(config.for_layer(index), heads, index)
            for index in range(model.layers)
        ]
        errors = []
        for index, (codec, own, each) in enumerate(zip(codecs, pages, heard, strict=True)):
            if isinstance(codec, LoopedCodec):
                last = anchor_of(index, heads)
                anchors = codecs[last].encode(*pages[last])
                records = torch.cat((codec.encode(*own, anchors), anchors), -1)
            else:
                records = codec.encode(*own)
            errors.append(each.output_error(codec.decode(records), sink))
        found[name] = [sum(errors[loop * stack : (loop + 1) * stack]) / stack for loop in range(model.loops)]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, metavar="DIR", help="train a model into this folder and end")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="say the first N tokens of the text again and again")
    parser.add_argument("--first", type=int, default=256, help="first position that is predicted from")
    parser.add_argument("--last", type=int, default=512)
    parser.add_argument("--page", type=int, choices=(64, 128), default=64, help="tokens of a page, sink and window")
    asked = parser.parse_args()
    if (asked.train is None) == (asked.model is None) or not asked.text:
        parser.error("give --train DIR or --model DIR, and --text FILE")
    return asked


def main() -> None:
    asked = parse()
    if asked.train is not None:
        loss = train(asked.train, asked.text, asked.steps)
        print(f"{asked.train}: loss {loss:.3f} nats per byte over the last 20 steps")
        return
    torch.set_num_threads(1)
    model = served_models.load(str(asked.model), dtype=torch.float32, device=torch.device("cpu"))
    ids = model.tokenizer.encode(asked.text[0].read_text())[: asked.repeat or None]
    ids = (ids * -(-asked.last // len(ids)))[: asked.last]
    window = {"page_tokens": asked.page, "sink_tokens": asked.page, "recent_tokens": asked.page}
    rows, errors = predictions(model, window, ids, asked.first, asked.last), outputs(model, window, ids)
    print("cache                       bits  saved       KL  max|dlogit|   top-1  relative error of attention outputs, by loop")
    for row in rows:
        row["output_errors"] = errors[row["cache"]]
        loops = " ".join(f"{error:.4f}" for error in row["output_errors"])
        change = f"{row['kl']:.6f} {row['largest_logit_change']:12.3f} {row['top1']:7.1%}"
        print(f"{row['cache']:27} {row['stored_bits']:.2f} {row['saved']:6.1%} {change}  {loops}")
    print(json.dumps({"model": str(asked.model), "tokens": asked.last - asked.first, "window": window, "rows": rows}))


if __name__ == "__main__":
    main()
