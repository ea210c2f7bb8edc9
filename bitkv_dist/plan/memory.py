"""Bytes of a rank, as exact integers from the same layout numbers that the cache allocates by.

Only the workspace of the prefill is an estimate: the temporaries of one chunk in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from bitkv_dist import placement
from bitkv_dist.cache import reserved_granules
from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.codec.interface import HeadShape, make_codec
from bitkv_dist.codec.planes_cpu import unserved_rule
from bitkv_dist.eviction import STRIDE
from bitkv_dist.plan.models import ModelShape
from bitkv_dist.prompt import fitting_heads, prompt_bytes
from bitkv_dist.sequence import exact_rows, held_end
from bitkv_dist.split import Split
from bitkv_dist.subtree import SCORES_AT_ONCE, leaf_stride, partials_at_once, queries_at_once

FLOAT32_BYTES = 4
INT64_BYTES = 8
# Rule mass refines what it takes: 31 % and 44 % of the tokens for 0.80 and 0.90 where it was measured (benchmarks/NOTES.md).
MASS_SHARE = 0.5
# What the libraries take at their first call, in code and buffers, and the allocator between tensors: measured on CPU by
# benchmarks/prefill_memory.py. A GPU's context is in the memory that its data sheet leaves out (plan/machines.py).
SPARE_WORKSPACE_BYTES = 56 << 20
PACKED_SPARE_BYTES = 30 << 20  # of a packed prefill, which gives large blocks back (heap.py)


@dataclass(frozen=True)
class PageBytes:
    """One page of one KV head, summed over all layers: bytes that it takes, and that a decode step reads of it. books: bytes
    of codebooks that all pages share."""

    stored: int
    read: float
    books: int = 0


@dataclass(frozen=True)
class Job:
    """What is to be held and decoded: `batch` sequences of `context` tokens each, prompt and answer together."""

    shape: ModelShape
    config: CacheConfig
    context: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16  # of weights, hidden states and exact tokens
    prefill: str = "exact"
    chunk: int = GRANULE_TOKENS
    prefill_memory_gb: float | None = None  # what the keys and values of one layer may take in an exact prefill
    page: PageBytes | None = field(default=None)  # None = as `config` stores it
    layout: str = "replicated"
    compiled: bool = True  # whether the device has kernels; plain torch still does what they do not serve

    def split(self, tp: int, sp: int) -> Split:
        """What the fullest rank of a grid has of the model."""
        return Split(tp, sp, layout=self.layout)

    @property
    def plain(self) -> bool:
        """Whether plain torch attends to sealed pages for a chunk of a prompt: kernels read words in decode steps alone."""
        return not self.compiled or self.config.codec != "planes" or unserved_rule(self.config) is not None

    @cached_property
    def page_bytes(self) -> PageBytes:
        shape = self.shape
        return self.page or packed_page(self.config, shape.layers, shape.head_dim, self.dtype, shape.kv_heads, shape.loops)


@dataclass(frozen=True)
class RankBytes:
    """What one rank allocates. `slack`: the part of `cache` that holds no sealed page. `prefill_peak`: what comes on top of
    the rest while a prompt of the whole context is read. `books`: codebooks of calibrated codecs. `tables`: page tables of a
    bounded cache, in the host's memory."""

    weights: int
    cache: int
    exact: int
    prefill_peak: int
    slack: int
    books: int = 0
    tables: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.exact + self.prefill_peak + self.books + self.tables


@cache
def packed_page(
    config: CacheConfig, layers: int, head_dim: int, dtype: torch.dtype, kv_heads: int = 1, loops: int = 1
) -> PageBytes:
    """Of a page as the codecs of `config` write it; kv_heads matter to those that keep a token's scale for all of them."""
    if config.codec == "looped":
        return looped_page(config, HeadShape(layers, 0, 1, head_dim, dtype, loops=loops))
    stored, read, books = 0, 0.0, 0
    found: dict[tuple[CacheConfig, int], PageBytes] = {}
    for index in range(layers):
        own, books_of = config.for_layer(index), index if config.calibration else 0
        page = found.get((own, books_of)) or layer_page(own, head_dim, dtype, kv_heads, books_of)
        found[own, books_of] = page
        stored, read, books = stored + page.stored, read + page.read, books + page.books
    return PageBytes(stored, read, books)


def layer_page(config: CacheConfig, head_dim: int, dtype: torch.dtype, kv_heads: int, layer: int = 0) -> PageBytes:
    codec = make_codec(config, HeadShape(1, 0, kv_heads if config.calibration else 1, head_dim, dtype), layer)
    if config.codec != "planes" and not config.refines:
        return PageBytes(codec.record_bytes, codec.record_bytes, codec.book_bytes)
    scanned = codec.count_reads(1, 1, 0).bits
    bits = scanned / codec.heads.kv_heads
    if config.refines:
        bits += refined_share(config) * config.page_tokens * (codec.count_reads(1, 1, 1).bits - scanned)
    return PageBytes(codec.record_bytes, bits / 8, codec.book_bytes)


def looped_page(config: CacheConfig, heads: HeadShape) -> PageBytes:
    """Every loop reads its own records and, but for the last, those of its anchor."""
    earlier, anchor = (make_codec(config, heads, layer).record_bytes for layer in (0, heads.layers - 1))
    stack = heads.layers // heads.loops
    stored = stack * anchor + (heads.layers - stack) * earlier
    return PageBytes(stored, stored + (heads.layers - stack) * anchor)


def refined_share(config: CacheConfig) -> float:
    """The share of sealed tokens that a step reads again with all planes."""
    rule = config.refine
    if rule.rule == "mass":
        return MASS_SHARE
    tokens = max(rule.min_tokens, -(-rule.value * GRANULE_TOKENS // 1))
    return min(1.0, tokens / GRANULE_TOKENS)


def dense_page(job: Job, element_bytes: int) -> PageBytes:
    """Of a page that keeps every element in so many bytes, and reads them all: 2 = bf16, 1 = fp8 without its few scales."""
    size = job.config.page_tokens * job.shape.head_dim * 2 * element_bytes * job.shape.layers
    return PageBytes(size, size)


def rank_bytes(job: Job, tp: int, sp: int) -> RankBytes:
    """What the fullest rank of a grid allocates."""
    return max(every_rank(job, tp, sp), key=lambda found: found.total)


def every_rank(job: Job, tp: int, sp: int) -> list[RankBytes]:
    """What the ranks of a grid allocate, by sp_rank; the TP ranks behind one are alike."""
    shape, config, element = job.shape, job.config, job.dtype.itemsize
    heads = len(job.split(tp, sp).kv_heads(shape.kv_heads))
    granule = GRANULE_TOKENS // config.page_tokens * heads * job.page_bytes.stored
    weights = shape.elements(job.split(tp, sp)) * element
    exact = job.batch * shape.layers * 2 * heads * exact_rows(config) * shape.head_dim * element
    reserved = shares(job, sp, reserved_granules(config, job.context) * GRANULE_TOKENS)
    sealed = sealed_shares(job, sp)
    books = job.page_bytes.books * heads // shape.kv_heads
    tables = job.batch * shape.layers * heads * table_bytes(job)
    found = []
    for rank, prompt in enumerate(shares(job, sp, job.context)):
        cache = reserved[rank] // GRANULE_TOKENS * granule
        slack = cache - sealed[rank] // config.page_tokens * heads * job.page_bytes.stored
        found.append(RankBytes(weights, cache, exact, prefill_peak(job, tp, sp, prompt), slack, books, tables))
    return found


def table_bytes(job: Job) -> int:
    """Of one sequence, layer and KV head (eviction.PageTable): page, mass and queries of every slot, on every rank all of
    them."""
    config = job.config
    if config.eviction == "none":
        return 0
    return (held_end(config, job.context) - config.sink_rounded) // config.page_tokens * 3 * INT64_BYTES


def sealed_shares(job: Job, sp: int) -> list[int]:
    """Sealed tokens of each sequence rank when every sequence has all its tokens."""
    sink = shares(job, sp, job.config.sink_rounded)
    return [end - start for end, start in zip(shares(job, sp, held_end(job.config, job.context)), sink, strict=True)]


def shares(job: Job, sp: int, tokens: int) -> list[int]:
    """Of the first `tokens` tokens of every sequence, how many lie in granules of each sequence rank."""
    whole, rest = divmod(tokens, GRANULE_TOKENS)
    modulus = placement.residue_count(sp)
    first = [0] * sp  # of the batch's first sequence; the others are turned by their index
    for residue in range(min(modulus, whole + 1)):
        granules = (whole - residue + modulus - 1) // modulus
        first[placement.owner(residue, 0, sp)] += granules * GRANULE_TOKENS + (rest if whole % modulus == residue else 0)
    found = [0] * sp
    for turn in range(min(sp, job.batch)):
        alike = -(-(job.batch - turn) // sp)
        for rank in range(sp):
            found[rank] += alike * first[(rank - turn) % sp]
    return found


def prefill_peak(job: Job, tp: int, sp: int, prompt_tokens: int) -> int:
    """Exact: hidden states of the prompt tokens in this rank's granules, and the keys and values of one layer. Packed: neither.
    And the workspace of a chunk; or the logits of the last tokens, if they take more."""
    shape, element = job.shape, job.dtype.itemsize
    logits = job.batch * shape.vocabulary * (element + FLOAT32_BYTES)
    if job.prefill == "packed":
        return max(packed_workspace(job, tp, sp), logits)
    hidden = prompt_tokens * shape.hidden * element
    return max(hidden + held_keys(job, tp, prompt_tokens) + prompt_keys(job, tp, sp) + exact_workspace(job, tp, sp), logits)


def held_keys(job: Job, tp: int, prompt_tokens: int) -> int:
    """Exact keys and values of this rank's granules in the earlier loops, which codec looped holds until the last has run."""
    if job.config.codec != "looped":
        return 0
    shape = job.shape
    earlier = shape.layers - shape.layers // shape.loops
    heads = len(job.split(tp, 1).kv_heads(shape.kv_heads))
    return earlier * prompt_tokens * 2 * heads * shape.head_dim * job.dtype.itemsize


def prompt_keys(job: Job, tp: int, sp: int) -> int:
    """Keys and values of one layer, as far as `prefill_memory_gb` lets every rank have them whole."""
    try:
        at_once = gathered_heads(job, tp, sp)
    except ValueError:  # said of the grid that is chosen (grids.plan)
        at_once = 1
    return prompt_bytes([job.context] * job.batch, prompt_heads(job, tp, sp), sp, at_once)


def prompt_heads(job: Job, tp: int, sp: int) -> tuple[int, int, int]:
    """KV heads of a rank, dimension, bytes per element."""
    return len(job.split(tp, sp).kv_heads(job.shape.kv_heads)), job.shape.head_dim, job.dtype.itemsize


def gathered_heads(job: Job, tp: int, sp: int) -> int:
    """How many KV heads an exact prefill gathers at once. ValueError where `prefill_memory_gb` is too little for one."""
    limit = job.prefill_memory_gb
    lengths = [job.context] * job.batch
    return fitting_heads(None if limit is None else limit * 1e9, lengths, prompt_heads(job, tp, sp), sp)


def exact_workspace(job: Job, tp: int, sp: int) -> int:
    """Temporaries of a chunk in a decoder layer, and the round's keys and values as they are exchanged; with layout helix also
    the chunks of all SP ranks on their way through the MLP. An estimate."""
    shape, element, split = job.shape, job.dtype.itemsize, job.split(tp, sp)
    row = 2 * len(split.kv_heads(shape.kv_heads)) * shape.head_dim * element
    gathered = 2 * sp * shape.hidden * element if split.helix else 0
    watched = watched_bytes(job, tp) if job.config.eviction == "heavy" else 0
    return job.chunk * (layer_row_bytes(job, tp) + (sp + 2) * row + gathered) + watched + SPARE_WORKSPACE_BYTES


def watched_bytes(job: Job, tp: int) -> int:
    """What eviction by received attention takes in a layer of an exact prefill (eviction.prompt_mass): a chunk's queries and
    one head's keys in fp32, scores of some of these queries, a few times over, and what every page has received."""
    shape, split = job.shape, job.split(tp, 1)
    heads, kv_heads = len(split.heads(shape.heads, shape.kv_heads)), len(split.kv_heads(shape.kv_heads))
    row = heads // kv_heads * job.context
    scores = max(row, min(SCORES_AT_ONCE, row * (job.chunk // STRIDE)))
    keys = 0 if job.dtype == torch.float32 else job.context * shape.head_dim
    received = job.batch * kv_heads * (job.context // job.config.page_tokens) * INT64_BYTES
    return FLOAT32_BYTES * (2 * job.chunk * heads * shape.head_dim + keys + 4 * scores) + received


def packed_workspace(job: Job, tp: int, sp: int) -> int:
    """Temporaries of a chunk in a decoder layer, and of its attention: to exact tokens, then to sealed ones, where the partials
    of some of this rank's granules are joined and merged, beside those of the tree's levels (subtree.py). Plain torch also
    holds a block of scores and of what it rebuilds of their tokens, compiled kernels do not."""
    shape, split = job.shape, job.split(tp, sp)
    heads, kv_heads = len(split.heads(shape.heads, shape.kv_heads)), len(split.kv_heads(shape.kv_heads))
    granules = -(-held_end(job.config, job.context) // GRANULE_TOKENS) or 1
    queries = min(job.chunk, queries_at_once(heads * shape.head_dim))
    most, nodes = partials_at_once(queries * heads * shape.head_dim), placement.residue_count(sp)
    levels = (leaf_stride(granules, nodes, most) // nodes).bit_length()
    partials = (2 * min(-(-granules // sp), most) + levels + nodes) * queries * heads * (shape.head_dim + 2)
    if job.config.eviction == "heavy":  # what each page, and peak each granule, has of every query, until all are known
        partials += -(-granules // sp) * (GRANULE_TOKENS // job.config.page_tokens + 1) * job.chunk * heads
    scores = 5 * min(SCORES_AT_ONCE, job.chunk * heads * job.context) if job.plain else 0
    rows = exact_rows(job.config) + job.chunk
    dense = 2 * rows * kv_heads * shape.head_dim + 3 * heads * job.chunk * rows
    return job.chunk * layer_row_bytes(job, tp) + FLOAT32_BYTES * max(dense, partials + scores) + PACKED_SPARE_BYTES


def layer_row_bytes(job: Job, tp: int) -> int:
    """Bytes per token of a chunk in a decoder layer: the residual and its norm in fp32, projections, attention, the MLP."""
    shape, element, split = job.shape, job.dtype.itemsize, job.split(tp, 1)
    heads = 2 * len(split.heads(shape.heads, shape.kv_heads)) + 2 * len(split.kv_heads(shape.kv_heads))
    columns = 3 * len(split.share(shape.intermediate))
    return shape.hidden * (2 * element + 2 * FLOAT32_BYTES) + element * (heads * shape.head_dim + columns)
