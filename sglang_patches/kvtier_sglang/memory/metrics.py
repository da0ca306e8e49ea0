"""Prometheus metrics of prefix memories, on SGLang's own `/metrics` (`--enable-metrics`).

    kvtier_memory_requests_total{memory, outcome}  requests with that memory: `answered` from it, or
                                                   `exact`, as too many lookups fell back
    kvtier_memory_lookups_total{memory}            of the tokens of their prompts, in all layers
    kvtier_memory_fell_back_total{memory}          of those, that no entry was near enough to
    kvtier_memory_fallen_share{memory}             histogram over requests: the quotient of both
    kvtier_memory_cosine_margin{memory}            histogram over requests: by how much the nearest
                                                   entries' cosines are above what is near enough,
                                                   the mean of a prompt's lookups

All carry `model_name`, as SGLang's own metrics do; `memory` is a digest. When margins fall over
weeks, requests are no longer like the traces: build the memory again.
"""

from __future__ import annotations

import logging

from kvtier_sglang.memory.lookups import Lookups

logger = logging.getLogger(__name__)

SHARE_BUCKETS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
MARGIN_BUCKETS = (-0.5, -0.2, -0.1, -0.05, 0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)


class MemoryMetrics:
    """The metrics of one scheduler process; at most one object per process."""

    def __init__(self, model_name: str) -> None:
        # SGLang names the directory that processes share before it starts them, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import Counter, Histogram

        label = ("model_name", "memory")
        self._model, self._works = model_name, True
        self._requests = Counter(
            "kvtier_memory_requests", "Requests with a prefix memory.", (*label, "outcome")
        )
        self._lookups = Counter("kvtier_memory_lookups", "Lookups of their prompts.", label)
        self._fell = Counter("kvtier_memory_fell_back", "Lookups that fell back.", label)
        self._share = Histogram(
            "kvtier_memory_fallen_share", "Share of a prompt's lookups that fell back.", label,
            buckets=SHARE_BUCKETS,
        )  # fmt: skip
        self._margin = Histogram(
            "kvtier_memory_cosine_margin", "Mean cosine above what is near enough.", label,
            buckets=MARGIN_BUCKETS,
        )  # fmt: skip

    def prompt(self, memory: str, lookups: Lookups, outcome: str) -> None:
        """Count a request whose prompt is through. Metrics live in files that processes share; a
        full disk must not end the scheduler."""
        if not self._works:
            return
        try:
            self._count(memory, lookups, outcome)
        except Exception:
            self._works = False
            logger.warning("metrics of memories failed and are off from now on", exc_info=True)

    def _count(self, memory: str, lookups: Lookups, outcome: str) -> None:
        labels = (self._model, memory)
        self._requests.labels(*labels, outcome).inc()
        self._lookups.labels(*labels).inc(lookups.asked)
        self._fell.labels(*labels).inc(lookups.fell)
        self._share.labels(*labels).observe(lookups.fell / lookups.asked)
        self._margin.labels(*labels).observe(lookups.margin / lookups.asked)


__all__ = ["MemoryMetrics"]
