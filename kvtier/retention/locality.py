"""The locality rule: what a locality head keeps of one finished node.

A node spans positions [start, stop) of its context; the part from `prompt_stop` on was
generated. Locality heads keep three things and drop the rest:

    start                          prompt_stop - R    prompt_stop        stop
      |  sink |      dropped            |   recent         |   generated   |
      0       S                         (R = recent_tokens)

The sink is counted from the beginning of the context (position 0), so only the first node has
one. R may be less of a short prompt, of which it would else be much. Generated tokens are kept
because a later turn may ask for them (ContextKeeper's growing window). The dropped tokens become
one compensation entry with as many votes as there were tokens (RazorAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

# The number of tokens that are computed again where a request leaves a dropped span of competing
# heads, so that all the newest are there: the first number, or the second where heads keep less of
# the span than SMALL_SHARE.
CUT_WINDOW, WIDE_CUT_WINDOW, SMALL_SHARE = 64, 256, 0.2
# Fewer tokens of a dropped span are not worth a span of their own.
LEAST_CUT = 256
# Fewer tokens are not worth being compressed by themselves before a window, or copied for an edit.
LEAST_PART = 64
# The most tokens behind an edit that are computed again, as many as are new before them.
MOST_AGAIN = 64


class DroppedSpan(NamedTuple):
    """Offsets [begin, end) inside a node whose locality KV is dropped; empty when equal."""

    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class LocalityRule:
    """The rule of sink, recent and branching windows, in tokens. recent_of: a turn keeps one recent
    token for so many of its prompt, at least one and at most `recent_tokens`; with 1 it keeps
    `recent_tokens` of any. window: tokens that some layers of the model attend to, which stay exact
    before the end of the newest turn's prompt; 0 where all layers attend to everything."""

    sink_tokens: int
    recent_tokens: int
    branch_recent_tokens: int
    recent_of: int = 1
    compensation: bool = True
    window: int = 0

    def recent(self, prompt_tokens: int) -> int:
        """Return the number of recent tokens that a turn with a prompt of so many keeps."""
        return min(self.recent_tokens, max(1, prompt_tokens // self.recent_of))

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest context of which something is dropped."""
        return next(n for n in count(self.sink_tokens + 2) if self.dropped(0, n, n).num_tokens)

    def dropped(self, start: int, stop: int, prompt_stop: int) -> DroppedSpan:
        """Return the span that a node [start, stop) with prompt up to `prompt_stop` drops, as node
        offsets.

        A span of one token is kept: a compensation entry would cost as much.
        """
        prompt_stop = min(max(prompt_stop, start), stop)
        begin = max(self.sink_tokens, start) - start
        end = max(prompt_stop - self.recent(prompt_stop - start), start) - start
        if end - begin <= 1:
            return DroppedSpan(0, 0)
        return DroppedSpan(begin, end)

    def dropped_chunk(self, start: int, stop: int) -> DroppedSpan:
        """Return the span that a node [start, stop) drops that is a chunk of a prompt, the next
        chunk of which is computed: the recent tokens are that one's."""
        begin = max(self.sink_tokens, start) - start
        return DroppedSpan(begin, stop - start) if stop - start - begin > 1 else DroppedSpan(0, 0)

    def can_split(self, span: DroppedSpan, offset: int) -> bool:
        """Return whether a compressed node may be cut at `offset` without tearing its dropped span.

        Before the span everything is still exact. Behind it, enough recent tokens must remain
        in front of the branch for the locality heads of the branching request.
        """
        if span.num_tokens == 0 or offset <= span.begin:
            return True
        return offset >= span.end + self.branch_recent_tokens
