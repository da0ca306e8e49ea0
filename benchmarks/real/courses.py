"""Contexts of competing heads that did not come in one turn, that a branch left, or whose text was
another when they were compressed.

    one turn     [ context              ]         what the other settings compress
    N turns      [ 1st ][ 2nd ][ 3rd ] …          each computed over what heads keep of those before
                                                  or, with a refresh, over what its own queries
                                                  choose again from their exact KV
    a branch     [ context | another's text ]     compressed, then left at the context's end:
                 [ context, less │ window ]       cut there, and the window computed again, or exact
    streaming    [ 1st ][ 2nd ][ 3rd ] …          chunks of one prompt, each computed over the whole
                                                  one before it and what heads keep of the others
    an edit      [ a │ old │ b           ]        compressed, then cut where the new text begins:
                 [ a, less │ window, new │ b ]    these computed, and what is kept of b goes on
                                                  behind them, its keys turned

`kvtier serve` does all of this. It has a tier for refreshes and where a window comes from there,
and none otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.real.keeping import ADAPTIVE_RULE, Kept
from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.held import Held, newest_queries, stacked
from kvtier.heads.reference.attention import Block, joined
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.locality import (
    CUT_WINDOW,
    MOST_AGAIN,
    SMALL_SHARE,
    WIDE_CUT_WINDOW,
    DroppedSpan,
)
from kvtier.retention.refreshing import reselect
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import PAGE, FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth
from kvtier_kernels.codes import coded_shape

# Transcripts have texts taken out at these places, each of so many tokens.
TAKEN_OUT, OUT_PLACES, OUT_TOKENS = "4 texts taken out", (0.2, 0.4, 0.6, 0.8), 150


class Case(NamedTuple):
    """A context that is to be held. others_ids: half as many tokens of another one; share: of the
    entries that are kept."""

    model: Any
    context_ids: Sequence[int]
    others_ids: Sequence[int]
    share: float
    worth: TokenWorth


@dataclass(frozen=True)
class Course:
    """The course by which a context came to be held.

    turns:     the number of turns in which it came, of equal length
    refreshes: whether every turn, and every question, has entries chosen again
    is_branch: whether a request left it at its end, behind which other text followed
    has_tier:  whether the window before that place comes from a tier
    chunks:    the number of chunks in which it was prefilled, each compressed when the next was
               computed
    """

    name: str
    turns: int = 1
    refreshes: bool = False
    is_branch: bool = False
    has_tier: bool = False
    chunks: int = 1

    def held(self, case: Case) -> Kept:
        """Return the KV that is held of the context, with a share of each turn's entries kept."""
        model, context_ids, others_ids, share, worth = case
        kind = RefreshedSession if self.refreshes else AdaptiveSession
        session = _session(model, share, worth, kind)
        if self.refreshes:
            session.chunk_tokens = len(context_ids)
        if self.chunks > 1:
            session.chunk_tokens, session.streams = -(-len(context_ids) // self.chunks), True
        if not self.is_branch:
            for ids in _parts(context_ids, self.turns):
                session.turn(ids, 0)
            again = session.held_for if isinstance(session, RefreshedSession) else None
            return Kept(_held(session), again)
        session.turn([*context_ids, *others_ids], 0)
        at = len(context_ids) - _window(share)
        branch = session.cut(at)
        if self.has_tier:
            exact = _session(model, 1.0, worth)
            exact.turn(context_ids, 0)
            return Kept(_with_window(_held(branch), _held(exact), at))
        branch.compute(context_ids[at:])
        return Kept(_held(branch))


@dataclass(frozen=True)
class Edited:
    """A context whose text was another one when it was compressed.

    places:     the places of the edits, as shares of its tokens
    new_tokens: the number of new tokens at each place, behind which as many are computed again,
                MOST_AGAIN at most; 0 where something was taken out
    old_tokens: the number of tokens that stood there instead
    bits:       the bits of the codes of kept entries; None where these stay as they are
    """

    name: str
    places: tuple[float, ...]
    new_tokens: int = 64
    old_tokens: int = 256
    bits: int | None = None

    def held(self, case: Case) -> Kept:
        """Return the KV that is held of the context, with a share of the old text's entries kept.
        The old text has equal parts of the other context at the places, each of `old_tokens` at
        most."""
        model, context_ids, others_ids, share, worth = case
        starts = [round(place * len(context_ids)) for place in self.places]
        window = _window(share)
        old_tokens = min(self.old_tokens, len(others_ids) // len(starts))
        text = list(context_ids[: starts[0]])
        runs = []
        for index, (start, stop) in enumerate(pairwise([*starts, len(context_ids)])):
            again = min(self.new_tokens, MOST_AGAIN)
            first = start + self.new_tokens + again
            is_last = stop == len(context_ids)
            text += others_ids[index * old_tokens : (index + 1) * old_tokens]
            begin = len(text) + again
            text += context_ids[start + self.new_tokens : stop]
            runs.append((first, begin, len(text) - (0 if is_last else window)))
        old = _session(model, share, worth, bits=self.bits)
        old.turn(text, 0)
        session = old.cut(max(starts[0] - window, 0))
        for first, begin, stop in runs:
            if session.num_tokens < first:
                session.compute(context_ids[session.num_tokens : first])
            session.take(old, begin, stop)
        return Kept(_held(session), used=_used(session))


@dataclass(frozen=True)
class Clock:
    """A context whose first tokens were replaced many times, in bfloat16. Everything else is turned
    each time.

    times: the number of replacements; new_tokens: the length of the front at last
    """

    name: str
    times: int
    new_tokens: int = 64

    def held(self, case: Case) -> Kept:
        """Return the KV that is held of the context, with a share of its entries kept. The earlier
        fronts are of the other context."""
        model, context_ids, others_ids, share, worth = case
        fronts = [others_ids[time : 2 * time + 16] for time in range(self.times)]
        front, *later = *fronts, context_ids[: self.new_tokens]
        session = _session(model, share, worth, dtype=torch.bfloat16)
        rest = context_ids[self.new_tokens :]
        session.turn([*front, *rest], 0)
        begin = len(front)
        for front in later:
            old, session = session, session.cut(0)
            again = min(len(front), MOST_AGAIN)
            session.compute([*front, *rest[:again]])
            session.take(old, begin + again, old.num_tokens)
            begin = len(front)
        return Kept(_held(session))


class _Past(NamedTuple):
    """A turn that has ended. kv: its exact K and V, per layer `[kv_heads, tokens, dim]`; span: the
    tokens that it could drop; worth: their scores, per layer `[kv_heads, span]`, empty where all
    stay."""

    kv: list[tuple[Tensor, Tensor]]
    span: DroppedSpan
    worth: list[Tensor]


class RefreshedSession(AdaptiveSession):
    """A session each of whose turns reads entries that its newest queries chose again, for each
    head as many as it keeps. Between turns a head holds those that it kept. A turn is one chunk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._past: list[_Past] = []
        self._worth: list[Tensor] = []

    def held_for(self, layer: int, window: QueryWindow) -> Held:
        """Return the KV of a layer that is held while the turn with these newest queries runs."""
        group = window.q.shape[2]
        heads = [joined(blocks) for blocks in self._again(layer, window)]
        return stacked([Held(k, v, k.new_zeros(group, k.shape[1])) for k, v in heads])

    def scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the base's scores, which are remembered until the turn ends."""
        self._worth.append(super().scores(*args, **kwargs))
        return self._worth[-1]

    def _again(self, layer: int, window: QueryWindow) -> list[list[Block]]:
        """Return, for each head of a layer, a block for every turn."""
        return [
            [
                self._chosen(past, layer, head, kept, window)
                for past, kept in zip(self._past, cache.settled, strict=True)
            ]
            for head, cache in enumerate(self._by_head[layer])
        ]

    def _chosen(
        self, past: _Past, layer: int, head: int, kept: Block, window: QueryWindow
    ) -> Block:
        if not past.worth:
            return kept
        k, v = (x[head : head + 1] for x in past.kv[layer])
        begin, end = past.span
        count = kept.k.shape[1] - (k.shape[1] - past.span.num_tokens)
        mine = QueryWindow(window.q[:, head : head + 1], window.scale)
        worth = past.worth[layer][head]
        middle = reselect(KeepKV(), k[:, begin:end], v[:, begin:end], worth, count, mine)
        stays = torch.ones(k.shape[1], dtype=torch.bool)
        stays[begin:end] = False
        stays[begin + middle] = True
        return Block(k[:, stays], v[:, stays])

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        window = newest_queries(q, k.shape[1], scale)
        kept = [cache.settled for cache in self._by_head[layer]]
        for cache, blocks in zip(self._by_head[layer], self._again(layer, window), strict=True):
            cache.settled = blocks
        out = super()._attend_layer(layer, q, k, v, scale)
        for cache, blocks in zip(self._by_head[layer], kept, strict=True):
            cache.settled = blocks
        return out

    def _settle_until(self, stop: int, span: DroppedSpan, prompt_tokens: int) -> None:
        fresh = [[joined(cache.fresh) for cache in layer] for layer in self._by_head]
        kv = [
            (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in fresh
        ]
        self._worth = []
        super()._settle_until(stop, span, prompt_tokens)
        self._past.append(_Past(kv, span, self._worth))


COURSES: tuple[Course | Edited | Clock, ...] = (
    *(
        Course(f"adaptive budgets, {turns} turns{suffix}", turns, bool(suffix))
        for suffix in ("", " + refresh")
        for turns in (5, 10, 20)
    ),
    Course("adaptive budgets, a branch", is_branch=True),
    Course("adaptive budgets, a branch + tier", is_branch=True, has_tier=True),
    *(Course(f"adaptive budgets, streaming, {n} chunks", chunks=n) for n in (4, 8, 16)),
    *(
        Edited(f"adaptive budgets, {name}{suffix}", places, new, old, bits=bits)
        for suffix, bits in (("", None), (", 4 bits", 4))
        for name, places, new, old in (
            ("edited front", (0.0,), 64, 256),
            ("edited middle", (0.5,), 64, 256),
            ("edited in 4 places", (0.0, 0.25, 0.5, 0.75), 64, 256),
            (TAKEN_OUT, OUT_PLACES, 0, OUT_TOKENS),
        )
    ),
    *(
        Clock(f"adaptive budgets, bfloat16, edited front {times}", number)
        for times, number in (("once", 1), ("40 times", 40))
    ),
)


def _session(
    model: Any, share: float, worth: TokenWorth, kind: type[AdaptiveSession] = AdaptiveSession,
    bits: int | None = None, dtype: torch.dtype | None = None,
) -> AdaptiveSession:  # fmt: skip
    scorer = Reconstruction.of(worth)
    session = kind(model, ADAPTIVE_RULE, scorer=scorer, kv_dtype=dtype, bits=bits)
    session.keep_count = _fixed(share)
    return session


def _fixed(share: float) -> Callable[[int, int], int]:
    rule = FixedShare(share)
    return lambda prompt, droppable: rule.choose(Turn(prompt, droppable)).kept_tokens


def _window(share: float) -> int:
    """Return the number of tokens before a cut that are computed again."""
    return WIDE_CUT_WINDOW if share < SMALL_SHARE else CUT_WINDOW


def _used(session: AdaptiveSession) -> float | None:
    if session.bits is None:
        return None
    page = coded_shape(session.bits, shape_of(session.model).head_dim).entries
    used = 0
    for cache in chain.from_iterable(session._by_head):
        for block, coded in zip(cache.settled, session.coded, strict=True):
            codes = block.between(coded.start, coded.stop).k.shape[1]
            used += block.k.shape[1] - codes + PAGE * -(-codes // page)
    return used


def _parts(ids: Sequence[int], count: int) -> list[Sequence[int]]:
    bounds = [round(len(ids) * part / count) for part in range(count + 1)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def _held(session: AdaptiveSession) -> list[Held]:
    shape = shape_of(session.model)
    return [
        stacked([
            Held(k, v, k.new_zeros(shape.group_size, k.shape[1]))
            for k, v in session.kv_of_heads(layer)
        ])
        for layer in range(shape.num_layers)
    ]  # fmt: skip


def _with_window(kept: Sequence[Held], exact: Sequence[Held], begin: int) -> list[Held]:
    """Return the kept KV, with exact KV behind it from token `begin` on, which all heads have."""
    return [
        Held(
            *(torch.cat([mine, whole[:, begin:]], dim=1) for mine, whole in zip(*both, strict=True))
        )
        for both in zip(kept, exact, strict=True)
    ]
