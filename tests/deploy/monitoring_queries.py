"""The queries of deploy/dashboards and deploy/rules, and what they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "dashboards").glob("*.json"))
RULES = DEPLOY / "rules" / "kvtier.yaml"
RULE_TESTS = DEPLOY / "rules" / "tests" / "kvtier_test.yaml"
# The labels of Prometheus itself, beside what a target exports.
OWN_LABELS = {"instance", "job"}


class Query(NamedTuple):
    """where: the panel or rule; expr: with Grafana's variables replaced by what takes all."""

    where: str
    expr: str


class Selector(NamedTuple):
    """A metric that a query names, and the labels that it wants of it."""

    metric: str
    labels: frozenset[str]


def replaced(expr: str, rate_interval: str = "5m") -> str:
    """A panel's query as Grafana sends it where every variable says All."""
    for name in ("model", "namespace", "memory"):
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", rate_interval)


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dashboard's name with each of its panels."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield path.stem, panel


def panel_queries() -> list[Query]:
    return [
        Query(f"{name}: {panel['title']}", replaced(target["expr"]))
        for name, panel in panels()
        for target in panel.get("targets", ())
    ]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [Query(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


def selectors(expr: str) -> set[Selector]:
    """Return what a query names. Raises ValueError for one that is no PromQL."""
    found = set()
    for node in _nodes(promql_parser.parse(expr)):
        if isinstance(node, promql_parser.VectorSelector):
            matchers = {one.name: one.value for one in node.matchers.matchers}
            # SGLang's names have a colon or, for older Prometheus, an underscore.
            name = node.name or matchers.pop("__name__").replace("[:_]", ":")
            found.add(Selector(name, frozenset(matchers)))
    return found


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        part = getattr(node, name, None)
        for one in part if isinstance(part, list) else [part]:
            if one is not None:
                yield from _nodes(one)


def unknown(queries: Iterable[Query], scraped: dict[str, set[str]]) -> list[str]:
    """Metrics and labels that queries name and no target has. scraped: each sample's labels, by its
    name. What rules record is known."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    wrong = []
    for query in queries:
        for metric, labels in sorted(selectors(query.expr)):
            if metric in recorded:
                continue
            if metric not in scraped:
                wrong.append(f"{query.where}: no target has {metric}")
            elif missing := labels - scraped[metric] - OWN_LABELS:
                wrong.append(f"{query.where}: {metric} has no label {', '.join(sorted(missing))}")
    return wrong
