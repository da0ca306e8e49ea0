"""Overlays, each rendered once."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployed import MORE, OVERLAYS

from deploy.checks.manifests import Manifests
from deploy.checks.rendering import copy_tree, render


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifests]:
    """Manifests by overlay."""
    overlays = copy_tree(tmp_path_factory.mktemp("deploy")) / "overlays"
    for name, text in MORE.items():
        (overlays / name).mkdir()
        (overlays / name / "kustomization.yaml").write_text(text)
    return {name: render(overlays / name) for name in (*OVERLAYS, *MORE)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of deploy/ that may be changed, without values."""
    return copy_tree(tmp_path, None)
