"""Which step of reading a layer is wrong, if one is: each is compared with what the true keys and values make of it.

The steps are followed in order (record, query, correction, attention), and a head is blamed for the first that fails: what
comes after it cannot be right. Noise is not what is measured, so a sound codec passes all with a wide margin at any depth.
"""

from __future__ import annotations

import math

import torch

from bitkv_dist.evaluate.reading import Reading
from bitkv_dist.kernels import reference

# The limits, and the largest value of a sound codec (smollm2-135m, 1 to 4 bits, all layers and heads).
COSINE_LOSS = 0.02  # cosine of codes and vectors below that of fresh codes: 0.0000
SCALE_ERROR = 0.05  # root mean square of stored / least-squares scale - 1: 0.011
CENTROID_ERROR = 0.05  # relative distance of the stored centroid to the page's mean: 0.0002
QUERY_ERROR = 0.1  # relative error of scores to the dot products of the query with the records: 0.009
CORRECTION_ERROR = 0.5  # relative error of the correction to the energy that the scan lost: 0.10
MASS_ERROR_NATS = 0.02  # log of the sum of weights, of attention to that of its scores: 0.0000
EXPLAINED = 0.25  # of an error that a fault may leave when it is the cause: it also changes which tokens are refined
OUTPUT_ERROR = 0.1  # relative error of attention's output to the weighted sum of the records' values: 0.03

NAMES = {"K": "keys", "V": "values"}


class Faults:
    """The causes found in one layer, by (KV head, query head of its group), and the scales of its scanned planes.

    scales: side -> (stored, least-squares), fp16 [pages, HK, P] each.
    """

    def __init__(self, kv_heads: int, group: int) -> None:
        self.causes: dict[tuple[int, int], list[str]] = {(kv, head): [] for kv in range(kv_heads) for head in range(group)}
        self.scales: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def blame(self, wrong: torch.Tensor, cause: str) -> None:
        """wrong: bool [HK] or [HK, G]."""
        for (kv_head, head), causes in self.causes.items():
            if wrong[kv_head] if wrong.dim() == 1 else wrong[kv_head, head]:
                causes.append(cause)

    def blame_first(self, wrong: torch.Tensor, cause: str) -> None:
        """Blame only heads that an earlier step was not blamed for; wrong: bool [HK, G]."""
        sound = torch.zeros_like(wrong)
        for place, causes in self.causes.items():
            sound[place] = not causes
        self.blame(wrong & sound, cause)


def find_faults(reading: Reading) -> Faults:
    """Codecs other than planes have no steps to follow, and so no causes."""
    found = Faults(reading.query.shape[0], reading.query.shape[2])
    if reading.scannable:
        for side in "KV":
            check_record(reading, side, found)
        check_query(reading, found)
        check_correction(reading, found)
        check_attention(reading, found)
    return found


def check_record(reading: Reading, side: str, found: Faults) -> None:
    """Rotation, scales and centroid of the stored pages, by the signs that read them."""
    bits, scan_bits = reading.codec.depth(side)
    plane, fresh = reading.codec.load(reading.page_records, side), reading.fresh[side]

    fresh_levels = fresh.codes.code.float() * 2 - ((1 << bits) - 1)
    stored_levels = reference.levels(plane, side, bits - scan_bits)
    rotated = (cosine(fresh.z, fresh_levels) - cosine(fresh.z, stored_levels)).mean((0, 2)) > COSINE_LOSS
    found.blame(rotated, f"rotation ({NAMES[side]})")

    pairs = ((plane.scan, fresh.codes.scan), (plane.full, fresh.codes.full))
    error = torch.stack([deviation(stored, right).square().mean((0, 2)).sqrt() for stored, right in pairs]).amax(0)
    found.blame((error > SCALE_ERROR) & ~rotated, scale_cause(side))
    found.scales[side] = (plane.scan.clone(), fresh.codes.scan)

    missed = (plane.centroid.float() - fresh.centroid).norm(dim=(0, 2))
    found.blame((missed > CENTROID_ERROR * fresh.centroid.norm(dim=(0, 2))) & ~rotated, f"centroid ({NAMES[side]})")


def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of vectors [.., D]."""
    return torch.nn.functional.cosine_similarity(x, y, dim=-1)


def deviation(stored: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """stored / right - 1, at most 1."""
    return ((stored.float() - right.float()) / right.float().clamp(min=1e-6)).clamp(-1, 1)


def scale_cause(side: str) -> str:
    return f"scale ({NAMES[side]})"


def name_foreign_scales(layers: list[Faults]) -> None:
    """Where a head holds the scales of the same head in another layer, say of which."""
    for index, layer in enumerate(layers):
        for (kv_head, _), causes in layer.causes.items():
            for side in layer.scales:
                if scale_cause(side) in causes and (owner := owner_of_scales(layers, index, kv_head, side)) is not None:
                    causes[causes.index(scale_cause(side))] = f"scale ({NAMES[side]}, that of layer {owner})"


def owner_of_scales(layers: list[Faults], index: int, kv_head: int, side: str) -> int | None:
    stored = layers[index].scales[side][0][:, kv_head]
    for other, layer in enumerate(layers):
        if other != index and deviation(stored, layer.scales[side][1][:, kv_head]).square().mean().sqrt() < SCALE_ERROR:
            return other
    return None


def check_query(reading: Reading, found: Faults) -> None:
    """Scores without correction against dot products of the query with what the records stand for."""
    expected = reading.dots(reading.scanned_vectors("K"))
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean((1, 3))
    error = ((reading.bare - expected).square().mean((1, 3)) / spread.clamp(min=1e-30)).sqrt()
    found.blame_first(error > QUERY_ERROR, "query (not rotated or scaled as its keys)")


def check_correction(reading: Reading, found: Faults) -> None:
    """The correction that scores got against the one that is due."""
    if not reading.codec.config.correction:
        return
    due = reading.due_correction.mean((1, 3)) * reading.codec.correction_share
    applied = (reading.scanned - reading.bare).mean((1, 3))
    found.blame_first(applied < (1 - CORRECTION_ERROR) * due, "correction (missing or too small)")
    found.blame_first(applied > (1 + CORRECTION_ERROR) * due, "correction (too large)")


def check_attention(reading: Reading, found: Faults) -> None:
    """The attention that decode computed against one made of the same scores and values in plain floating point."""
    mass = reading.sealed_partial.log_sum_exp()

    def distance(scores: torch.Tensor) -> torch.Tensor:
        return (mass - torch.logsumexp(scores * math.log(2), dim=-1)).abs().amax(1)

    error = distance(reading.final)
    wrong = error > MASS_ERROR_NATS
    without_correction, without_centroid = reading.entering(correct=False), reading.final - reading.dots(reading.centroids("K"))
    found.blame_first(wrong & (distance(without_correction) < EXPLAINED * error), "correction (missing in attention)")
    found.blame_first(wrong & (distance(without_centroid) < EXPLAINED * error), "centroid (keys, missing in attention)")

    weights = torch.softmax(reading.final * math.log(2), dim=-1)
    refined = torch.zeros_like(weights, dtype=torch.bool) if reading.refined is None else reading.refined
    scan, full = (v[:, None] for v in (reading.scanned_vectors("V"), reading.vectors("V")))
    expected = weights.masked_fill(refined, 0.0) @ scan + weights.masked_fill(~refined, 0.0) @ full
    output = reading.sealed_partial.normalised()
    wrong |= too_far(output, expected)
    without_centroid = expected - weights @ reading.centroids("V")[:, None]
    found.blame_first(wrong & ~too_far(output, without_centroid), "centroid (values, missing in attention)")
    found.blame_first(wrong, "kernel (attention is not that of its own scores and values)")


def too_far(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[HK, n, G, D] -> bool [HK, G]."""
    return (output - expected).norm(dim=(1, 3)) > OUTPUT_ERROR * expected.norm(dim=(1, 3))
