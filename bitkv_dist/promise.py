"""What holds for the answers of a run against those of the same run elsewhere: on another grid, or from a snapshot of it."""

from __future__ import annotations

IDENTICAL = "bit-identical"
CLOSE = "identical while the logit margin exceeds 1e-3"
BYTES = "the same sealed bytes; 16-bit rounding moves logits by more than 1e-3"  # tp 1 -> 2 in bfloat16: by 0.13, float32: 3e-6
ROUNDED = "equal up to rounding; that of 16 bits moves logits by more than 1e-3"
# Sums in another order turn a few codes, INT8 queries and choices of tokens over: logits of smollm2-135m moved by up to 0.0072.
TURNED = "identical while the logit margin exceeds 0.02"


def free_of_sp(layout: str, exchange: str) -> bool:
    """Whether no number of sequence ranks changes a bit: none does where each has all weights and partials are merged in the
    order of the tree."""
    return layout == "replicated" and exchange != "allreduce"


def over_grids(dtype: str, codec: str, layout: str, exchange: str) -> dict[str, str]:
    """Of token ids and logits: on another number of sequence ranks at this tp and layout, and at another tp or layout."""
    rounded = ROUNDED if dtype != "float32" else CLOSE if codec == "exact" else TURNED
    return {"other_sp": IDENTICAL if free_of_sp(layout, exchange) else rounded, "other_tp_or_layout": rounded}
