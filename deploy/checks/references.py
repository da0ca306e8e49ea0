"""A check that what a document names is there: Pods behind selectors, ports, accounts, volumes,
variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.checks.manifests import Container, Document, Manifests, Workload, title, unresolved

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# The key where a volume's source says which object it is.
SOURCES = {
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


def check(manifests: Manifests) -> list[str]:
    findings = [one for workload in manifests.workloads for one in _workload(manifests, workload)]
    for document in manifests.documents:
        findings += [f"{title(document)}: {one}" for one in _document(manifests, document)]
    return findings


def _document(manifests: Manifests, document: Document) -> Iterator[str]:
    spec: Document = document.get("spec", {})
    match document["kind"]:
        case "Service":
            yield from _service(manifests, spec)
        case "PodDisruptionBudget":
            if not manifests.selected(spec["selector"]):
                yield "its selector finds no Pods"
        case "NetworkPolicy":
            yield from _policy(manifests, spec)
        case "RoleBinding":
            yield from _binding(manifests, document)
        case "StatefulSet":
            if manifests.find("Service", spec["serviceName"]) is None:
                yield f"no Service {spec['serviceName']}"
        case "ScaledObject":
            name = spec["scaleTargetRef"]["name"]
            target = manifests.find("Deployment", name)
            if target is None:
                yield f"no Deployment {name}"
            elif "replicas" in target["spec"]:
                yield f"Deployment/{name} has a number of replicas of its own"


def _service(manifests: Manifests, spec: Document) -> Iterator[str]:
    found = manifests.selected({"matchLabels": spec["selector"]})
    if not found:
        yield "its selector finds no Pods"
    for workload in found:
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            if target not in workload.ports and target not in workload.ports.values():
                yield f"{workload.title} has no port {target}"


def _policy(manifests: Manifests, spec: Document) -> Iterator[str]:
    own = manifests.selected(spec["podSelector"])
    if not own:
        yield "its podSelector finds no Pods"
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction, []):
            peers = rule.get(side, [])
            listening = own if direction == "ingress" else []
            for peer in peers:
                if "podSelector" not in peer or "namespaceSelector" in peer:
                    continue
                found = manifests.selected(peer["podSelector"])
                # Some of those who may come may be in other overlays only; a call has a target.
                if direction == "egress" and not found:
                    yield f"egress to {peer['podSelector']}: no such Pods"
                listening = listening + (found if direction == "egress" else [])
            yield from _named_ports(rule, listening)


def _named_ports(rule: Document, listening: list[Workload]) -> Iterator[str]:
    known = {name for one in listening for name in one.ports}
    for port in rule.get("ports", []):
        if isinstance(port.get("port"), str) and port["port"] not in known:
            yield f"no Pod that it is about has a port named {port['port']}"


def _binding(manifests: Manifests, document: Document) -> Iterator[str]:
    role = document["roleRef"]
    if manifests.find(role["kind"], role["name"]) is None:
        yield f"no {role['kind']} {role['name']}"
    for subject in document["subjects"]:
        if manifests.find(subject["kind"], subject["name"]) is None:
            yield f"no {subject['kind']} {subject['name']}"


def _workload(manifests: Manifests, workload: Workload) -> Iterator[str]:
    selector = workload.document["spec"].get("selector")
    if selector is not None and workload not in manifests.selected(selector):
        yield f"{workload.title}: its selector does not find its own Pods"
    account = workload.pod.get("serviceAccountName")
    if account is None or manifests.find("ServiceAccount", account) is None:
        yield f"{workload.title}: no ServiceAccount {account}"
    for name, volume in workload.volumes.items():
        for source, (kind, key) in SOURCES.items():
            if source in volume and manifests.find(kind, volume[source][key]) is None:
                yield f"{workload.title}: volume {name}: no {kind} {volume[source][key]}"
    used = {m["name"] for one in workload.containers for m in _mounts(one)}
    for name in set(workload.volumes) - used:
        yield f"{workload.title}: no container mounts the volume {name}"
    for container in workload.containers:
        for one in _container(manifests, workload, container):
            yield f"{workload.title}: {container.name}: {one}"


def _mounts(container: Container) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = container.document.get("volumeMounts", [])
    return mounts


def _container(manifests: Manifests, workload: Workload, container: Container) -> Iterator[str]:
    for mount in _mounts(container):
        if mount["name"] not in workload.volumes:
            yield f"no volume {mount['name']}"
        elif "secret" in workload.volumes[mount["name"]] and "subPath" in mount:
            yield f"the Secret in {mount['mountPath']} is mounted by subPath and never renewed"
    for name in unresolved(manifests.expanded(container)):
        yield f"$({name}) is no variable of its environment"
    for name in PROBES:
        for kind in ("httpGet", "tcpSocket"):
            port = container.document.get(name, {}).get(kind, {}).get("port")
            if port is not None and port not in container.ports:
                yield f"{name}: no port {port}"
    for variable in container.document.get("env", []):
        wanted = variable.get("valueFrom", {}).get("configMapKeyRef")
        if wanted is not None:
            found = manifests.find("ConfigMap", wanted["name"]) or {"data": {}}
            if wanted["key"] not in found["data"]:
                yield f"{variable['name']}: no key {wanted['key']} in ConfigMap {wanted['name']}"
