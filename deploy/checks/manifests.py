"""Rendered manifests, read once: what checks ask about them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import yaml

from kvtier.errors import UsageError

Document = dict[str, Any]

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
OURS = re.compile(r"/kvtier-(?P<name>[a-z-]+):(?P<tag>[^@]+)$")
# The programs that the image of deploy/image starts where a container names no command.
PROGRAMS = {"engine": "kvtier", "tier": "kvtier", "tier-mooncake": "kvtier", "router": "smg"}
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class Container:
    """A container of a workload. init: whether it is among the initContainers."""

    document: Document
    init: bool = False

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def image(self) -> str:
        return str(self.document["image"])

    @property
    def stays(self) -> bool:
        """Return whether it runs as long as the Pod does: initContainers end, sidecars excepted."""
        return not self.init or self.document.get("restartPolicy") == "Always"

    @property
    def ports(self) -> dict[str, int]:
        """The container's ports by name; those without one by their number as text."""
        ports = self.document.get("ports", [])
        return {one.get("name", str(one["containerPort"])): one["containerPort"] for one in ports}

    @property
    def words(self) -> list[str]:
        """The program and its arguments, as they are written."""
        command = list(self.document.get("command", []))
        if command[:2] == ["tini", "--"]:
            command = command[2:]
        if not command:
            ours = OURS.search(self.image)
            command = [PROGRAMS.get(ours["name"], "")] if ours else []
        return [str(word) for word in [*command, *self.document.get("args", [])]]

    def flag(self, name: str) -> str | None:
        """Return what follows `--name=` among the arguments."""
        for word in self.words:
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
        return None


@dataclass(frozen=True)
class Workload:
    """A document that makes Pods."""

    document: Document

    @property
    def title(self) -> str:
        return title(self.document)

    @property
    def template(self) -> Document:
        template: Document = self.document["spec"]["template"]
        return template

    @property
    def pod(self) -> Document:
        pod: Document = self.template["spec"]
        return pod

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template.get("metadata", {}).get("labels", {}))

    @property
    def containers(self) -> list[Container]:
        first = [Container(one, init=True) for one in self.pod.get("initContainers", [])]
        return first + [Container(one) for one in self.pod["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {name: port for one in self.containers for name, port in one.ports.items()}

    @property
    def volumes(self) -> dict[str, Document]:
        """The Pod's volumes by name; those of volumeClaimTemplates as claims that are made with the
        Pod."""
        claimed = self.document["spec"].get("volumeClaimTemplates", [])
        made: dict[str, Document] = {
            one["metadata"]["name"]: {"claimTemplate": one} for one in claimed
        }
        return made | {one["name"]: one for one in self.pod.get("volumes", [])}


@dataclass(frozen=True)
class Manifests:
    """All documents of one rendering."""

    documents: Sequence[Document]

    @classmethod
    def parse(cls, text: str) -> Manifests:
        """Raises UsageError for what is no YAML of Kubernetes objects."""
        try:
            documents = [one for one in yaml.safe_load_all(text) if one is not None]
        except yaml.YAMLError as error:
            raise UsageError("manifests", f"YAML ({error})", text[:80]) from error
        for one in documents:
            if not isinstance(one, dict) or not {"apiVersion", "kind", "metadata"} <= one.keys():
                raise UsageError("manifests", "objects with apiVersion, kind and metadata", one)
        return cls(documents)

    def of_kind(self, *kinds: str) -> list[Document]:
        return [one for one in self.documents if one["kind"] in kinds]

    def find(self, kind: str, name: str) -> Document | None:
        found = (one for one in self.of_kind(kind) if one["metadata"]["name"] == name)
        return next(found, None)

    @cached_property
    def workloads(self) -> list[Workload]:
        return [Workload(one) for one in self.of_kind(*WORKLOADS)]

    def selected(self, selector: Mapping[str, Any]) -> list[Workload]:
        """Workloads whose Pods a label selector finds."""
        return [one for one in self.workloads if matches(selector, one.labels)]

    def containers(self) -> Iterator[tuple[Workload, Container]]:
        for workload in self.workloads:
            for container in workload.containers:
                yield workload, container

    def environment(self, container: Container) -> dict[str, str]:
        """The container's variables. Values of ConfigMaps are looked up; what a cluster alone
        knows is written `<its source>`."""
        return {one["name"]: self._value(one) for one in container.document.get("env", [])}

    def _value(self, variable: Document) -> str:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            wanted = source["configMapKeyRef"]
            found = self.find("ConfigMap", wanted["name"]) or {}
            return str(found.get("data", {}).get(wanted["key"], ""))
        return str(variable.get("value", f"<{'/'.join(source)}>"))

    def expanded(self, container: Container) -> list[str]:
        """`words` with $(VARIABLE) replaced, as Kubernetes does: unknown ones stay."""
        known = self.environment(container)
        return [_VARIABLE.sub(lambda one: known.get(one[1], one[0]), w) for w in container.words]


def title(document: Document) -> str:
    """KIND/NAME, for findings."""
    return f"{document['kind']}/{document['metadata']['name']}"


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector (matchLabels, matchExpressions) is met; an empty one always
    is."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions", []))


def _meets(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    met = {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return met[expression["operator"]]


def unresolved(words: Sequence[str]) -> list[str]:
    """Variables that no environment had."""
    return [name for word in words for name in _VARIABLE.findall(word)]


def is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
