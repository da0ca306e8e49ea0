"""The tools by which mistakes are planted in renderings that pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from deploy.checks.manifests import Manifests, Workload


class Mistake(NamedTuple):
    """check: which finds it. said: part of what it says. plant: changes documents."""

    check: str
    said: str
    plant: Callable[[Manifests], Any]
    overlay: str = "production"


def workload(manifests: Manifests, name: str) -> Workload:
    return next(one for one in manifests.workloads if one.document["metadata"]["name"] == name)


def container(manifests: Manifests, name: str, index: int = 0) -> dict[str, Any]:
    return workload(manifests, name).pod["containers"][index]


def spec(manifests: Manifests, kind: str, name: str) -> dict[str, Any]:
    found = manifests.find(kind, name)
    assert found is not None
    return found["spec"]


def set_flag(one: dict[str, Any], flag: str, value: str | None) -> None:
    """--flag=value in place of the flag's; None: without it."""
    rest = [word for word in one["args"] if not word.startswith(f"--{flag}=")]
    one["args"] = rest if value is None else [*rest, f"--{flag}={value}"]


def set_variable(one: dict[str, Any], name: str, value: str) -> None:
    variable = next(variable for variable in one["env"] if variable["name"] == name)
    variable.clear()
    variable.update(name=name, value=value)


def without(documents: Manifests, kind: str, name: str) -> None:
    found = documents.find(kind, name)
    assert isinstance(documents.documents, list)
    documents.documents.remove(found)


ENGINE, TIER, ROUTER, REDIS = "kvtier-engine", "kvtier-tier", "kvtier-router", "kvtier-redis"
