"""A mistake of every kind, planted in a rendering that passes, is found by the check for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.checks import CHECKS, findings
from deploy.checks.manifests import Manifests

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
CASES = [(check, mistake) for check, mistakes in MISTAKES.items() for mistake in mistakes]
# The short beginnings of paths, see mistakes.yaml.
SHORT = {"container.": "pod.containers.0.", "pod.": "spec.template.spec."}


@pytest.mark.parametrize(
    ("check", "mistake"), CASES, ids=[f"{check}: {mistake['said']}" for check, mistake in CASES]
)
def test_a_planted_mistake_is_found(rendered, check, mistake):
    overlay = rendered[mistake.get("in", "production")]
    planted = copy.deepcopy(list(overlay.documents))
    for title, change in mistake.items():
        if title not in ("said", "in"):
            document = Manifests(planted).find(*title.split("/"))
            if change is None:
                planted.remove(document)
            for path, value in (change or {}).items():
                put(document, path, value)
    found = findings(Manifests(planted), [check])
    assert any(mistake["said"] in one for one in found), found


def put(document: dict[str, Any], path: str, value: Any) -> None:
    for short, long in SHORT.items():
        if path.startswith(short):
            path = long + path.removeprefix(short)
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        place = place[at(place, key)]
    if last.startswith("--"):
        others = [word for word in place if not word.startswith(f"{last}=")]
        place[:] = others if value is None else [*others, f"{last}={value}"]
    elif last == "+":
        place.append(value)
    elif value is None:
        place.pop(at(place, last))
    elif isinstance(place, list):
        place[at(place, last)] = {"name": last, "value": value}
    else:
        place[last] = value


def at(place: Any, key: str) -> Any:
    """The key of a mapping, or the index in a list, whose elements have names."""
    if isinstance(place, dict):
        return key
    names = [one.get("name") for one in place if isinstance(one, dict)]
    return names.index(key) if key in names else int(key)


def test_there_is_a_mistake_for_every_check():
    assert set(MISTAKES) == set(CHECKS)
