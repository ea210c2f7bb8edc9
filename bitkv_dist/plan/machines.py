"""GPUs and the links between them: what the data sheets say, and measured latencies of small collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bitkv_dist.rules import listed, near_miss


@dataclass(frozen=True)
class Link:
    """A way between ranks: gb_s in one direction per GPU, and what a small collective of n ranks takes, in microseconds:
    base_us + hop_us * log2 n."""

    name: str
    gb_s: float
    base_us: float
    hop_us: float

    def collective_ms(self, ranks: int, received_bytes: float) -> float:
        """Time of a collective in which every rank receives so many bytes."""
        latency_us = self.base_us + self.hop_us * math.log2(ranks)
        return latency_us / 1e3 + received_bytes / self.gb_s / 1e6


@dataclass(frozen=True)
class Gpu:
    """Memory and bandwidth as the data sheet gives them, in GB = 10^9 bytes. Drivers report about 6 % more memory (GiB for
    the sheet's GB); that difference is left to what the CUDA context, NCCL and the allocator take."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    link: Link

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 10**9)


# Inside a node. Small all-reduces on NVLink: about 6 us on 2 H100 (github.com/NVIDIA/nccl/issues/1259), 12 us on 8 H20
# (github.com/deepseek-ai/DeepEP/issues/303), both with NCCL; engines' own kernels take less.
_NVLINK3, _NVLINK4, _NVLINK5 = (Link("nvlink", gb_s, 5, 1.5) for gb_s in (300, 450, 900))
_FABRIC = Link("xgmi", 448, 6, 2)
NODE_LINKS = {"nvlink": _NVLINK4, "xgmi": _FABRIC, "pcie": Link("pcie", 25, 12, 4)}
# Between nodes, a network card for each GPU. 2 ranks on HDR InfiniBand: 19 us (github.com/NVIDIA/nccl-tests/issues/150).
NETWORKS = {
    "ib": Link("ib", 50, 13, 6),
    "roce": Link("roce", 50, 17, 8),
    "ethernet": Link("ethernet", 12.5, 60, 30),
}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 2039, _NVLINK3),
        Gpu("h100", 80, 3350, _NVLINK4),
        Gpu("h200", 141, 4800, _NVLINK4),
        Gpu("b200", 180, 8000, _NVLINK5),
        Gpu("mi300x", 192, 5300, _FABRIC),
    )
}


@dataclass(frozen=True)
class Machine:
    """The GPUs that a job has: how many, of which kind, and how they are joined."""

    gpu: Gpu
    gpus: int
    node_size: int
    network: Link

    def tp_link(self, tp: int, sp: int) -> Link:
        """The slowest link of a tensor-parallel group: consecutive ranks, which fill one node after the other."""
        alone = tp * sp <= self.node_size
        return self.gpu.link if alone or self.node_size % tp == 0 else self.network

    def sp_link(self, tp: int, sp: int) -> Link:
        """The slowest link of a sequence-parallel group: every tp-th rank."""
        return self.gpu.link if tp * sp <= self.node_size else self.network


def find_gpu(name: str | None, memory_gb: float | None, bandwidth_gb_s: float | None) -> Gpu:
    """A table entry, with its numbers replaced by those given; without a name both must be."""
    for flag, number in (("memory", memory_gb), ("bandwidth", bandwidth_gb_s)):
        if number is not None and not (0 < number < math.inf):
            raise ValueError(f"{flag} {number:g}: must be above 0; give GB{'/s' if flag == 'bandwidth' else ''} per GPU")
    if name is None:
        if memory_gb is None or bandwidth_gb_s is None:
            raise ValueError(f"gpu: none given; use --gpu {listed(GPUS)}, or --memory GB and --bandwidth GB/s together")
        return Gpu("custom", memory_gb, bandwidth_gb_s, _NVLINK4)
    if name.lower() not in GPUS:
        raise ValueError(f"gpu {name}: not in the table; give --memory and --bandwidth, or {near_miss(name.lower(), GPUS)}")
    gpu = GPUS[name.lower()]
    return replace(gpu, memory_gb=memory_gb or gpu.memory_gb, bandwidth_gb_s=bandwidth_gb_s or gpu.bandwidth_gb_s)


def join(gpu: Gpu, gpus: int, node_size: int, links: list[str]) -> Machine:
    """A machine. Each of `links` names the link inside a node or between nodes, or is GB/s[:microseconds] for both."""
    for flag, number in (("gpus", gpus), ("node-size", node_size)):
        if number < 1:
            raise ValueError(f"{flag} {number}: must be at least 1; nearest is 1")
    network = NETWORKS["ib"]
    for text in links:
        if text in NODE_LINKS:
            gpu = replace(gpu, link=gpu.link if gpu.link.name == text else NODE_LINKS[text])
        elif text in NETWORKS:
            network = NETWORKS[text]
        else:
            network = _measured_link(text)
            gpu = replace(gpu, link=network)
    return Machine(gpu, gpus, node_size, network)


def _measured_link(text: str) -> Link:
    rate, _, latency = text.partition(":")
    try:
        numbers = float(rate), float(latency or NETWORKS["ib"].base_us)
    except ValueError:
        known = [*NODE_LINKS, *NETWORKS]
        raise ValueError(f"link {text!r}: must be GB/s[:us] such as 50:20, or a name; {near_miss(text, known)}") from None
    if not (0 < numbers[0] < math.inf and 0 <= numbers[1] < math.inf):
        raise ValueError(f"link {text!r}: rate must be above 0 and latency at least 0; write GB/s:us such as 50:20")
    return Link(text, *numbers, 0.0)
