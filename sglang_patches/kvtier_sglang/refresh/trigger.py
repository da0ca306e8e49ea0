"""Refreshing again while a turn is generated: every so many tokens, or when attention has moved on.

A refresh kept what the question looked for. A long answer comes to look for other things; so the
newest queries are remembered, and now and then entries are chosen again with them, in the
background: decoding goes on, and the pass after they have come writes them.

    decode passes   . . . . . . . . . . | . . . . . . . .
                    queries remembered  ask            write
    tier, link                          [ exact KV, choosing ]

Attention has moved on when what it looks at among the kept entries is, by total variation, further
than `moved` from what it looked at when they were chosen: then what it does not find there is
likely elsewhere. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from kvtier.errors import UsageError
from kvtier.retention.keepkv import QueryWindow
from kvtier_sglang.refresh.prefetch import CompactedContext, RefreshPrefetch
from kvtier_sglang.refresh.refresher import Refresher, Refreshing

# The trigger looks every so many tokens whether attention has moved on: a look costs as much as a
# few decode steps over the kept entries of one context.
LOOK_EVERY_TOKENS = 8


@dataclass(frozen=True)
class TriggerRule:
    """The rule for choosing entries again during a turn; at least one of both is given.

    every_tokens: generated since the last time
    moved:        total variation of attention over the kept entries, in (0, 1)
    """

    every_tokens: int | None = None
    moved: float | None = None

    def __post_init__(self) -> None:
        if self.every_tokens is not None and self.every_tokens < 1:
            raise UsageError("every_tokens", "at least 1", self.every_tokens)
        if self.moved is not None and not 0 < self.moved < 1:
            raise UsageError("moved", "a number in (0, 1)", self.moved)


@dataclass
class Watched:
    """A request that generates.

    windows: newest queries by layer, `[1 or more, CA heads, group, dim]` each, newest last
    looked:  what its layers looked at when its entries were chosen, `[heads, entries]`
    since:   tokens generated since then
    """

    refreshing: Refreshing
    context: CompactedContext
    scale: float = 1.0
    windows: dict[int, deque[torch.Tensor]] = field(default_factory=dict)
    looked: dict[int, torch.Tensor] = field(default_factory=dict)
    since: int = 0
    asked: bool = False


class RefreshTrigger:
    """See the module docstring."""

    def __init__(self, refresher: Refresher, prefetch: RefreshPrefetch, rule: TriggerRule) -> None:
        self.refresher, self.prefetch, self.rule = refresher, prefetch, rule
        self._watched: dict[str, Watched] = {}
        self._rows: list[tuple[int, Watched]] = []

    def watch(self, rid: str, refreshing: Refreshing, context: CompactedContext) -> None:
        """The request's turn begins."""
        self._watched[rid] = Watched(refreshing, context)

    def forget(self, rid: str) -> None:
        self._watched.pop(rid, None)

    def began(self, rid: str, index: int, window: QueryWindow) -> None:
        """A layer's newest queries of the prompt."""
        watched = self._watched.get(rid)
        if watched is not None:
            watched.scale = window.scale
            self._remember(watched, index, window.q)

    def begin_pass(self, rids: list[str], requests: list[int], rows: torch.Tensor) -> None:
        """A decode pass begins, one token per request; see Refresher.begin_pass."""
        self._rows = []
        for place, (rid, request) in enumerate(zip(rids, requests, strict=True)):
            watched = self._watched.get(rid)
            if watched is None or not watched.windows:
                continue
            self._rows.append((place, watched))
            watched.since += 1
            if watched.asked:
                self._perhaps_write(rid, watched, rows[request])
                # Its entries may be in slots of its own since now.
                self.refresher.pool.moved.add(request)
            elif self.prefetch.can_choose_ahead and self._due(watched):
                row = None if watched.refreshing.slots else rows[request]
                choose = self.refresher.chooser(watched.refreshing, row)
                self.prefetch.choose_ahead(rid, watched.context, self._windows(watched), choose)
                watched.asked = True

    def record(self, index: int, q: torch.Tensor) -> None:
        """The queries of a decode pass in the pool's `index`-th layer: `[tokens, KV heads, group,
        dim]`."""
        heads = self.refresher.heads[index]
        for place, watched in self._rows:
            if index in watched.windows:
                self._remember(watched, index, heads.select(q[place : place + 1]))

    def _remember(self, watched: Watched, index: int, q: torch.Tensor) -> None:
        newest = self.refresher.rule.keepkv.window_queries
        kept = watched.windows.setdefault(index, deque(maxlen=newest))
        kept.extend(torch.split(q.clone(), 1))

    def _windows(self, watched: Watched) -> dict[int, QueryWindow]:
        return {
            index: QueryWindow(torch.cat(tuple(kept)), watched.scale)
            for index, kept in watched.windows.items()
        }

    def _due(self, watched: Watched) -> bool:
        every, moved = self.rule.every_tokens, self.rule.moved
        if every is not None and watched.since >= every:
            return True
        if moved is None or watched.since % LOOK_EVERY_TOKENS:
            return False
        if not watched.refreshing.slots:
            # The tier had nothing in time when the turn began; it may have now.
            return True
        now = self._look(watched)
        if not watched.looked:
            # The first look: the queries since are still those the entries were chosen for.
            watched.looked = now
            return False
        distances = [
            (now[i] - watched.looked[i]).abs().sum() / (2 * len(self.refresher.heads[i].heads))
            for i in now
        ]
        return bool(torch.stack(distances).mean() > moved)

    def _look(self, watched: Watched) -> dict[int, torch.Tensor]:
        """Return the attention of the newest queries to a request's own entries, by layer: see
        Refresher.attention."""
        return {
            index: self.refresher.attention(index, watched.refreshing.slots, window)
            for index, window in self._windows(watched).items()
        }

    def _perhaps_write(self, rid: str, watched: Watched, row: torch.Tensor) -> None:
        done, choices = self.prefetch.chosen_ahead(rid)
        if not done:
            return
        watched.asked, watched.since = False, 0
        if choices is None:
            return
        if self.refresher.write_all(watched.refreshing, row, choices.layers):
            self.refresher.counters["refreshed_again"] += 1
            self.refresher.counters["refresh_moved_bytes"] += choices.moved_bytes
            watched.looked = {} if self.rule.moved is None else self._look(watched)


__all__ = ["RefreshTrigger", "TriggerRule"]
