"""Overlays that tests render: those of deploy/, and what users may put together from it."""

from __future__ import annotations

from collections.abc import Iterable

OVERLAYS = ("cpu-demo", "single-gpu", "production")


def overlay(resources: Iterable[str], components: Iterable[str]) -> str:
    """A kustomization in a folder beside the overlays."""
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization"]
    lines += ["namespace: kvtier", "resources:", *(f"  - ../../{name}" for name in resources)]
    lines += ["components:", *(f"  - ../../components/{name}" for name in components)]
    return "\n".join(lines)


def added_to_production(*components: str) -> str:
    return overlay(["overlays/production"], components)


# These overlays come beside those of deploy/. composed: what deploy/README.md shows, with Mooncake
# for a tier.
MORE = {
    "composed": overlay(
        ["values", "base/common", "base/engine", "base/router"],
        [
            *("model-download", "sidecar-tier", "mooncake", "nvidia-gpu"),
            *("prometheus-operator", "keda", "values"),
        ],
    ),
    "watched": added_to_production("prometheus-operator", "keda"),
}
