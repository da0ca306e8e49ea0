"""Dashboards and rules are whole: what can be said of them without an engine. What engine, tier and
Prometheus say of them is in tests/engine/status/test_seen_run.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml
from monitoring_queries import DASHBOARDS, DEPLOY, RULE_TESTS, RULES, panels, rules, selectors

PROMTOOL = shutil.which("promtool")
DOCS = DEPLOY.parent / "docs" / "monitoring.md"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_can_import(path):
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert board["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, f"{panel['title']} lies over another"
        cells |= own
    variables = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(board["panels"])))
    assert used == variables


def test_every_panel_says_its_unit_and_every_line_its_name():
    for name, panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], (name, panel["title"])
        targets = panel["targets"]
        legends = [target["legendFormat"] for target in targets]
        assert len(set(legends)) == len(targets), (name, panel["title"])
        assert panel["type"] == "stat" or all(legends), (name, panel["title"])


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    headings = re.findall(r"^### (.*)$", DOCS.read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/monitoring.md"
        assert anchor in anchors, rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]


def test_every_alert_is_shown_to_fire_and_to_be_silent():
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {
        one["alertname"]
        for test in tests
        for one in test.get("alert_rule_test", ())
        if one["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    # Silent with series that it looks at, not for want of any.
    (well,) = (test for test in tests if test["name"].startswith("All is well"))
    fed = {re.split(r"[{ ]", one["series"])[0] for one in well["input_series"]}
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    for rule in rules():
        if "alert" in rule:
            for metric, _ in selectors(rule["expr"]):
                named = {metric}
                if metric in recorded:
                    named = {one.metric for one in selectors(recorded[metric])}
                assert named <= fed, (rule["alert"], named - fed)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH (Debian: prometheus)")
@pytest.mark.parametrize("arguments", [["check", "rules"], ["test", "rules"]], ids=" ".join)
def test_promtool_passes_the_rules(arguments):
    target = RULES if arguments[0] == "check" else RULE_TESTS
    done = subprocess.run(
        [str(PROMTOOL), *arguments, str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
