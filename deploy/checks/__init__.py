"""The checks of rendered manifests, before a cluster sees them.

    python -m deploy.checks deploy/overlays/production          render an overlay and check it
    kubectl kustomize my-overlay | python -m deploy.checks -     check what is already rendered

A check is a module here with a function `check`, which takes Manifests and returns findings, one
sentence each; none is fine.

schemas       every document against the schema of its kind
security      the restricted pod security standard, and read-only roots
references    selectors, ports, accounts, volumes, variables: what is named is there
certificates  who is called by which name, and known by which
limits        grace periods hold what happens in them, memory limits what is taken
flags         every program accepts its flags and settings, by its own parser
network       policies let through every connection that is declared, and no stranger
images        what others made by digest, what is ours by version, nothing left to be set

manifests     what the documents say: workloads, their containers, programs and volumes
rendering     overlays through kubectl's kustomize
connections   who calls whom
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from deploy.checks.manifests import Manifests

CHECKS = (
    *("schemas", "security", "references", "certificates"),
    *("limits", "flags", "network", "images"),
)


def findings(manifests: Manifests, checks: Iterable[str] = CHECKS) -> list[str]:
    """Return what the named checks find, each finding with the check's name before it."""
    found = []
    for name in checks:
        module = importlib.import_module(f"deploy.checks.{name}")
        found += [f"{name}: {one}" for one in module.check(manifests)]
    return found
