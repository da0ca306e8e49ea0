"""Prometheus metrics of the service, on `--metrics-port` (web.py).

kvtier_tier_bytes_total{direction, namespace, path}    moved; path: stream or shared
kvtier_tier_blobs_moved_total{direction, namespace, path}  likewise
kvtier_tier_misses_total{namespace}                    blobs asked for and not held
kvtier_tier_lookups_total{namespace, held}             keys asked for with Exists
kvtier_tier_quarantined_total{namespace}               blobs whose stored copy did not verify
kvtier_tier_errors_total{method, code}                 calls that failed, by gRPC status
kvtier_tier_call_seconds{method}                       histogram of calls, however they ended
kvtier_tier_used_bytes, _capacity_bytes, _blobs        of the store
kvtier_tier_evictions_total                            of the store
kvtier_tier_shed_total                                 blobs that a restart loses: the disk was late
kvtier_tier_leases, kvtier_tier_leases_expired_total   of the shared memory

Without --namespace a client may call itself whatever it likes, and every label is a series that
stays. So only those of --namespace, and the first MAX_NAMESPACES others, have series of their own;
the rest share the label "other", and so does a namespace of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvtier_tierd.stores.base import StoreStats

MAX_NAMESPACES = 64
# A lookup takes a fraction of a millisecond; a stream may take as long as its client's deadline.
CALL_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30),
)
OTHER = "other"
_SEE = "See kvtier_tierd.monitoring.metrics"


class TierMetrics:
    """Counters of one service, in a registry of their own. known: namespaces of --namespace, which
    have labels of their own, however many others came before them."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._named = set(known)
        self._most_named = len(self._named) + MAX_NAMESPACES
        self._bytes = self._counter("bytes", "direction", "namespace", "path")
        self._blobs = self._counter("blobs_moved", "direction", "namespace", "path")
        self._misses = self._counter("misses", "namespace")
        self._lookups = self._counter("lookups", "namespace", "held")
        self._quarantined = self._counter("quarantined", "namespace")
        self._errors = self._counter("errors", "method", "code")
        self._calls = Histogram(
            "kvtier_tier_call_seconds",
            f"{_SEE}: call_seconds.",
            ("method",),
            buckets=CALL_BUCKETS_S,
            registry=self.registry,
        )
        for namespace in self._named:
            self._begin(namespace)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"kvtier_tier_{name}", f"{_SEE}: {name}.", labels, registry=self.registry)

    def _begin(self, namespace: str) -> None:
        """Tell a namespace's rare events from the start: a counter that begins at 1 has not grown
        for Prometheus."""
        for counter in (self._misses, self._quarantined):
            counter.labels(namespace)

    def _label(self, namespace: str) -> str:
        """The label of a namespace: its own name, while there are not too many."""
        if namespace not in self._named:
            if len(self._named) >= self._most_named:
                self._begin(OTHER)
                return OTHER
            self._named.add(namespace)
            self._begin(namespace)
        return namespace

    def moved(
        self, direction: str, namespace: str, num_bytes: int, *, shared: bool, blobs: int = 1
    ) -> None:
        """Blobs were put or got, of so many bytes together."""
        labels = (direction, self._label(namespace), "shared" if shared else "stream")
        self._bytes.labels(*labels).inc(num_bytes)
        self._blobs.labels(*labels).inc(blobs)

    def missed(self, namespace: str) -> None:
        self._misses.labels(self._label(namespace)).inc()

    def looked_up(self, namespace: str, held: int, asked: int) -> None:
        label = self._label(namespace)
        self._lookups.labels(label, "yes").inc(held)
        self._lookups.labels(label, "no").inc(asked - held)

    def quarantined(self, namespace: str) -> None:
        self._quarantined.labels(self._label(namespace)).inc()

    def failed(self, method: str, code: str) -> None:
        self._errors.labels(method, code).inc()

    def called(self, method: str, seconds: float) -> None:
        """A call is over, however it ended."""
        self._calls.labels(method).observe(seconds)

    def watch(self, state: Callable[[], tuple[StoreStats, int, int]]) -> None:
        """Read what is held at every request for metrics, in the thread of that request.

        state: of the store; the leases held now, and how many have expired since the start.
        """
        self.registry.register(_Collector(state))


class _Collector:
    def __init__(self, state: Callable[[], tuple[StoreStats, int, int]]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        store, leases, expired = self._state()
        gauges = {"used_bytes": store.used_bytes, "capacity_bytes": store.capacity_bytes}
        for name, value in (gauges | {"blobs": store.blobs, "leases": leases}).items():
            yield GaugeMetricFamily(f"kvtier_tier_{name}", f"{_SEE}: {name}.", value)
        counters = {"evictions": store.evictions, "shed": store.shed, "leases_expired": expired}
        for name, value in counters.items():
            yield CounterMetricFamily(f"kvtier_tier_{name}", f"{_SEE}: {name}.", value)
