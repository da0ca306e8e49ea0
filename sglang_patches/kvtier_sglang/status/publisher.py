"""The figures on SGLang's own `/metrics` (`--enable-metrics`), brought up to date once a second.

SGLang's metrics live in files that its processes share, so a figure has to be written there to be
seen. That happens in a thread of its own: the tier's state changes while the scheduler is idle, and
a disk that is slow or full must cost no request.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from kvtier_sglang.metrics import name_in_metrics
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.status.figures import FIGURES, Figure, Kind

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class Published:
    """One figure as a metric of prometheus_client."""

    def __init__(self, figure: Figure, model_name: str, registry: Any) -> None:
        # SGLang names the directory that processes share before it starts them, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import Counter, Gauge

        self.figure, self._model = figure, model_name
        labels = ["model_name", *([figure.label] if figure.label else [])]
        self._metric: Any
        if figure.kind is Kind.COUNTER:
            self._metric = Counter(figure.name, figure.help, labels, registry=registry)
        else:
            mode: Any = figure.kind.value
            self._metric = Gauge(
                figure.name, figure.help, labels, multiprocess_mode=mode, registry=registry
            )
        self._told: dict[str, float] = {}

    def update(self, cache: KvtierRadixCache) -> None:
        """Bring the metric up to date with the figure."""
        for label, value in self.figure.read(cache).items():
            known = self._told.get(label)
            if value == known:
                continue
            values = (self._model, label) if self.figure.label else (self._model,)
            child = self._metric.labels(*values)
            if self.figure.kind is Kind.COUNTER:
                child.inc(max(0.0, value - (known or 0.0)))
            else:
                child.set(value)
            self._told[label] = value


class Publisher:
    """The publisher of a scheduler process's figures; a process has at most one. Its thread ends
    with the process.

    registry: prometheus_client's, by default its global one. stop: ends the thread; for tests.
    """

    def __init__(self, cache: KvtierRadixCache, model_name: str, registry: Any = None) -> None:
        from prometheus_client import REGISTRY

        self._cache = cache
        self._figures = [Published(one, model_name, registry or REGISTRY) for one in FIGURES]
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                self.update()
            except RuntimeError:
                # A counter got its first value of a name while it was read; it is read again in a
                # second.
                logger.debug("figures changed while they were read", exc_info=True)
            except Exception:
                logger.warning("metrics failed and are off from now on", exc_info=True)
                return
            if self.stop.wait(EVERY_S):
                return

    def update(self) -> None:
        """Bring all metrics up to date."""
        for figure in self._figures:
            figure.update(self._cache)


def publish(cache: KvtierRadixCache, server_args: Any) -> Publisher | None:
    """Publish a scheduler's figures, where metrics were asked for, on a replica's first rank."""
    if not server_args.enable_metrics or not cache.ranks.is_first:
        return None
    return Publisher(cache, name_in_metrics(server_args))
