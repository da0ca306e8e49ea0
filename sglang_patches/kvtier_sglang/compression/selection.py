"""Selection in a finished turn. Of a span of tokens each column (a layer's head) keeps some, which
are packed into bundles of the span's own slots; pool/packed.py says how. With pages of one entry:

    span of node   | a b c d e f g h |     head 0 keeps a b d f h, head 1 keeps c
    slots          | 4 5 6 7 . . . . |     3 slots for two heads: 6 entries
    column moved   head 0: a b d | f h     head 1: c           f and h have no place in their column
    packed         head 0: a b d           head 1: c f h       4, 5 and 6 stay, 7 … are free

How many each head keeps is chosen by kvtier.retention.head_budgets: the best entries of all heads
and layers (adaptive), or what a head profile says, in which anchored heads keep the same number and
a locality head keeps one entry, the mean of all with as many votes.

What the token scorer wants to see was noted while the turn was prefilled, by slot, so it survives
chunking, batching, sharing and splits (`HeadPagedKVPool.state`). Entries carry their rotation with
them: positions stay what they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from kvtier.heads.profile import HeadProfile
from kvtier.heads.reference.rotation import KeyRotation
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.scorers import Chunk, Span, TokenScorer, select
from kvtier.retention.shares import PAGE, profile_slots, whole_pages
from kvtier_kernels import HeadMap
from kvtier_kernels.codes import CodedShape
from kvtier_kernels.fp8 import put, restored, take
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.packed import Cells, PackedSpan, bundles_first


class PrefillRows(NamedTuple):
    """The tokens that an extend pass computes.

    indptr: row ranges of the requests; start: position of each request's first row.
    slots:  [tokens] int64, their slots.
    """

    indptr: tuple[int, ...]
    start: tuple[int, ...]
    slots: torch.Tensor


class Kept(NamedTuple):
    """The choice of a span's entries.

    entries: bool `[columns, tokens]`
    means:   columns that keep the mean of all tokens besides
    slots:   so many of the span's slots hold it, a multiple of PAGE
    """

    entries: torch.Tensor
    means: Sequence[int]
    slots: int


class PackedSelection(ABC):
    """Scores the tokens of a pool that packs and keeps the best. Owned by the scheduler thread.

    rotations: per layer, how its keys are rotated; None where they are not.
    """

    def __init__(
        self,
        pool: HeadPagedKVPool,
        scorer: TokenScorer,
        rotations: Sequence[KeyRotation | None],
    ) -> None:
        self.pool = pool
        self.scorer = scorer
        self.rotations = rotations
        if pool.packed is not None and self._coded is not None:
            feedback = scorer.feedback()
            if feedback is not None:
                pool.packed.feedback = feedback.flatten(0, 1).to(pool.device)

    def observe(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: PrefillRows,
        scale: float,
    ) -> None:
        """Remember what the scorer sees of a prefill's tokens in the pool's `index`-th layer.

        q `[tokens, KV heads, group, dim]`, k and v `[tokens, KV heads, dim]`.
        """
        state = self.pool.state
        if state is not None and self.scorer.state_width:
            chunk = Chunk(q, k, v, rows.indptr, rows.start, scale)
            state[index][:, rows.slots] = self.scorer.observe(chunk).flatten(0, 1)

    @property
    def _coded(self) -> CodedShape | None:
        """The shape of the codes of what is kept; None where it is not coded, as where entries have
        votes."""
        packed = self.pool.packed
        return packed.coded if packed is not None and self.scorer.comparable else None

    @abstractmethod
    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """Choose what is kept of a span; None where it stays as it is. The arguments are those of
        `compact`; whole: how many slots of whole bundles there are."""

    @abstractmethod
    def slots_of(self, keep: int, tokens: int) -> int:
        """Return how many slots hold a span of so many tokens of which `keep` entries are kept; see
        `compact`."""

    def compact(
        self,
        slots: torch.Tensor,
        first_position: int,
        keep: int,
        alloc_bundles: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack what is chosen of a span into whole bundles of its slots. Returns those, and the
        others, which the caller frees.

        slots: [tokens] int64 in order of position, the first at `first_position`. No request may be
        reading them. keep: entries of the span that an anchored head keeps, or a head on average.
        alloc_bundles: returns so many slots of free bundles, or None where there are not as many.
        A span whose slots lack whole bundles takes those, so what is kept does not depend on where
        its tokens were put; where there are none, less is kept, or all.
        """
        packed = self.pool.packed
        assert packed is not None, "a pool that does not pack"
        ordered, whole = bundles_first(slots)
        stay = self.slots_of(keep, slots.numel())
        if whole < stay < slots.numel() and (more := alloc_bundles(stay - whole)) is not None:
            ordered, whole = torch.cat((ordered[:whole], more, ordered[whole:])), stay
        chosen = self.choose(slots, first_position, keep, whole)
        if chosen is None:
            return slots, slots[:0]
        means = [self._mean(column, slots) for column in chosen.means]
        held: list[int] = chosen.entries.sum(-1).tolist()
        counts = list(held)
        for column in chosen.means:
            counts[column] += 1
        of_column, token = torch.nonzero_static(chosen.entries, size=sum(held)).unbind(-1)
        # Heads of a head profile keep different windows, too, and a cut would need both.
        tokens = token.int() if self.scorer.comparable else None
        span = packed.span(ordered[: chosen.slots].clone(), counts, tokens, self._coded)
        if span.coded is None:
            self._pack(packed.cells, slots[token], ordered, of_column, held, span)
        else:
            source = packed.cells.of(of_column, slots[token])
            packed.code(span, lambda numbers: packed.cells.at(source[numbers]))
        packed.add(span)
        if means:
            cells = packed.vote(span, chosen.means, math.log(slots.numel()))
            for at, side in enumerate((packed.cells.k, packed.cells.v)):
                put(side, cells, torch.stack([mean[at] for mean in means]))
        return span.slots, ordered[chosen.slots :]

    def warm_up(self) -> None:
        """End a turn before there are any, so that the first one does not wait for what that loads
        and compiles. All slots must be free."""
        assert self.pool.packed is not None, "a pool that does not pack"
        slots = torch.arange(PAGE, 5 * PAGE, device=self.pool.device)
        self.compact(slots, 0, PAGE)
        self.pool.packed.forget(slots)

    def _pack(
        self,
        cells: Cells,
        slots: torch.Tensor,
        ordered: torch.Tensor,
        column: torch.Tensor,
        held: Sequence[int],
        span: PackedSpan,
    ) -> None:
        """Move what is kept of every column to the column's first slots, and from there what has no
        place in its column. slots, column: of every entry, as it is; held: how many each column
        has."""
        bounds = [0, *accumulate(held)]
        begins, place = (
            torch.tensor(begin[:-1], device=slots.device)[column] for begin in (bounds, span.indptr)
        )
        rank = torch.arange(column.numel(), device=slots.device) - begins
        here = cells.of(column, ordered[rank])
        cells.move_within(cells.of(column, slots), here, bounds)
        keep = span.slots.numel()
        beyond = sum(max(0, count - keep) for count in held)
        if beyond:
            those = torch.nonzero_static(rank >= keep, size=beyond).squeeze(-1)
            cells.move(here[those], span.cells[(place + rank)[those]])

    def _mean(self, column: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[dim]` each: the mean key and value of a column's tokens."""
        index, head = divmod(column, self.pool.head_num)
        k, v = (take(side[:, head], 0, slots).float().mean(0) for side in self.pool.kv[index])
        return k, v

    def scores(self, index: int, slots: torch.Tensor, first: int) -> torch.Tensor:
        """Float32 `[heads, tokens]`, higher = keep, of one layer's heads; see `compact`."""
        assert self.pool.state is not None, "a selection over a pool that keeps everything"
        state = self.pool.state[index][:, slots]
        state = state.view(self.pool.head_num, self.scorer.state_width, slots.numel())
        k, v = self.pool.kv[index]
        keys = take(k.transpose(0, 1), 1, slots)
        values = take(v.transpose(0, 1), 1, slots) if self.scorer.comparable else None
        return self.score(index, keys, values, state, first)

    def score(
        self,
        index: int,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        state: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """Float32 `[heads, tokens]` of exact KV of the pool's `index`-th layer, as it is stored;
        see Span."""
        rotary, rotation = self.rotations[index], None
        if rotary is not None:
            rotation = rotary.at(torch.arange(first, first + keys.shape[1], device=keys.device))
        layer, scales = self.pool.start_layer + index, self.pool.scales.of(index)
        keys = restored(keys, scales.k)
        values = None if values is None else restored(values, scales.v)
        return self.scorer.score(Span(keys, state, first, rotation, values, layer))


class AdaptiveSelection(PackedSelection):
    """The best entries of all heads and layers stay. Its scorer is `comparable`."""

    def slots_of(self, keep: int, tokens: int) -> int:
        assert self.pool.packed is not None, "a pool that does not pack"
        page, full = self.pool.packed.page, len(self.pool.full_layers)
        pages = -(-whole_pages(keep, tokens, page) // page)
        # Those that layers with a window leave are the others'.
        return PAGE * -(-pages * full // self.pool.layer_num)

    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """Choose as many entries as come nearest to `keep` and as there are bundles for."""
        assert self.pool.packed is not None, "a pool that does not pack"
        tokens, page = slots.numel(), self.pool.packed.page
        bundles = min(self.slots_of(keep, tokens), whole) // PAGE
        if not 0 < PAGE * bundles < tokens:
            return None
        full, heads = self.pool.full_layers, self.pool.head_num
        worth = torch.cat([self.scores(index, slots, first_position) for index in full])
        kept = min(self.pool.held_entries(PAGE * bundles), tokens)
        entries = adaptive_selection(worth, kept, page)
        if len(full) < self.pool.layer_num:
            every = entries.new_zeros(self.pool.layer_num, heads, tokens)
            every[list(full)] = entries.view(len(full), heads, tokens)
            entries = every.flatten(0, 1)
        return Kept(entries, (), PAGE * bundles)


class ProfileSelection(PackedSelection):
    """A selection by a head profile: anchored heads keep their best entries, all the same number,
    and the others one for all.

    profile:       of this rank's heads
    most_anchored: how many the rank has that has most: all ranks free the same slots
    compensation:  whether the other heads keep their mean, or nothing
    spare:         entries that anchored heads may want beside those they keep
    """

    def __init__(
        self,
        pool: HeadPagedKVPool,
        scorer: TokenScorer,
        rotations: Sequence[KeyRotation | None],
        *,
        profile: HeadProfile,
        most_anchored: int,
        compensation: bool,
        spare: int = 0,
    ) -> None:
        super().__init__(pool, scorer, rotations)
        self.profile, self._most_anchored, self._spare = profile, most_anchored, spare
        self.anchored_heads = [
            HeadMap(heads, torch.tensor(heads, dtype=torch.int64, device=pool.device))
            for heads in profile.ca_heads
        ]
        self._anchored = [
            index * pool.head_num + head
            for index, heads in enumerate(profile.ca_heads)
            for head in heads
        ]
        others = set(range(pool.layer_num * pool.head_num)) - set(self._anchored)
        self._means = sorted(others) if compensation else []

    def slots_of(self, keep: int, tokens: int) -> int:
        columns = self.pool.layer_num * self.pool.head_num
        return profile_slots(whole_pages(keep, tokens) + self._spare, self._most_anchored, columns)

    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """None where that takes as many slots as there are, or more than are in whole bundles."""
        tokens, heads = slots.numel(), self.pool.head_num
        stay, keep = self.slots_of(keep, tokens), whole_pages(keep, tokens)
        columns = self.pool.layer_num * heads
        if stay >= tokens or stay > whole:
            return None
        entries = torch.zeros((columns, tokens), dtype=torch.bool, device=slots.device)
        if keep == tokens:
            entries[self._anchored] = True
            return Kept(entries, self._means, stay)
        for index, layer in enumerate(self.anchored_heads):
            if not layer.heads:
                continue
            scores = self.scores(index, slots, first_position)[layer.ids]
            mine = entries[index * heads : (index + 1) * heads]
            mine[layer.ids] = torch.zeros_like(mine[layer.ids]).scatter(
                1, select(scores, keep), value=True
            )
        return Kept(entries, self._means, stay)
