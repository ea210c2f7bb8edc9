"""Which sealed pages of a sequence a layer keeps, where the cache is bounded.

Rule `window` keeps the newest pages (StreamingLLM, Xiao et al., arXiv 2309.17453), rule `heavy` those that receive most of the
attention (H2O, Zhang et al., arXiv 2306.14048), a whole page at a time: a kept page's bytes never change, and a new page takes
the slot of the one that goes, so that memory does not grow. Positions stay those of the text: keys are cached after RoPE, so
distances are the true ones (StreamingLLM counts them inside the cache instead).

Each KV head chooses for itself. Attention mass is counted in whole units of 2^-32 of a query's weight: sums of integers have no
order, so the choice is the same for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bitkv_dist.cache_config import GRANULE_TOKENS, CacheConfig
from bitkv_dist.kernels.reference import exp2, fold_sum
from bitkv_dist.partial import Partial, merge
from bitkv_dist.subtree import SCORES_AT_ONCE

if TYPE_CHECKING:
    from bitkv_dist.cache import Shard
    from bitkv_dist.sequence import SequenceState

UNIT = float(1 << 32)
STRIDE = 8  # of an exact prefill every so many-th query speaks for all: it costs an eighth of the prompt's products of q and k


class PageTable:
    """The pages in the slots of one sequence and layer, for each KV head.

    pages, mass, seen int64 [slots, HK], on the CPU: the page's global index; the attention that it has received while it was
    sealed, in units, from all query heads of the group; how many queries have seen it. `mass` is whole on every rank after
    `settle`, between two of them a rank counts for the slots that it owns.
    together: the heads of a layer share what a page's records hold, so they keep the same pages.
    """

    def __init__(self, config: CacheConfig, kv_heads: int, together: bool) -> None:
        self.heavy, self.together, self.config = config.eviction == "heavy", together, config
        self.pages, self.mass, self.seen = (torch.zeros(0, kv_heads, dtype=torch.int64) for _ in range(3))

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def bytes(self) -> int:
        return self.pages.nbytes + self.mass.nbytes + self.seen.nbytes

    def place(self, page: int, room: int) -> None:
        """Take in a page that was just sealed, in a slot of its own or in that of the page that each head gives up."""
        if len(self) < room:
            blank = torch.zeros(1, self.pages.shape[1], dtype=torch.int64)
            self.pages, self.mass, self.seen = (torch.cat((old, blank)) for old in (self.pages, self.mass, self.seen))
            slots = torch.full((self.pages.shape[1],), len(self) - 1)
        elif room == 0:
            return
        else:
            slots = self.least()
        heads = torch.arange(self.pages.shape[1])
        self.pages[slots, heads] = page
        self.mass[slots, heads] = self.seen[slots, heads] = 0

    def least(self) -> torch.Tensor:
        """The slot that each head gives up, int64 [HK]: the oldest page, or with rule heavy that of the least mass per query;
        a page that no query has seen yet only where there is no other."""
        value = self.value(self.mass, self.seen) if self.heavy else torch.zeros(self.pages.shape)
        least = value == value.amin(0)
        return torch.where(least, self.pages, torch.iinfo(torch.int64).max).argmin(0)

    def value(self, mass: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """What pages are worth, fp64: mass per query that saw them. mass, seen int64 [n, HK]."""
        if self.together:
            mass = mass.sum(1, keepdim=True).expand_as(mass)
        return torch.where(seen == 0, math.inf, mass.double() / seen.clamp(min=1))

    def choose(self, first: int, count: int, room: int, mass: torch.Tensor | None, seen: torch.Tensor | None) -> None:
        """Fill the slots out of the pages first .. first + count - 1 of a prompt; mass, seen int64 [count, HK], rule heavy."""
        heads = self.pages.shape[1]
        mass, seen = (torch.zeros(count, heads, dtype=torch.int64) if t is None else t for t in (mass, seen))
        value = self.value(mass, seen) if self.heavy else torch.zeros(count, heads)
        best = count - 1 - torch.argsort(value.flip(0), dim=0, descending=True, stable=True)[:room]  # of equal ones the newer
        best = best.sort(0).values
        self.pages, self.mass, self.seen = best + first, mass.gather(0, best), seen.gather(0, best)

    def slots(self, page: int) -> dict[int, list[int]]:
        """Where a page is kept: slot -> heads."""
        found: dict[int, list[int]] = {}
        for slot, head in (self.pages == page).nonzero().tolist():
            found.setdefault(slot, []).append(head)
        return found

    def receive(self, slots: torch.Tensor, mass: torch.Tensor, queries: int) -> None:
        """Count the queries of a step: mass int64 [n, HK] that the pages in `slots`, int64 [n], received from them."""
        self.mass.index_add_(0, slots, mass.cpu())
        if queries:
            self.seen += queries

    def settle(self, owned: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Bring the masses of all ranks together; owned bool [slots]; gather: [*s] -> [ranks, *s], of this device."""
        self.mass = gather(self.mass * owned[:, None]).sum(0)

    def state(self) -> dict[str, torch.Tensor]:
        """All of it, as tensors [slots, HK, 1]."""
        return {f"kept.{name}": getattr(self, name).unsqueeze(-1) for name in ("pages", "mass", "seen")}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        for name in ("pages", "mass", "seen"):
            setattr(self, name, state[f"kept.{name}"].squeeze(-1).clone())


class Watched:
    """Masses of pages in some granules, relative to each granule's own peak, until the attention to all tokens is known.

    first: which of the queries is the first; m fp32 [n, HK, Q, G]; page_mass fp32 [n, HK, Q, G, pages].
    """

    def __init__(self, first: int, granules: list[int], m: torch.Tensor, page_mass: torch.Tensor) -> None:
        self.first, self.granules, self.m, self.page_mass = first, granules, m, page_mass

    def units(self, m: torch.Tensor, l: torch.Tensor) -> torch.Tensor:
        """What the pages received, int64 [n, pages, HK]; m, l fp32 [HK, Q, G] of all tokens that the queries see."""
        rows = slice(self.first, self.first + self.m.shape[2])
        share = exp2(self.m - m[:, rows]) / l[:, rows]
        return units(self.page_mass * share.unsqueeze(-1)).sum((2, 3)).transpose(1, 2)


def units(mass: torch.Tensor) -> torch.Tensor:
    return torch.round(mass.double() * UNIT).long()


def prompt_mass(q: torch.Tensor, k: torch.Tensor, start: int, ends: torch.Tensor, config: CacheConfig) -> torch.Tensor:
    """What the sealed pages receive from some queries of an exact prefill, int64 [pages, HK], times STRIDE.

    q fp32 [HK, G, n, D] in base 2, of tokens start .. start + n - 1; k [HK, start + n, D]. A page counts for a query as it
    would in decoding: once it is sealed, that is before `ends` int64 [n].
    """
    heads, group, n, _ = q.shape
    position = torch.arange(start, start + n, device=q.device)
    chosen = ((position + 1) % STRIDE == 0).nonzero().flatten()
    page, pages = config.page_tokens, min(int(ends.max()), k.shape[1]) // config.page_tokens  # less than a sink may be there
    found = torch.zeros(pages, heads, dtype=torch.int64)
    first = torch.arange(pages, device=q.device) * page
    at_once = max(1, SCORES_AT_ONCE // (group * k.shape[1]))
    for head in range(heads):
        keys = k[head].float().T
        for some in chosen.split(at_once):
            scores = q[head][:, some] @ keys  # [G, s, T]
            seen = torch.arange(k.shape[1], device=q.device) <= position[some, None]
            scores = torch.where(seen, scores, -math.inf)
            p = exp2(scores - scores.amax(-1, keepdim=True))
            share = fold_sum(p[..., : pages * page].unflatten(-1, (pages, page))) / fold_sum(p).unsqueeze(-1)
            sealed = (first >= config.sink_rounded) & (first < ends[some, None])
            found[:, head] += (units(share) * sealed).sum((0, 1)).cpu() * STRIDE
    return found


def prompt_seen(ends: torch.Tensor, config: CacheConfig, pages: int) -> torch.Tensor:
    """How many queries each of a prompt's pages counts in `prompt_mass`, int64 [pages]; ends int64 [tokens]: see there."""
    sealed = ends[STRIDE - 1 :: STRIDE] // config.page_tokens
    later = torch.bincount(sealed, minlength=pages + 1).flip(0).cumsum(0).flip(0)  # queries with at least so many pages
    return later[1 : pages + 1] * STRIDE


class Evictor:
    """How one layer of a bounded cache comes to its page tables, which are in its sequences' states, on this rank."""

    def __init__(self, config: CacheConfig, shard: Shard, device: torch.device) -> None:
        self.config, self.shard, self.device = config, shard, device
        self.watched: list[Watched] = []  # what the pages of the sequence at hand have received

    def choose(self, state: SequenceState, end: int, received: torch.Tensor | None) -> None:
        """Which of a prompt's pages before `end` stay; received int64 [pages, HK]."""
        first = state.sink // state.page_tokens
        count, seen = end // state.page_tokens - first, None
        if state.table.heavy:
            seen = prompt_seen(self.sealed_ends(0, state.length), self.config, first + count)[first:, None]
            seen = seen.expand(-1, received.shape[1])
            received = received[first : first + count]
        state.table.choose(first, count, self.config.kept_pages(count), received, seen)

    def place(self, state: SequenceState, sequence: int, pages: range) -> None:
        """Slots for pages that are due, in the place of others where there is no more room."""
        first = state.sink // state.page_tokens
        if self.config.kept_pages(pages.stop - first) < len(state.table) + len(pages):
            self.settle(state, sequence)
        for page in pages:
            state.table.place(page, self.config.kept_pages(page + 1 - first))

    def settle(self, state: SequenceState, sequence: int) -> None:
        """The same masses on every rank; collective."""
        if state.table is None or not state.table.heavy:
            return
        per_granule, first = GRANULE_TOKENS // state.page_tokens, state.sink // state.page_tokens
        owned = [self.shard.owns((first + slot) // per_granule, sequence) for slot in range(len(state.table))]
        state.table.settle(torch.tensor(owned, dtype=torch.bool), self.gathered)

    def gathered(self, t: torch.Tensor) -> torch.Tensor:
        """`Shard.gather` of a tensor on the CPU."""
        return self.shard.gather(t.to(self.device)).cpu()

    def sealed_ends(self, start: int, stop: int) -> torch.Tensor:
        """Before which token pages are sealed when each of the tokens start .. stop - 1 is fed, int64."""
        page, recent = self.config.page_tokens, max(1, self.config.recent_tokens)
        ends = (torch.arange(start + 1, stop + 1) - recent).div(page, rounding_mode="floor")
        return (ends * page).clamp(min=self.config.sink_rounded)

    def watch_prompt(self, state: SequenceState, q: torch.Tensor, k: torch.Tensor, heads: slice, start: int,
                     scaling: float) -> None:
        """Count what pages receive from a chunk's queries q [heads, G, n, D]; k [heads, start + n, D]."""
        ends = self.sealed_ends(start, start + q.shape[2]).to(q.device)
        mass = prompt_mass(q.float() * (scaling * math.log2(math.e)), k, start, ends, self.config)
        state.received[: len(mass), heads] += mass

    def count(self, state: SequenceState, watched: list[Watched], total: Partial, exact: Partial, queries: int) -> None:
        """Note what the sealed pages received from a step's queries; total: the partial of all sealed tokens."""
        places, first = GRANULE_TOKENS // state.page_tokens, state.sink // state.page_tokens
        whole = merge(*(part._replace(o=part.o[..., :0]) for part in (total, exact)))
        for part in watched:
            mass = part.units(whole.m, whole.l).flatten(0, 1)
            slots = (torch.tensor(part.granules)[:, None] * places + torch.arange(places)).flatten() - first
            used = (slots >= 0) & (slots < len(state.table))
            state.table.receive(slots[used], mass[used.to(mass.device)], 0)
        state.table.seen += queries
