"""KeepKV: a CA head keeps what it will look at; the rest is merged into it instead of dropped.

    predict     what the newest queries look for, averaged, newest most       ŝ per query head
    keep        the `count` entries with the largest  predicted attention · ‖v‖,  neighbours alike
    merge       every other entry into the kept one most like it, so that for the predicted query
                nothing changes (Theorem 3)
    compensate  entries that are like none of them become one entry with all their votes

       span of tokens    | a b c d e f g h |      count = 3, floor 0.9
       kept, merged      | a'    d'  f     |      a' = a+b+c   d' = d+h   (per head, by similarity)
       compensation      | (e g)           |

The tokens come exact from the tier, so their votes are 1 and nothing is merged twice. All heads
keep the same number; what they keep differs. Without queries (nothing was asked yet) scores from
elsewhere say what to keep, for instance Compactor's, and merged entries are plain means.

Two things decide most. Neighbours must share their score, because the queries that
ask look at the beginning of what they ask for. And the floor must suit how sharply a head attends:
where ‖q‖·‖k‖·scale is 30, a query tells keys of cosine 0.8 apart, and merging them costs the
answer; the paper's 0.8 is for heads that attend more evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from kvtier.errors import UsageError
from kvtier_kernels.merging import (
    Entries,
    assign,
    compensate,
    exact_entries,
    merge_bins,
)
from kvtier_kernels.prediction import predicted_logits, window_lse
from kvtier_kernels.scores import select


class QueryWindow(NamedTuple):
    """The newest queries of one layer's CA heads.

    q:     `[w, heads, group, dim]`, rotated, the newest last
    scale: multiplies q.k
    """

    q: torch.Tensor
    scale: float


class Retained(NamedTuple):
    """The remains of a span.

    kept:         int64 `[heads, count]`, indices of the span in order of position
    entries:      the kept ones, with what was merged into them; keys and values in the span's dtype
    compensation: one entry per head; log-votes -inf where nothing was folded into it
    """

    kept: torch.Tensor
    entries: Entries
    compensation: Entries


@dataclass(frozen=True)
class KeepKV:
    """The rule by which a span is ranked and merged.

    floor:          cosine similarity of keys up to which entries are not merged, in [-1, 1]
    window_queries: w, how many of the newest queries predict the next ones
    alpha:          what a query counts in comparison to the next newer one, in [0, 1)
    pool_width:     odd number of neighbouring tokens that share the best of their scores
    """

    floor: float = 0.9
    window_queries: int = 32
    alpha: float = 0.9
    pool_width: int = 15

    def __post_init__(self) -> None:
        """Raises UsageError naming a bad one."""
        if not -1 <= self.floor <= 1:
            raise UsageError("floor", "a similarity in [-1, 1]", self.floor)
        if self.window_queries < 1:
            raise UsageError("window_queries", "at least 1", self.window_queries)
        if not 0 <= self.alpha < 1:
            raise UsageError("alpha", "a number in [0, 1)", self.alpha)
        if self.pool_width < 1 or self.pool_width % 2 == 0:
            raise UsageError("pool_width", "an odd number of tokens", self.pool_width)

    def retain(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        count: int,
        *,
        window: QueryWindow | None = None,
        scores: torch.Tensor | None = None,
    ) -> Retained:
        """Keep `count` entries per head of a span, and the rest in them.

        keys, values: `[heads, tokens, dim]`, exact and rotated, any float dtype
        count:        1 … tokens
        window:       the newest queries; more than `window_queries` are not looked at
        scores:       `[heads, tokens]`, higher = keep, instead of the window's own judgement; one
                      of both is there
        Raises UsageError naming a bad argument.
        """
        check_span(keys, count, window)
        entries = exact_entries(keys, values)
        logits_of = self.prediction(entries, window)
        logits = logits_of(keys)
        if scores is None:
            scores = self.worth(entries, logits)
        kept = best(scores, count)
        assignment = assign(keys, kept, self.floor)
        merged = merge_bins(entries, logits, assignment, logits_of)
        return Retained(kept, merged, compensate(entries, assignment))

    def select(
        self, keys: torch.Tensor, values: torch.Tensor, count: int, window: QueryWindow
    ) -> torch.Tensor:
        """Return what `retain` would keep of a span, and merge nothing: int64 `[heads, count]`.

        Raises UsageError naming a bad argument.
        """
        check_span(keys, count, window)
        entries = exact_entries(keys, values)
        return best(self.worth(entries, self.prediction(entries, window)(keys)), count)

    def worth(self, entries: Entries, logits: torch.Tensor) -> torch.Tensor:
        """Float32 `[heads, tokens]`, higher = keep."""
        return best_nearby(expected_output(entries, logits), self.pool_width)

    def prediction(
        self, entries: Entries, window: QueryWindow | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The logits the next query is expected to have, of any keys `[heads, n, dim]`: float32
        `[heads, group, n]`. Without a window it has no opinion."""
        if window is None:
            return lambda keys: torch.zeros(keys.shape[0], 1, keys.shape[1], device=keys.device)
        q = window.q[-self.window_queries :]
        # Merging takes any multiple of the scores, and errs less when all queries of the window
        # count alike.
        lse = window_lse(q, entries.k, window.scale)
        return lambda keys: predicted_logits(q, keys, window.scale, self.alpha, lse)


def expected_output(entries: Entries, logits: torch.Tensor) -> torch.Tensor:
    """Return the share of each entry in the next output: predicted attention, mean over the group,
    times ‖v‖.

    logits: `[heads, group, tokens]`. Float32 `[heads, tokens]`, higher = keep.
    """
    attention = torch.softmax(logits + entries.log_votes, dim=-1).mean(1)
    length = torch.linalg.vector_norm(entries.v, dim=-1, dtype=torch.float32)
    worth: torch.Tensor = attention * length
    return worth


def best_nearby(scores: torch.Tensor, width: int) -> torch.Tensor:
    """The largest score of `width` neighbours in `[heads, tokens]`."""
    return functional.max_pool1d(scores.unsqueeze(0), width, 1, width // 2).squeeze(0)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best entries of every head in order of position: int64 `[heads, count]`.

    A score that is not a number is the worst.
    """
    scores = scores.float().nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float32).max)
    return select(scores, count)


def check_span(keys: torch.Tensor, count: int, window: QueryWindow | None) -> None:
    """Raises UsageError for a count or a window that does not fit a span's keys."""
    heads, tokens, dim = keys.shape
    if window is not None and (
        window.q.ndim != 4 or window.q.shape[1::2] != (heads, dim) or not len(window.q)
    ):
        raise UsageError("window", f"[w >= 1, {heads}, group, {dim}]", tuple(window.q.shape))
    if not 1 <= count <= tokens:
        raise UsageError("count", f"1 … {tokens}", count)
