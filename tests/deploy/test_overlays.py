"""Every overlay renders and passes every check; what is not set is not deployed."""

from __future__ import annotations

import shutil

import pytest
from deployed import MORE, OVERLAYS, added_to_production

from deploy.checks import CHECKS, findings
from deploy.checks.__main__ import main
from deploy.checks.manifests import OURS
from deploy.checks.rendering import DEPLOY, EXAMPLES, VALUES, copy_tree, render
from kvtier.errors import UsageError


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("overlay", [*OVERLAYS, *MORE])
def test_an_overlay_passes_a_check(rendered, overlay, check):
    assert findings(rendered[overlay], [check]) == []


def test_the_overlays_that_are_checked_are_all_that_there_are():
    assert {path.name for path in (DEPLOY / "overlays").iterdir()} == set(OVERLAYS)


def test_every_component_is_part_of_something_that_is_checked():
    kustomizations = [DEPLOY / "overlays" / name / "kustomization.yaml" for name in OVERLAYS]
    used = "".join([*(one.read_text() for one in kustomizations), *MORE.values()])
    unused = [one.name for one in (DEPLOY / "components").iterdir() if one.name not in used]
    # A test of its own renders that one.
    assert unused == ["writable-root"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_without_values_nothing_renders(tree, overlay):
    with pytest.raises(UsageError, match=r"values\.env"):
        render(tree / "overlays" / overlay)


def test_values_that_were_copied_and_not_set_are_found(tree):
    shutil.copy(tree / f"{VALUES}.example", tree / VALUES)
    found = findings(render(tree / "overlays" / "production"), ["images"])
    assert "images: ConfigMap/kvtier-values: MODEL is not set" in found
    assert any("Deployment/kvtier-engine: engine" in one and "SET_ME" in one for one in found)


def test_the_two_values_are_all_that_production_wants_set(rendered):
    example = (DEPLOY / f"{VALUES}.example").read_text().splitlines()
    assert [line.split("=")[0] for line in example if "=" in line] == list(EXAMPLES)
    ours = f"{EXAMPLES['IMAGES']}/kvtier-"
    for _, one in rendered["production"].containers():
        assert one.image.startswith(ours) == bool(OURS.search(one.image))


def test_a_tier_that_takes_its_shared_memory_is_not_ended_for_not_answering(rendered):
    """It answers no probe meanwhile: every page of the file is written."""
    tiers = [
        one
        for manifests in rendered.values()
        for _, one in manifests.containers()
        if one.words[1:2] == ["tier"] and one.flag("shared-memory") != "off"
    ]
    assert len(tiers) >= 2
    for tier in tiers:
        probe = tier.document["startupProbe"]
        assert probe["httpGet"] == tier.document["livenessProbe"]["httpGet"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 300


def test_a_calibration_of_hours_waits_for_a_redis_that_is_slow_to_answer(rendered):
    """Its results are put at the end, and would be computed again."""
    manifests = rendered["production"]
    job = next(one for one in manifests.workloads if one.title == "Job/kvtier-calibration")
    assert float(manifests.environment(job.containers[-1])["KVTIER_REDIS_TIMEOUT_S"]) >= 10


def test_a_root_that_may_be_written_is_the_only_thing_that_the_component_changes(tmp_path):
    tree = copy_tree(tmp_path)
    folder = tree / "overlays" / "writable"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(added_to_production("writable-root"))
    found = findings(render(folder), [name for name in CHECKS if name != "flags"])
    assert found == ["security: Deployment/kvtier-engine: engine: has a writable root"]


def test_the_command_says_what_it_finds_and_fails(tmp_path, capsys, monkeypatch):
    tree = copy_tree(tmp_path)
    assert main([str(tree / "overlays" / "cpu-demo"), "--skip", "flags"]) == 0
    assert "0 findings of 7 checks" in capsys.readouterr().out
    rendered = tmp_path / "pod.yaml"
    rendered.write_text(
        "apiVersion: v1\nkind: Service\nmetadata: {name: lonely}\n"
        "spec: {selector: {app: nobody}, ports: [{port: 80}]}\n"
    )
    assert main([str(rendered)]) == 1
    assert "Service/lonely: its selector finds no Pods" in capsys.readouterr().out
    rendered.write_text("just text")
    assert main([str(rendered)]) == 2
    assert "expected objects with apiVersion" in capsys.readouterr().err
