"""Prometheus metrics of what contexts keep, on SGLang's own `/metrics` (`--enable-metrics`).

    kvtier_turns_total{reason}             turns that had something to drop, by why they kept what
                                           they kept
    kvtier_prompt_tokens_total             of those turns
    kvtier_retained_tokens_total           of those, entries that CA heads kept; the quotient of the
                                           rates is the retained share
    kvtier_retained_share                  histogram over turns
    kvtier_predicted_quality               histogram: what the curve predicted for the share chosen
    kvtier_context_nll_nats                histogram
    kvtier_quality_target                  --quality, 0 without one
    kvtier_calibration_events_total{event} the watcher's: polls, changes, unavailable, refused, …

All carry `model_name`, as SGLang's own metrics do. They exist where CA heads may drop something:
with a quality target, a share or a budget.
"""

from __future__ import annotations

from kvtier.retention.shares import Choice, Turn

SHARE_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Between the targets people ask for, which is where predictions are.
QUALITY_BUCKETS = (0.55, 0.65, 0.75, 0.85, 0.925, 0.97, 0.985, 0.995, 1.0)
NLL_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


class RetentionMetrics:
    """The metrics of one scheduler process; at most one object per process."""

    def __init__(self, model_name: str, quality_target: float | None) -> None:
        # SGLang names the directory that processes share before it starts them, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        label = ("model_name",)
        self._model = model_name
        self._turns = Counter("kvtier_turns", "Turns compressed.", (*label, "reason"))
        self._prompt = Counter("kvtier_prompt_tokens", "Prompt tokens of them.", label)
        self._retained = Counter("kvtier_retained_tokens", "Entries CA heads kept of them.", label)
        self._events = Counter(
            "kvtier_calibration_events", "Events of the calibration store.", (*label, "event")
        )
        self._share = Histogram(
            "kvtier_retained_share", "Share of a turn kept.", label, buckets=SHARE_BUCKETS
        )
        self._quality = Histogram(
            "kvtier_predicted_quality", "Predicted quality.", label, buckets=QUALITY_BUCKETS
        )
        self._nll = Histogram(
            "kvtier_context_nll_nats", "Mean NLL of a turn's prompt.", label, buckets=NLL_BUCKETS
        )
        target = Gauge(
            "kvtier_quality_target", "Quality asked for.", label, multiprocess_mode="mostrecent"
        )
        target.labels(model_name).set(quality_target or 0.0)

    def turn(self, turn: Turn, choice: Choice) -> None:
        """Count a turn that was decided. Scheduler thread."""
        kept = turn.protected_tokens + choice.kept_tokens
        self._turns.labels(self._model, choice.reason).inc()
        self._prompt.labels(self._model).inc(turn.prompt_tokens)
        self._retained.labels(self._model).inc(kept)
        self._share.labels(self._model).observe(kept / turn.prompt_tokens)
        if choice.quality is not None:
            self._quality.labels(self._model).observe(choice.quality)
        if choice.nll is not None:
            self._nll.labels(self._model).observe(choice.nll)

    def calibration_event(self, event: str) -> None:
        """Count an event of the calibration watcher. Any thread."""
        self._events.labels(self._model, event).inc()
