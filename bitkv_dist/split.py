"""Which part of a model's weights is a rank's, as ranges of integers.

Queries, keys and values are split by heads over the tensor-parallel (TP) ranks; more of them than KV heads keep copies of
these. With layout replicated the rest is split over the TP ranks too, and every sequence (SP) rank has the same weights. With
layout helix the output projection, the MLP and the LM head are split over all TP x SP ranks: inside a TP rank's part, over the
SP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LAYOUTS = ("replicated", "helix")


def cut(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` consecutive ranges of 0 .. total - 1; the first total % parts are one longer than the rest."""
    each, longer = divmod(total, parts)
    start = index * each + min(index, longer)
    return range(start, start + each + (index < longer))


@dataclass(frozen=True)
class Split:
    """A rank's place in the grid; of all ranks, the first has the largest part of everything."""

    tp: int = 1
    sp: int = 1
    tp_rank: int = 0
    sp_rank: int = 0
    layout: str = "replicated"

    @property
    def helix(self) -> bool:
        """Whether SP ranks have different weights."""
        return self.layout == "helix" and self.sp > 1

    @property
    def parts(self) -> int:
        """How many ranks share what `share` splits."""
        return self.tp * self.sp if self.helix else self.tp

    def kv_heads(self, total: int) -> range:
        """KV heads of this TP rank: some of them alone, or one of them together with `replicas` - 1 others."""
        return cut(total, self.tp, self.tp_rank) if total >= self.tp else cut(total, total, self.tp_rank * total // self.tp)

    def heads(self, total: int, kv_heads: int) -> range:
        """Query heads whose attention this TP rank computes: all that share its KV heads, because refinement chooses for them
        together."""
        group, own = total // kv_heads, self.kv_heads(kv_heads)
        return range(own.start * group, own.stop * group)

    def replicas(self, kv_heads: int) -> int:
        """TP ranks that keep the same KV head."""
        return max(1, self.tp // kv_heads)

    def replica(self, kv_heads: int) -> int:
        """Which of them this one is."""
        return self.tp_rank % self.replicas(kv_heads)

    def share(self, total: int) -> range:
        """This rank's outputs, or inputs, of a matrix that is split over `parts` ranks."""
        outer = cut(total, self.tp, self.tp_rank)
        inner = cut(len(outer), self.sp, self.sp_rank) if self.helix else range(len(outer))
        return range(outer.start + inner.start, outer.start + inner.stop)

    def touched_heads(self, heads: int, head_dim: int) -> range:
        """Query heads of which some dims are among this rank's inputs of the output projection."""
        own = self.share(heads * head_dim)
        return range(own.start // head_dim, -(-own.stop // head_dim)) if own else range(0)

    def embedding(self, vocabulary: int) -> range:
        """Rows of the embedding table: SP ranks may look up different tokens at a time, so over them it is not split."""
        return cut(vocabulary, self.tp, self.tp_rank)

    def sequence_ranks(self) -> list[Split]:
        """The places of this TP rank's SP ranks, in order."""
        return [replace(self, sp_rank=rank) for rank in range(self.sp)]

    def sharers(self) -> list[Split]:
        """The places of the `parts` ranks, in order of their world ranks."""
        sequence = range(self.sp) if self.helix else (self.sp_rank,)
        return [replace(self, sp_rank=sp_rank, tp_rank=tp_rank) for sp_rank in sequence for tp_rank in range(self.tp)]


def tp_choices(heads: int, kv_heads: int) -> list[int]:
    """TP that divide the KV heads, or are multiples of them that divide the query heads."""
    return [tp for tp in range(1, heads + 1) if kv_heads % tp == 0 or (tp % kv_heads == 0 and heads % tp == 0)]


def check_tp(name: str, tp: int, heads: int, kv_heads: int, ranks: int | None = None) -> None:
    """Refuse a TP that the model cannot have, and name the nearest grid (of `ranks` ranks) that it can."""
    choices = tp_choices(heads, kv_heads)
    if tp in choices:
        return
    if ranks:
        choices = [choice for choice in choices if ranks % choice == 0]
    nearest = min(choices, key=lambda choice: (abs(choice - tp), choice))
    grid = f" (--tp {nearest} --sp {ranks // nearest})" if ranks else ""
    rule = f"must divide the {kv_heads} KV heads of {name}, or be a multiple of them that divides its {heads} query heads"
    raise ValueError(f"tp {tp}: {rule}; the nearest that does is {nearest}{grid}")
