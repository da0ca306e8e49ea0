"""NetworkPolicies let through every connection that is declared, and of strangers only those who
come to the front door: the routers, or without them the engines.

https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

from typing import Any

from deploy.checks.connections import NAMESPACE, STRANGER, Connection, Peer, declared
from deploy.checks.manifests import Document, Manifests, Workload, matches

FRONT_DOORS = ("router", "engine")


def check(manifests: Manifests) -> list[str]:
    findings = []
    for one in declared(manifests):
        for direction, end in (("Egress", one.source), ("Ingress", one.target)):
            if end.workload is not None and not _allowed(manifests, one, direction):
                findings.append(f"{one}: no {direction} policy allows it")
    return findings + _strangers(manifests) + _open(manifests)


def _policies(manifests: Manifests, workload: Workload, direction: str) -> list[Document]:
    """Specs of the policies that a Pod has in a direction."""
    return [
        one["spec"]
        for one in manifests.of_kind("NetworkPolicy")
        if direction in one["spec"].get("policyTypes", ["Ingress"])
        and matches(one["spec"]["podSelector"], workload.labels)
    ]


def _allowed(manifests: Manifests, connection: Connection, direction: str) -> bool:
    """Return whether the policies of one end allow it; a Pod that has none allows everything."""
    egress = direction == "Egress"
    own, other = connection.source, connection.target
    if not egress:
        own, other = other, own
    assert own.workload is not None
    policies = _policies(manifests, own.workload, direction)
    rules = [rule for one in policies for rule in one.get(direction.lower(), [])]
    return not policies or any(
        _peers(rule.get("to" if egress else "from"), other)
        and _ports(rule.get("ports"), connection)
        for rule in rules
    )


def _peers(peers: list[Document] | None, other: Peer) -> bool:
    return not peers or any(_peer(one, other) for one in peers)


def _peer(peer: Document, other: Peer) -> bool:
    if "ipBlock" in peer:
        return other.workload is None and other.namespace is None
    if not other.labels and other.namespace is None:
        return False
    if "namespaceSelector" in peer:
        # Namespaces of ours have no name here; theirs has its own.
        labels = {NAMESPACE: other.namespace} if other.namespace else {}
        if not matches(peer["namespaceSelector"], labels):
            return False
    elif other.workload is None:
        return False
    return matches(peer.get("podSelector", {}), other.labels)


def _ports(ports: list[dict[str, Any]] | None, connection: Connection) -> bool:
    if not ports:
        return True
    target = connection.target.workload
    for one in ports:
        if one.get("protocol", "TCP") != connection.protocol:
            continue
        port = one.get("port")
        number = target.ports.get(port) if target is not None and isinstance(port, str) else port
        if port is None or (connection.port is not None and number == connection.port):
            return True
    return False


def _strangers(manifests: Manifests) -> list[str]:
    """Return the callers that reach a workload from elsewhere and should not, and a front door that
    is closed."""
    doors = [f"kvtier-{name}" for name in FRONT_DOORS]
    front = next((d for d in doors if manifests.find("Deployment", d) is not None), None)
    findings = []
    for workload in manifests.workloads:
        door = workload.document["metadata"]["name"] == front
        for name, port in workload.ports.items():
            coming = Connection(STRANGER, Peer.of(workload), port)
            reaches = _allowed(manifests, coming, "Ingress")
            if reaches and not (door and name == "http"):
                findings.append(f"{coming}: nothing keeps it out")
            if door and name == "http" and not reaches:
                findings.append(f"{coming}: the front door is closed")
    return findings


def _open(manifests: Manifests) -> list[str]:
    """Pods that no policy closes."""
    return [
        f"{one.title}: no policy closes its {direction}"
        for one in manifests.workloads
        for direction in ("Ingress", "Egress")
        if not _policies(manifests, one, direction)
    ]
