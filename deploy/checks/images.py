"""Images of others are named by digest, ours by kvtier's version, and nothing is left to be set."""

from __future__ import annotations

import re

from deploy.checks.manifests import OURS, PROGRAMS, Manifests
from kvtier import __version__

DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
# The placeholders in deploy/ where a value has to be.
PLACEHOLDERS = ("SET_ME", "kvtier.invalid")


def check(manifests: Manifests) -> list[str]:
    findings = []
    for workload, container in manifests.containers():
        where, image = f"{workload.title}: {container.name}", container.image
        ours = OURS.search(image)
        if ours is None and not DIGEST.search(image):
            findings.append(f"{where}: {image} is not named by its digest")
        elif ours is not None and (ours["name"] not in PROGRAMS or ours["tag"] != __version__):
            findings.append(f"{where}: {image} is no image of kvtier {__version__}")
        findings += [f"{where}: {image}: {one} is not set" for one in PLACEHOLDERS if one in image]
        if "//" in image:
            findings.append(f"{where}: {image}: IMAGES ends with a slash")
    for one in manifests.of_kind("ConfigMap"):
        for key, value in one.get("data", {}).items():
            if any(placeholder in value for placeholder in PLACEHOLDERS) or not value:
                findings.append(f"ConfigMap/{one['metadata']['name']}: {key} is not set")
    return findings
