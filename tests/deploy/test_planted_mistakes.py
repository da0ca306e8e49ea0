"""A mistake of every kind, planted in a rendering that passes, is found by the check for it."""

from __future__ import annotations

import copy

import pytest
from mistakes import TIER, container
from mistakes_of_objects import OF_OBJECTS
from mistakes_of_programs import OF_PROGRAMS

from deploy.checks import CHECKS, findings
from deploy.checks.manifests import Container, Manifests

MISTAKES = OF_OBJECTS | OF_PROGRAMS


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(rendered, name):
    mistake = MISTAKES[name]
    planted = Manifests(copy.deepcopy(list(rendered[mistake.overlay].documents)))
    mistake.plant(planted)
    found = findings(Manifests(planted.documents), [mistake.check])
    assert any(mistake.said in one for one in found), found


def test_there_is_a_mistake_for_every_check():
    assert {one.check for one in MISTAKES.values()} == set(CHECKS)


def test_a_service_translates_its_port_before_a_policy_sees_it(rendered):
    """The router's Service listens on 80, its Pods on 8080."""
    planted = Manifests(copy.deepcopy(list(rendered["production"].documents)))
    one = container(planted, TIER)
    one["env"] = [{"name": "WHERE", "value": "http://kvtier-router:80/"}]
    found = findings(planted, ["network"])
    assert any("StatefulSet/kvtier-tier -> Deployment/kvtier-router, TCP 8080" in f for f in found)
    assert Container(one).words[0] == "kvtier"
