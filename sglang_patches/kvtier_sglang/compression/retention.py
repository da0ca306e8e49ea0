"""The share rule in force, applied to every context and recorded; and the NLL of its prompt under
the model, where the rule reads it, from the prefill that is done.

SGLang computes logits for the last token of a prefill only. Here every `stride`-th token of it is
asked as well, from hidden states that are at hand: 1 / stride of the output layer's work. The
NLL is kept per slot, like the window mass, and averaged over a node when its turn ends.

A token at position p is asked for the one at p + 1, so the last token of a chunk is not asked.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from kvtier.retention.shares import AtMost, Choice, ShareRule, Turn
from kvtier_sglang.compression.selection import PrefillRows
from kvtier_sglang.metrics import RetentionMetrics
from kvtier_sglang.ranks import Ranks

RECENT_TURNS = 64
# Fewer asked tokens say little about a text.
MIN_ASKED = 16


class Retention:
    """Chooses how many CA entries a turn keeps and remembers why; the first of `ranks` chooses for
    all. Scheduler thread only."""

    def __init__(
        self,
        rule: ShareRule,
        source: Any = None,
        metrics: RetentionMetrics | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.rule = rule
        self.ranks = ranks or Ranks()
        self.source = source
        self.metrics = metrics
        self.reasons: Counter[str] = Counter()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_TURNS)
        self.prompt_tokens = 0
        self.kept_tokens = 0

    def choose(self, turn: Turn, share: float | None = None) -> Choice:
        """Choose how many entries of a turn's droppable span its CA heads keep, 1 … all of them,
        and say why. share: that its session keeps at most, where it says so."""
        rule = self.rule if share is None else AtMost(self.rule, share)
        choice = self.ranks.first(lambda: rule.choose(turn))
        self._record(turn, choice)
        return choice

    def _record(self, turn: Turn, choice: Choice) -> None:
        kept = turn.protected_tokens + choice.kept_tokens
        self.reasons[choice.reason] += 1
        if self.metrics is not None:
            self.metrics.turn(turn, choice)
        self.prompt_tokens += turn.prompt_tokens
        self.kept_tokens += kept
        self.recent.append(
            {
                "prompt_tokens": turn.prompt_tokens,
                "kept_tokens": kept,
                "retention": kept / turn.prompt_tokens,
                "reason": choice.reason,
                "nll": choice.nll,
                "quality": choice.quality,
            }
        )

    def report(self) -> dict[str, Any]:
        """Return shares, reasons and the newest turns for the server's internal state."""
        report: dict[str, Any] = {
            "retained_share": self.kept_tokens / self.prompt_tokens if self.prompt_tokens else 1.0,
            "compacted_turns": sum(self.reasons.values()),
            "reasons": dict(self.reasons),
            "recent": list(self.recent),
        }
        if self.source is not None:
            report["calibration"] = dict(self.source.counters)
        return report


def observe_nll(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    input_ids: torch.Tensor,
    rows: PrefillRows,
    stride: int,
    nll: torch.Tensor,
) -> None:
    """Write the NLL of every `stride`-th token of a prefill into `nll`, by slot: -ln p(the token
    that follows), nats. hidden: `[tokens, hidden size]` of all tokens of the prefill; of fewer
    (SGLang keeps the last ones only) nothing is measured."""
    if hidden.shape[0] != rows.indptr[-1]:
        return
    # Positions that are multiples of the stride, but for a request's last row.
    picked = [
        torch.arange(begin + -start % stride, max(begin + -start % stride, end - 1), stride)
        for begin, end, start in zip(rows.indptr, rows.indptr[1:], rows.start, strict=False)
    ]
    asked = torch.cat(picked).to(hidden.device)
    if asked.numel():
        logits = logits_of(hidden[asked]).float()
        wanted = input_ids[asked + 1].to(torch.int64)
        nll[rows.slots[asked]] = cross_entropy(logits, wanted, reduction="none")


def mean_nll(nll: torch.Tensor) -> float | None:
    """Mean of the tokens that were asked (not NaN), None where they are too few."""
    asked = nll[~torch.isnan(nll)]
    mean = float(asked.double().mean()) if asked.numel() >= MIN_ASKED else math.nan
    return mean if math.isfinite(mean) else None
