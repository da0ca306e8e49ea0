"""Contexts of competing heads that did not come in one turn, or that a branch left.

    one turn     [ context              ]         what the other settings compress
    N turns      [ 1st ][ 2nd ][ 3rd ] …          each computed over what heads keep of those before
    a branch     [ context | another's text ]     compressed, then left at the context's end:
                 [ context, less │ window ]       cut there, and the window computed again, or exact
    streaming    [ 1st ][ 2nd ][ 3rd ] …          chunks of one prompt, each computed over the whole
                                                  one before it and what heads keep of the others

All of it is what `kvtier serve` does, without a tier but where a window comes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.real.keeping import ADAPTIVE_RECENT, ADAPTIVE_SINK
from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.held import Held, stacked
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.retention.locality import CUT_WINDOW, SMALL_SHARE, WIDE_CUT_WINDOW, LocalityRule
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth


@dataclass(frozen=True)
class Course:
    """turns: in which the context came, of equal length. is_branch: it was left at its end by a
    request, behind which other text followed. has_tier: then the window comes from there. chunks:
    as many in which it was prefilled, each compressed when the next was computed."""

    name: str
    turns: int = 1
    is_branch: bool = False
    has_tier: bool = False
    chunks: int = 1

    def held(
        self,
        model: Any,
        context_ids: Sequence[int],
        others_ids: Sequence[int],
        share: float,
        worth: TokenWorth,
    ) -> list[Held]:
        """What is held of the context per layer, of `share` of each turn's entries. others_ids:
        half as many tokens of another context."""
        session = _session(model, share, worth)
        if self.chunks > 1:
            session.chunk_tokens, session.streams = -(-len(context_ids) // self.chunks), True
        if not self.is_branch:
            for ids in _parts(context_ids, self.turns):
                session.turn(ids, 0)
            return _held(session)
        session.turn([*context_ids, *others_ids], 0)
        at = len(context_ids) - (WIDE_CUT_WINDOW if share < SMALL_SHARE else CUT_WINDOW)
        branch = session.cut(at)
        if self.has_tier:
            exact = _session(model, 1.0, worth)
            exact.turn(context_ids, 0)
            return _with_window(_held(branch), _held(exact), at)
        # A request has all of its own until its turn ends.
        branch.keep_count = lambda prompt, droppable: droppable
        branch.turn(context_ids[at:], 0)
        return _held(branch)


COURSES = (
    *(Course(f"adaptive budgets, {turns} turns", turns) for turns in (5, 10, 20)),
    Course("adaptive budgets, a branch", is_branch=True),
    Course("adaptive budgets, a branch + tier", is_branch=True, has_tier=True),
    *(Course(f"adaptive budgets, streaming, {n} chunks", chunks=n) for n in (4, 8, 16)),
)


def _session(model: Any, share: float, worth: TokenWorth) -> AdaptiveSession:
    rule = LocalityRule(ADAPTIVE_SINK, ADAPTIVE_RECENT, ADAPTIVE_RECENT)
    session = AdaptiveSession(model, rule, scorer=Reconstruction.of(worth))
    session.keep_count = _fixed(share)
    return session


def _fixed(share: float) -> Callable[[int, int], int]:
    rule = FixedShare(share)
    return lambda prompt, droppable: rule.choose(Turn(prompt, droppable)).kept_tokens


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
    """What is kept, and behind it exact KV from token `begin` on, which all heads have."""
    return [
        Held(
            *(torch.cat([mine, whole[:, begin:]], dim=1) for mine, whole in zip(*both, strict=True))
        )
        for both in zip(kept, exact, strict=True)
    ]


__all__ = ["COURSES", "Course"]
