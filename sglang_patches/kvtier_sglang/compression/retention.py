"""The share rule in force, applied to every context and recorded."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from typing import Any

import torch

from kvtier.retention.shares import AtMost, Choice, ShareRule, Turn
from kvtier_sglang.compression.metrics import RetentionMetrics
from kvtier_sglang.ranks import Ranks

logger = logging.getLogger(__name__)

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
        self._tell_metrics(turn, choice)
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

    def _tell_metrics(self, turn: Turn, choice: Choice) -> None:
        """Metrics live in files that processes share; a full disk must not end the scheduler."""
        if self.metrics is None:
            return
        try:
            self.metrics.turn(turn, choice)
        except Exception:
            self.metrics = None
            logger.warning("metrics failed and are off from now on", exc_info=True)

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


def mean_nll(nll: torch.Tensor) -> float | None:
    """Mean of the tokens that were asked (not NaN), None where they are too few."""
    asked = nll[~torch.isnan(nll)]
    mean = float(asked.double().mean()) if asked.numel() >= MIN_ASKED else math.nan
    return mean if math.isfinite(mean) else None
