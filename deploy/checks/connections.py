"""The connections between workloads: read from flags, settings, monitors and accounts, not from
policies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploy.checks.manifests import Container, Document, Manifests, Workload

API_PORTS, HTTPS, DNS = (443, 6443), 443, 53
# The label that names a namespace that has no labels of its own.
NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Peer:
    """An end of a connection. workload: one of the manifests; else namespace and labels of a Pod
    elsewhere in the cluster, or neither: somewhere outside."""

    title: str
    workload: Workload | None = None
    namespace: str | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> Peer:
        return cls(workload.title, workload, None, workload.labels)


OUTSIDE = Peer("an address outside")
DNS_SERVER = Peer("the cluster's DNS", None, "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Peer("Prometheus", None, "monitoring", {"app.kubernetes.io/name": "prometheus"})
STRANGER = Peer("a Pod of another namespace", None, "elsewhere", {"app": "stranger"})


@dataclass(frozen=True)
class Connection:
    """port: a number; None: whichever the other side chose."""

    source: Peer
    target: Peer
    port: int | None
    protocol: str = "TCP"

    def __str__(self) -> str:
        port = "any port" if self.port is None else f"{self.protocol} {self.port}"
        return f"{self.source.title} -> {self.target.title}, {port}"


def declared(manifests: Manifests) -> Iterator[Connection]:
    """Every connection that something in the manifests says it makes."""
    for workload, container in manifests.containers():
        called = [
            *_addresses(manifests, workload, container),
            *_discovery(manifests, workload, container),
            *_segments(manifests, workload, container),
            *_outside(workload, container),
        ]
        yield from called
        if any(one.source.workload is workload for one in called):
            for protocol in ("UDP", "TCP"):
                yield Connection(Peer.of(workload), DNS_SERVER, DNS, protocol)
    for monitor in manifests.of_kind("PodMonitor"):
        yield from _scraping(manifests, monitor)


def _addresses(
    manifests: Manifests, workload: Workload, container: Container
) -> Iterator[Connection]:
    """NAME:PORT of a Service in an argument or a variable."""
    texts = [*manifests.expanded(container), *manifests.environment(container).values()]
    for service in manifests.of_kind("Service"):
        name = re.escape(service["metadata"]["name"])
        for text in texts:
            for found in re.finditer(rf"(?<![\w.-]){name}(?:\.[\w.-]+)?:(\d+)", text):
                for target, port in _behind(manifests, service, int(found[1])):
                    yield Connection(Peer.of(workload), Peer.of(target), port)


def _behind(
    manifests: Manifests, service: Document, port: int
) -> Iterator[tuple[Workload, int | None]]:
    """Pods behind a port of a Service, and the port there; -1 where the Service has none."""
    spec = service["spec"]
    headless = spec.get("clusterIP") == "None"
    for workload in manifests.selected({"matchLabels": spec["selector"]}):
        targets = [one.get("targetPort", port) for one in spec["ports"] if one["port"] == port]
        named = workload.ports.get(str(targets[0]), targets[0]) if targets else -1
        # Nothing translates ports before a headless Service.
        yield workload, port if headless else named


def _discovery(
    manifests: Manifests, workload: Workload, container: Container
) -> Iterator[Connection]:
    selector, port = container.flag("selector"), container.flag("service-discovery-port")
    if selector and port:
        labels = dict(one.split("=", 1) for one in selector.split())
        for target in manifests.selected({"matchLabels": labels}):
            yield Connection(Peer.of(workload), Peer.of(target), int(port))


def _segments(
    manifests: Manifests, workload: Workload, container: Container
) -> Iterator[Connection]:
    """Mooncake's services read and write each other's memory, at ports that they choose."""
    if container.flag("store") == "mooncake":
        for target in manifests.workloads:
            if any(one.flag("store") == "mooncake" for one in target.containers):
                yield Connection(Peer.of(workload), Peer.of(target), None)


def _outside(workload: Workload, container: Container) -> Iterator[Connection]:
    if workload.pod.get("automountServiceAccountToken") is not False:
        for port in API_PORTS:
            yield Connection(Peer.of(workload), OUTSIDE, port)
    if any("hf download" in word for word in container.words):
        yield Connection(Peer.of(workload), OUTSIDE, HTTPS)


def _scraping(manifests: Manifests, monitor: Document) -> Iterator[Connection]:
    for workload in manifests.selected(monitor["spec"]["selector"]):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] in workload.ports:
                port = workload.ports[endpoint["port"]]
                yield Connection(PROMETHEUS, Peer.of(workload), port)
