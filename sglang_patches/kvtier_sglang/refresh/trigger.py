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

import torch

from kvtier.config.sections import RefreshSettings
from kvtier.retention.keepkv import QueryWindow
from kvtier_sglang.refresh.prefetch import RefreshPrefetch
from kvtier_sglang.refresh.refresher import Refresher
from kvtier_sglang.refresh.state import Refreshing

# The trigger looks every so many tokens whether attention has moved on: a look costs as much as a
# few decode steps over the kept entries of one context.
LOOK_EVERY_TOKENS = 8


class RefreshTrigger:
    """See the module docstring. settings: after how many tokens, or what total variation."""

    def __init__(
        self, refresher: Refresher, prefetch: RefreshPrefetch, settings: RefreshSettings
    ) -> None:
        self.refresher, self.prefetch = refresher, prefetch
        self._every, self._moved = settings.every_tokens, settings.moved
        self._rows: list[tuple[int, Refreshing]] = []

    def began(self, refreshing: Refreshing, index: int, window: QueryWindow) -> None:
        """A layer's newest queries of the prompt."""
        refreshing.scale = window.scale
        self._remember(refreshing, index, window.q)

    def begin_pass(self, rids: list[str], requests: list[int], rows: torch.Tensor) -> None:
        """A decode pass begins, one token per request; see Refresher.begin_pass."""
        self._rows = []
        states = self.refresher.contexts.requests
        for place, (rid, request) in enumerate(zip(rids, requests, strict=True)):
            state = states.get(rid)
            if state is None or state.refreshing is None or not state.refreshing.windows:
                continue
            refreshing = state.refreshing
            self._rows.append((place, refreshing))
            refreshing.since += 1
            if refreshing.ahead is not None:
                self._perhaps_write(refreshing, rows[request])
                # Its entries may be in slots of its own since now.
                self.refresher.pool.moved.add(request)
            elif self.prefetch.can_choose_ahead and self._due(refreshing):
                row = None if refreshing.slots else rows[request]
                choose = self.refresher.chooser(refreshing, row)
                self.prefetch.choose_ahead(refreshing, self._windows(refreshing), choose)

    def record(self, index: int, q: torch.Tensor) -> None:
        """The queries of a decode pass in the pool's `index`-th layer: `[tokens, KV heads, group,
        dim]`."""
        heads = self.refresher.heads[index]
        for place, refreshing in self._rows:
            if index in refreshing.windows:
                self._remember(refreshing, index, heads.select(q[place : place + 1]))

    def _remember(self, refreshing: Refreshing, index: int, q: torch.Tensor) -> None:
        newest = self.refresher.rule.keepkv.window_queries
        kept = refreshing.windows.setdefault(index, deque(maxlen=newest))
        kept.extend(torch.split(q.clone(), 1))

    def _windows(self, refreshing: Refreshing) -> dict[int, QueryWindow]:
        return {
            index: QueryWindow(torch.cat(tuple(kept)), refreshing.scale)
            for index, kept in refreshing.windows.items()
        }

    def _due(self, refreshing: Refreshing) -> bool:
        if self._every is not None and refreshing.since >= self._every:
            return True
        if self._moved is None or refreshing.since % LOOK_EVERY_TOKENS:
            return False
        if not refreshing.slots:
            # The tier had nothing in time when the turn began; it may have now.
            return True
        now = self._look(refreshing)
        if not refreshing.looked:
            # The first look: the queries since are still those the entries were chosen for.
            refreshing.looked = now
            return False
        distances = [
            (now[i] - refreshing.looked[i]).abs().sum() / (2 * len(self.refresher.heads[i].heads))
            for i in now
        ]
        return bool(torch.stack(distances).mean() > self._moved)

    def _look(self, refreshing: Refreshing) -> dict[int, torch.Tensor]:
        """Return the attention of the newest queries to a request's own entries, by layer: see
        Refresher.attention."""
        return {
            index: self.refresher.attention(index, refreshing.slots, window)
            for index, window in self._windows(refreshing).items()
        }

    def _perhaps_write(self, refreshing: Refreshing, row: torch.Tensor) -> None:
        done, choices = self.prefetch.chosen_ahead(refreshing)
        if not done:
            return
        refreshing.since = 0
        if choices is None:
            return
        if self.refresher.write_all(refreshing, row, choices.layers):
            self.refresher.counters["refreshed_again"] += 1
            self.refresher.counters["refresh_moved_bytes"] += choices.moved_bytes
            refreshing.looked = {} if self._moved is None else self._look(refreshing)
