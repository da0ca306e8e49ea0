"""Prometheus metrics that are counted as things happen, on SGLang's own `/metrics`
(`--enable-metrics`). docs/monitoring.md and docs/prefix-memory.md say what each is; those of a
scheduler's state are in status/figures.py.

All carry `model_name`, as SGLang's own metrics do. They live in files that processes share: where
counting fails, as on a full disk, it is off from then on, and nothing else ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

from kvtier.retention.shares import Choice, Turn

logger = logging.getLogger(__name__)

RETAINED_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Between the targets people ask for, which is where predictions are.
QUALITY_BUCKETS = (0.55, 0.65, 0.75, 0.85, 0.925, 0.97, 0.985, 0.995, 1.0)
NLL_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
FALLEN_BUCKETS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
MARGIN_BUCKETS = (-0.5, -0.2, -0.1, -0.05, 0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)

Count = TypeVar("Count", bound=Callable[..., None])
Values = Callable[..., Any]


def name_in_metrics(server_args: Any) -> str:
    """Return the `model_name` of a server's metrics."""
    return str(server_args.served_model_name or server_args.model_path)


class Metrics:
    """Some metrics of one process, which has at most one object of each kind."""

    def __init__(self, model_name: str) -> None:
        # SGLang names the directory that processes share before it starts them, and
        # prometheus_client reads that name when it is imported.
        import prometheus_client

        self._prometheus, self._model, self.works = prometheus_client, model_name, True

    def _new(self, kind: Any, name: str, about: str, *labels: str, **options: Any) -> Values:
        """Make a metric, and return the function that takes its labels but the model's to its
        value."""
        metric = kind(name, about, ["model_name", *labels], **options)
        return partial(metric.labels, self._model)

    def _counter(self, name: str, about: str, *labels: str) -> Values:
        return self._new(self._prometheus.Counter, name, about, *labels)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Values:
        return self._new(self._prometheus.Histogram, name, about, *labels, buckets=buckets)


def counts(method: Count) -> Count:
    """Have a method of Metrics that counts something never fail."""

    @wraps(method)
    def counted(self: Metrics, *told: Any) -> None:
        if not self.works:
            return
        try:
            method(self, *told)
        except Exception:
            self.works = False
            logger.warning("metrics failed and are off from now on", exc_info=True)

    return cast(Count, counted)


class RetentionMetrics(Metrics):
    """The metrics of what contexts keep. They exist where CA heads may drop something: with a
    quality target, a share or a budget."""

    def __init__(self, model_name: str, quality_target: float | None) -> None:
        super().__init__(model_name)
        self._turns = self._counter("kvtier_turns", "Turns compressed.", "reason")
        self._prompt = self._counter("kvtier_prompt_tokens", "Prompt tokens of them.")
        self._retained = self._counter("kvtier_retained_tokens", "Entries CA heads kept of them.")
        self._events = self._counter(
            "kvtier_calibration_events", "Events of the calibration store.", "event"
        )
        self._share = self._histogram(
            "kvtier_retained_share", "Share of a turn kept.", RETAINED_BUCKETS
        )
        self._quality = self._histogram(
            "kvtier_predicted_quality", "Predicted quality.", QUALITY_BUCKETS
        )
        self._nll = self._histogram(
            "kvtier_context_nll_nats", "Mean NLL of a turn's prompt.", NLL_BUCKETS
        )
        name, gauge = "kvtier_quality_target", self._prometheus.Gauge
        target = self._new(gauge, name, "Quality asked for.", multiprocess_mode="mostrecent")
        target().set(quality_target or 0.0)

    @counts
    def turn(self, turn: Turn, choice: Choice) -> None:
        """Count a turn that was decided. Scheduler thread."""
        kept = turn.protected_tokens + choice.kept_tokens
        self._turns(choice.reason).inc()
        self._prompt().inc(turn.prompt_tokens)
        self._retained().inc(kept)
        self._share().observe(kept / turn.prompt_tokens)
        if choice.quality is not None:
            self._quality().observe(choice.quality)
        if choice.nll is not None:
            self._nll().observe(choice.nll)

    @counts
    def calibration_event(self, event: str) -> None:
        """Count an event of the calibration watcher. Any thread."""
        self._events(event).inc()


class MemoryMetrics(Metrics):
    """The metrics of prefix memories, which are told apart by their digests. When margins fall over
    weeks, requests are no longer like the traces: build the memory again."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self._requests = self._counter(
            "kvtier_memory_requests", "Requests with a prefix memory.", "memory", "outcome"
        )
        self._lookups = self._counter(
            "kvtier_memory_lookups", "Lookups of their prompts.", "memory"
        )
        self._fell = self._counter("kvtier_memory_fell_back", "Lookups that fell back.", "memory")
        about = "Share of a prompt's lookups that fell back."
        self._share = self._histogram("kvtier_memory_fallen_share", about, FALLEN_BUCKETS, "memory")
        about = "Mean cosine above what is near enough."
        self._margin = self._histogram(
            "kvtier_memory_cosine_margin", about, MARGIN_BUCKETS, "memory"
        )

    @counts
    def prompt(self, memory: str, outcome: str, asked: int, fell: int, margin: float) -> None:
        """Count a request whose prompt is through. asked, fell, margin: see Lookups."""
        self._requests(memory, outcome).inc()
        self._lookups(memory).inc(asked)
        self._fell(memory).inc(fell)
        self._share(memory).observe(fell / asked)
        self._margin(memory).observe(margin / asked)


class ShadowMetrics(Metrics):
    """The metrics of turns that are computed a second time (shadow.py)."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        about = "Turns compared with exact KV, or given up."
        self._turns = self._counter("kvtier_shadow_turns", about, "outcome")
        self._tokens = self._counter("kvtier_shadow_tokens", "Tokens of answers compared.")
        about = "Those that exact KV takes for likeliest, too."
        self._same = self._counter("kvtier_shadow_agreeing_tokens", about)
        about = "Divergence from exact KV per token of a turn."
        summary = self._prometheus.Summary
        self._nats = self._new(summary, "kvtier_shadow_divergence_nats", about)

    @counts
    def turn(self, tokens: int, same: int, nats: float) -> None:
        """Count a turn, of no tokens where it was given up."""
        self._turns("compared" if tokens else "given_up").inc()
        self._tokens().inc(tokens)
        self._same().inc(same)
        if tokens:
            self._nats().observe(nats / tokens)
