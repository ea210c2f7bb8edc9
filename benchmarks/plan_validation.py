"""What the planner's time model predicts for published measurements, beside what was measured.

    python benchmarks/plan_validation.py

The model has four constants (bitkv_dist/plan/latency.py) and the links' latencies; all rows share them. The constants were
chosen by the slopes and intercepts (rows marked "fit"); the other rows are checks. Sources:

vLLM: "The State of FP8 KV-Cache and Attention Quantization in vLLM", vllm.ai blog, 2026-04-22: one request, H100 with
    FlashAttention 3 and B200 with FlashInfer, time per token = slope * input tokens + intercept; and 8 requests of about 20,000
    input and 2,000 output tokens at a time.
gpt-fast: README of github.com/pytorch-labs/gpt-fast: batch 1, prompt of 5 tokens, bf16, 8 A100-80GB limited to 330 W.
SGLang: DeepSeek-V3.1, TP 8 with decode context parallelism 8, batch 1, at no stated context; 8 H20 as in
    github.com/sgl-project/sglang/pull/14194. A mixture of experts with latent attention is no model of the planner's table: its
    active weights (37e9, fp8) and its five collectives per layer (two sums of TP, three of DCP) are put into the same formulas.

The last line is one JSON object.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.plan import latency
from bitkv_dist.plan.machines import GPUS, NODE_LINKS, join
from bitkv_dist.plan.memory import Job, dense_page
from bitkv_dist.plan.models import MODELS, ModelShape

LLAMA_8B = MODELS["llama-3.1-8b"]
LLAMA2_7B = ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
LLAMA2_70B = ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096)
DENSE = CacheConfig(codec="exact", key_bits=16, value_bits=16, sink_tokens=0, recent_tokens=0)
H20_BANDWIDTH_GB_S = 4000


@dataclass(frozen=True)
class Row:
    source: str
    setting: str
    unit: str
    predicted: float
    measured: float
    fit: bool = False  # the constants were chosen with it in sight

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def step(shape: ModelShape, gpu: str, context: int, tp: int = 1, batch: int = 1, element_bytes: int = 2) -> latency.StepMs:
    """A step with a cache that keeps every element in so many bytes."""
    plain = Job(shape, DENSE, context, batch)
    job = Job(shape, DENSE, context, batch, page=dense_page(plain, element_bytes))
    return latency.step_ms(job, join(GPUS[gpu], tp, 8, []), tp, 1)


def slope(gpu: str, element_bytes: int) -> float:
    """Milliseconds per cached token."""
    short, long = (step(LLAMA_8B, gpu, context, element_bytes=element_bytes).cache for context in (1 << 13, 1 << 17))
    return (long - short) / ((1 << 17) - (1 << 13))


def deepseek_ms() -> float:
    layers, ranks, active_bytes = 61, 8, 37e9
    weights = active_bytes / ranks / (H20_BANDWIDTH_GB_S * 1e6 * latency.WEIGHT_RATE)
    return weights + layers * (latency.LAYER_MS + 5 * NODE_LINKS["nvlink"].collective_ms(ranks, 0)) + latency.STEP_MS


def rows() -> list[Row]:
    deepseek = Row("SGLang", "DeepSeek-V3.1, h20, tp 8, dcp 8, batch 1", "ms", deepseek_ms(), 9.04)
    return [*vllm_rows(), *gpt_fast_rows(), deepseek]


def vllm_rows() -> list[Row]:
    found = []
    for gpu, bf16, fp8, intercept in (("h100", 4.37e-5, 2.37e-5, 6.44), ("b200", 1.80e-5, 9.72e-6, 3.93)):
        what = f"llama-3.1-8b, {gpu}"
        found.append(Row("vLLM", f"{what}, bf16 cache: slope", "ms/token", slope(gpu, 2), bf16, fit=True))
        found.append(Row("vLLM", f"{what}, fp8 cache: slope", "ms/token", slope(gpu, 1), fp8, fit=True))
        found.append(Row("vLLM", f"{what}: intercept", "ms", step(LLAMA_8B, gpu, 1).total, intercept, fit=True))
    for name, element_bytes, time in (("bf16", 2, 15.18), ("fp8", 1, 12.93)):
        loaded = step(LLAMA_8B, "h100", 21000, batch=8, element_bytes=element_bytes).total
        found.append(Row("vLLM", f"llama-3.1-8b, h100, {name} cache, 8 x 21,000 tokens, prefills between", "ms", loaded, time))
    return found


def gpt_fast_rows() -> list[Row]:
    speeds = {
        LLAMA2_7B: {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
        LLAMA2_70B: {2: 21.32, 4: 38.01, 8: 62.50},
    }
    return [
        Row("gpt-fast", f"{shape.name}, a100 (330 W), tp {tp}", "ms", step(shape, "a100", 100, tp).total, 1e3 / tokens_per_s)
        for shape, by_tp in speeds.items()
        for tp, tokens_per_s in by_tp.items()
    ]


def main() -> None:
    print(f"{'source':9s} {'setting':67s} {'predicted':>10s} {'measured':>10s} {'error':>7s}")
    found = rows()
    for row in found:
        numbers = f"{row.predicted:10.3g} {row.measured:10.3g} {row.error:+7.1%}"
        print(f"{row.source:9s} {row.setting:67s} {numbers}  {row.unit}{', fit' * row.fit}")
    constants = {name: getattr(latency, name) for name in ("WEIGHT_RATE", "CACHE_RATE", "LAYER_MS", "STEP_MS")}
    lines = [asdict(row) | {"error": row.error} for row in found]
    print(json.dumps({"constants": constants, "torch": torch.__version__, "rows": lines}))


if __name__ == "__main__":
    main()
