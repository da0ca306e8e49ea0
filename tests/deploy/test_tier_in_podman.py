"""The tier from its rendered manifest in a real container, where podman and the image are; and what
that leaves of the manifest, everywhere."""

from __future__ import annotations

import json

import pytest

from benchmarks.deploy import tier_in_podman
from benchmarks.deploy.podman import Podman, PodmanError, as_pod
from benchmarks.deploy.tier_in_podman import IMAGE, SMALLER, USER
from deploy.checks.manifests import Workload


def test_the_tier_is_confined_scraped_drained_and_has_what_it_acknowledged(tmp_path):
    podman = Podman("podman")
    try:
        podman("info")
    except (PodmanError, OSError) as error:
        pytest.skip(f"podman does not work here: {error}")
    if not podman.has_image(IMAGE):
        pytest.skip(f"no image {IMAGE}: podman build -f deploy/image/tier/Dockerfile -t {IMAGE} .")
    out = tmp_path / "out.json"
    assert tier_in_podman.main(["--blobs", "8", "--blob", "256k", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["lost"] == 0
    assert found["acknowledged"] > 8


def test_without_an_image_it_is_said_how_to_make_one(capsys, tmp_path):
    assert tier_in_podman.main(["--podman", str(tmp_path / "none")]) == 1
    assert f"no image {IMAGE}" in capsys.readouterr().err


def test_the_pod_that_is_played_is_as_confined_as_the_manifest_says(rendered, tmp_path):
    tier = Workload(rendered["production"].find("StatefulSet", "kvtier-tier"))
    pod = as_pod(tier, IMAGE, {"certificates": tmp_path, "store": tmp_path}, SMALLER)
    theirs, ours = tier.pod, pod["spec"]
    assert ours["securityContext"] == theirs["securityContext"]
    assert ours["securityContext"]["runAsUser"] == USER
    assert ours["terminationGracePeriodSeconds"] == theirs["terminationGracePeriodSeconds"]
    (before,), (after,) = theirs["containers"], ours["containers"]
    for name in ("securityContext", "volumeMounts", "resources"):
        assert after[name] == before[name]
    changed = {
        a.partition("=")[0] for a, b in zip(after["args"], before["args"], strict=True) if a != b
    }
    assert changed <= set(SMALLER)
    assert {one["name"] for one in ours["volumes"]} == set(tier.volumes)
