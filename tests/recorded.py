"""An engine that keeps the logits of every choice, started on a tiny model, on one rank or as a part of several."""

from __future__ import annotations

import simulated
import torch

from bitkv_dist import model
from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.config import GenerateConfig
from bitkv_dist.engine import Engine

EXACT = {"codec": "exact", "key_bits": 16, "value_bits": 16}
SMALL = {"page_tokens": 64, "sink_tokens": 64, "recent_tokens": 32}
CODECS = {
    "4bit": {"key_bits": 4, "value_bits": 4},
    "2bit": {"key_bits": 2, "value_bits": 2},
    "tiered4": {"key_bits": 4, "value_bits": 4, "scan_bits": 1},
    "minmax": {"codec": "minmax", "key_bits": 4, "value_bits": 4},
}
SAMPLED = {"temperature": 1.0, "sampling_seed": 11}


class RecordingEngine(Engine):
    """Keeps the logits that every choice was made from."""

    def __init__(self, *args, **kwargs) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def choose(self, logits, live, result, on_token):
        self.logits.append(logits.clone())
        return super().choose(logits, live, result, on_token)


def alone(function, *args):
    """`function(mesh, *args)` in a world of one."""
    return simulated.run(1, function, *args)[0]


def start(mesh, folder, cache: dict, generate: dict) -> RecordingEngine:
    served = model.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    if "eos" in generate:
        generate = dict(generate)
        served.generation_config.eos_token_id = generate.pop("eos")
    return RecordingEngine(served, CacheConfig(**cache), mesh, GenerateConfig(model=str(folder), **generate))
