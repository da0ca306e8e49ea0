"""The tier from its rendered manifest in a real container, where podman and the image are; and what
that leaves of the manifest, everywhere."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from benchmarks.deploy import tier_in_podman
from benchmarks.deploy.podman import Podman, PodmanError, as_pod
from benchmarks.deploy.tier_in_podman import IMAGE, SMALLER, USER, Seen, make_bars
from deploy.checks.manifests import Workload


@pytest.fixture
def needs_podman() -> None:
    if shutil.which("podman") is None:
        pytest.skip("no podman on PATH")
    podman = Podman("podman")
    try:
        podman("info")
    except PodmanError as error:
        pytest.skip(f"podman does not work here: {error}")
    if not podman.has_image(IMAGE):
        pytest.skip(f"no image {IMAGE}: podman build -f deploy/image/tier/Dockerfile -t {IMAGE} .")


@pytest.mark.usefixtures("needs_podman")
def test_the_tier_is_confined_scraped_drained_and_has_what_it_acknowledged(tmp_path):
    out = tmp_path / "out.json"
    assert tier_in_podman.main(["--blobs", "8", "--blob", "256k", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["lost"] == 0
    assert found["acknowledged"] > 8


def test_without_an_image_it_is_said_how_to_make_one(capsys, tmp_path):
    assert tier_in_podman.main(["--podman", str(tmp_path / "none")]) == 1
    assert f"no image {IMAGE}" in capsys.readouterr().err


@pytest.fixture
def tier(rendered) -> Workload:
    found = rendered["production"].find("StatefulSet", "kvtier-tier")
    return Workload(found)


def test_the_pod_that_is_played_is_as_confined_as_the_manifest_says(tier, tmp_path):
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


FINE = Seen(
    confined={
        "uids": [str(USER)],
        "capabilities": "0" * 16,
        "capability_bounds": "0" * 16,
        "seccomp_mode": 2,
        "no_new_privileges": 1,
        "root_is_writable": False,
    },
    refused={"no certificate": True},
    scraped={"kvtier_tier_blobs": 8},
    not_ready_while_draining=True,
    acknowledged_while_draining=True,
    exit_code=0,
)


def unmet(seen: Seen) -> int:
    options = tier_in_podman.BENCHMARK.parse(["--blobs", "8"])
    return sum(not bar.met for bar in make_bars(seen, options))


@pytest.mark.parametrize(
    "change",
    [
        {"confined": FINE.confined | {"uids": ["0"]}},
        {"confined": FINE.confined | {"capabilities": f"{1:016x}"}},
        {"confined": FINE.confined | {"seccomp_mode": 0}},
        {"confined": FINE.confined | {"no_new_privileges": 0}},
        {"confined": FINE.confined | {"root_is_writable": True}},
        {"refused": {"no certificate": False}},
        {"scraped": {"kvtier_tier_blobs": 7}},
        {"not_ready_while_draining": False},
        {"acknowledged_while_draining": False},
        {"exit_code": 137},
        {"lost": 1},
        {"corrupt": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_is_not_as_it_should_be_is_a_bar_that_is_not_met(change):
    assert unmet(FINE) == 0
    assert unmet(dataclasses.replace(FINE, **change)) == 1
