"""The default codec: randomised Hadamard rotation, page centroid, mid-rise codes as bit planes with the sign plane first.

Scan one bit, refine where it matters: the scanned planes of a page are interleaved for a sequential read, the remaining bits of
each code are stored token by token, because refinement picks single tokens.
"""

from __future__ import annotations

import torch

from bitkv_dist.cache_config import CacheConfig
from bitkv_dist.codec.interface import HeadShape, ReadCount
from bitkv_dist.codec.record import RecordLayout
from bitkv_dist.codec.tuning import SLOPE, Tuning
from bitkv_dist.kernels import reference
from bitkv_dist.partial import Partial
from bitkv_dist.rotation import layer_signs

# Energy that the top S planes of a B-bit code lose, r^2 / (D a_S^2), on normal data: mean of D = 64 and D = 128 as
# benchmarks/code_noise.py measures it. S = 1 is the limit pi / 2 - 1 of long vectors.
NOISE = {
    (1, 1): 0.571, (1, 2): 0.571, (1, 3): 0.571, (1, 4): 0.571, (1, 8): 0.571,
    (2, 2): 0.116, (2, 3): 0.101, (2, 4): 0.098, (2, 8): 0.098,
    (3, 3): 0.099, (3, 4): 0.089, (3, 8): 0.087,
    (4, 4): 0.087, (4, 8): 0.084,
    (5, 8): 0.083, (6, 8): 0.083, (7, 8): 0.083, (8, 8): 0.078,
}  # fmt: skip

# Share of the log-normal correction that scanned scores get where the best tokens are refined. What is left is a tail whose
# heaviest members are gone; the whole correction weighs it too much. Measured on three texts (benchmarks/NOTES.md): the share
# whose worst perplexity is best.
TAIL_CORRECTION = 0.75


class PlanesCodec:
    """Bit-plane pages of one layer and rank; see interface.Codec."""

    unserved: str | None = None  # the setting that the kernels of the device do not know, so that plain torch attends
    fused = takes_tables = positional = joined = False
    book_bytes = 0

    def __init__(self, config: CacheConfig, heads: HeadShape, layer: int) -> None:
        reference.split_dim(heads.head_dim)
        self.config, self.heads = config, heads
        self.key_low = config.key_bits - config.key_scan_bits
        self.value_low = config.value_bits - config.value_scan_bits
        self.layout = page_layout(config, heads.head_dim)
        self.record_bytes = self.layout.bytes
        scanned = (self.layout.fields[side + name].bytes for side in "KV" for name in ("planes", "scan", "centroid"))
        self.scanned_bits = 8 * sum(scanned)  # of a page of a KV head
        self.refined_bits = sum(low * heads.head_dim + 16 for low in (self.key_low, self.value_low) if low)  # of a token
        own = heads.first_kv_head, heads.kv_heads
        self.signs = {side: layer_signs(config.seed, layer, *own, side, heads.head_dim).to(heads.device) for side in "KV"}
        self.correction_share = TAIL_CORRECTION if config.key_scan_bits < config.key_bits else 1.0
        self.noise = {key: lost * self.correction_share if key[0] < key[1] else lost for key, lost in NOISE.items()}
        if config.score == "unbiased":
            # The sign plane's unbiased scale is 1 + r^2 / (D a^2) times the least-squares one that NOISE counts in.
            self.noise |= {(1, bits): self.noise[1, bits] / (1 + NOISE[1, bits]) ** 2 for bits in (1, 2, 3, 4, 8)}
        if not config.correction:
            self.noise = dict.fromkeys(NOISE, 0.0)
        self.selection = make_selection(config, heads.device)
        self.chooses_globally = config.refines and config.refine.scope == "global"

    @property
    def rebuilt(self) -> int:
        """Planes as numbers, both depths of both sides."""
        return 9 * self.heads.head_dim

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        records = torch.zeros(*k.shape[:2], self.record_bytes, dtype=torch.uint8, device=k.device)
        for side, x in (("K", k), ("V", v)):
            bits, scan_bits = self.depth(side)
            # Values always take the least-squares scale: it is their sum that counts, not their rank.
            unbiased = side == "K" and self.config.score == "unbiased"
            plane = reference.encode(x.float(), self.signs[side], bits, scan_bits, side, unbiased)
            self.store(records, side, plane)
        return records

    def depth(self, side: str) -> tuple[int, int]:
        """(stored bits, scanned bits) of keys (side K) or values (side V)."""
        if side == "K":
            return self.config.key_bits, self.config.key_scan_bits
        return self.config.value_bits, self.config.value_scan_bits

    def store(self, records: torch.Tensor, side: str, plane: reference.Plane) -> None:
        bits, scan_bits = self.depth(side)
        arrays = {"planes": plane.planes, "scan": plane.scan, "centroid": plane.centroid}
        if scan_bits < bits:
            arrays |= {"low": plane.low, "full": plane.full}
        self.layout.write(records, **{side + name: array for name, array in arrays.items()})

    def load(self, records: torch.Tensor, side: str) -> reference.Plane:
        """Views into records [..., record_bytes]."""
        bits, scan_bits = self.depth(side)
        planes, scan, centroid = (self.layout.view(records, side + name) for name in ("planes", "scan", "centroid"))
        if scan_bits == bits:
            return reference.Plane(planes, records[..., None, :0], scan, scan, centroid)
        low, full = (self.layout.view(records, side + name) for name in ("low", "full"))
        return reference.Plane(planes, low, scan, full, centroid)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (reference.decode(self.load(records, side), self.signs[side], *self.depth(side), side) for side in "KV")
        return k, v

    def prepare(self, q: torch.Tensor, tuning: Tuning | None = None) -> reference.Query:
        query = reference.quantize_query(q, self.signs["K"])
        if tuning is None:
            return query
        factor, offset = (part if part is None else part.expand_as(query.scale) for part in (tuning.factor, tuning.offset))
        return query._replace(factor=factor, offset=offset)

    def choice(self, tuning: Tuning | None, exact: Partial) -> reference.Selection | None:
        if self.selection is None:
            return None
        found = self.selection
        if tuning is not None and tuning.tail is not None:
            found = found._replace(tail=tuning.tail)
        if self.config.refine.skip_below is not None:
            found = found._replace(floor=exact.m + torch.log2(exact.l) - self.config.refine.skip_below)
        return found

    def attend(self, query: reference.Query, records: torch.Tensor, page_valid: torch.Tensor,
               choice: reference.Selection | None = None, granules: torch.Tensor | None = None,
               page_mass: torch.Tensor | None = None) -> tuple[Partial, ReadCount]:
        keys, values, choice = self.load(records, "K"), self.load(records, "V"), choice or self.selection
        found = reference.attend(query, keys, values, page_valid, self.key_low, self.value_low, self.noise, choice, granules)
        if page_mass is not None:
            page_mass.copy_(found.page_mass)
        refined = None if found.refined is None else int(found.refined.any(dim=3).sum())
        return Partial(found.m, found.l, found.o), self.count_reads(int(page_valid.sum()), query.scale.shape[1], refined)

    def finish(self, partial: Partial) -> Partial:
        return partial._replace(o=reference.rotate_back(partial.o, self.signs["V"][:, None, None, :]))

    def scan(self, query: reference.Query, records: torch.Tensor, page_valid: torch.Tensor) -> torch.Tensor:
        """Scanned scores [n, HK, Q, G, pages * P] of n granules, base 2, -inf where no page is sealed."""
        noise = self.noise[self.config.key_scan_bits, self.config.key_bits]
        return reference.key_scores(query, self.load(records, "K"), page_valid, 0, noise)

    def mass(self, query: reference.Query, records: torch.Tensor, page_valid: torch.Tensor) -> Partial:
        """The partial of scanned scores per granule, without values: m, l [n, HK, Q, G], o [n, HK, Q, G, 0]."""
        m, l = reference.peak_and_mass(self.scan(query, records, page_valid))
        return Partial(m, l, m.new_empty(*m.shape, 0))

    def scan_cost(self, page_valid: torch.Tensor, queries: int) -> int:
        """Bits that `scan` or `mass` reads of so many valid pages: key planes, scan scales and centroids."""
        fields = self.layout.fields
        key_bytes = sum(fields["K" + name].bytes for name in ("planes", "scan", "centroid"))
        return int(page_valid.sum()) * self.heads.kv_heads * queries * key_bytes * 8

    def refined_of(self, sealed_tokens: int) -> int:
        """How many tokens of so many the rule refines."""
        return int(reference.share_counts(torch.tensor(sealed_tokens), self.selection))

    def tuning(self) -> Tuning | None:
        tuning = Tuning(self.config)
        return tuning if tuning.lessons else None

    def measure(self, lesson: str, q: torch.Tensor, tuning: Tuning, records: torch.Tensor, page_valid: torch.Tensor,
                keys: torch.Tensor | None) -> Partial:
        query, plane = self.prepare(q, tuning)._replace(offset=None), self.load(records, "K")
        if keys is None:
            truth = reference.key_scores(query._replace(factor=None), plane, page_valid, self.key_low, 0.0)
        else:
            truth = reference.true_scores(q, keys, page_valid)
        if lesson == SLOPE:
            sums = reference.slope_sums(query, plane, page_valid, truth)
            return Partial(torch.zeros_like(sums[..., 0]), torch.ones_like(sums[..., 0]), sums)  # with m = 0, merging adds
        rules = [self.selection._replace(tail=torch.full((1, 1, 1), tail, device=q.device)) for tail in tuning.tails]
        rules = rules or [self.selection]
        return Partial(*reference.tail_weights(query, plane, page_valid, truth, self.key_low, self.noise, rules))

    def count_reads(self, pages: int, queries: int, refined: int | None) -> ReadCount:
        """Planes, scan scales and centroids of every token of so many sealed pages for each query; low bits and full scales of
        the `refined` tokens, which count once per KV head and query."""
        pages = pages * self.heads.kv_heads * queries
        refined = 0 if self.selection is None else refined
        bits, tokens = pages * self.scanned_bits + refined * self.refined_bits, pages * self.config.page_tokens
        return ReadCount(bits, tokens * self.heads.head_dim * 2, tokens, refined)


def make_selection(config: CacheConfig, device: torch.device) -> reference.Selection | None:
    """The refinement rule of a layer before its prompt has taught it anything; None where all planes are scanned."""
    if not config.refines:
        return None
    rule = config.refine
    tail = torch.full((1, 1, 1), 1 - rule.value, device=device) if rule.rule == "mass" else None
    return reference.Selection(rule.value, rule.min_tokens, rule.granularity == "group", tail)


def page_layout(config: CacheConfig, dim: int) -> RecordLayout:
    """The record of one page of one KV head: scanned planes, scales, low bits, centroids; keys before values."""
    tokens = config.page_tokens
    parts = {
        "K": (config.key_bits, config.key_scan_bits, (dim // 4, tokens // 8)),
        "V": (config.value_bits, config.value_scan_bits, (tokens // 4, dim // 8)),
    }
    below = {side: bits - scan for side, (bits, scan, _) in parts.items() if scan < bits}
    planes = [(side + "planes", torch.int32, (scan, *words)) for side, (_, scan, words) in parts.items()]
    scales = [(side + "scan", torch.float16, (tokens,)) for side in parts]
    fulls = [(side + "full", torch.float16, (tokens,)) for side in below]
    lows = [(side + "low", torch.uint8, (tokens, low * dim // 8)) for side, low in below.items()]
    return RecordLayout(*planes, *scales, *fulls, *lows, *((side + "centroid", torch.float16, (dim,)) for side in parts))
