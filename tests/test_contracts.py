"""The import contracts that `make lint` checks: they hold, and they would find a circle."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "kvtier": ROOT,
    "kvtier_kernels": ROOT / "kernels",
    "kvtier_sglang": ROOT / "sglang_patches",
    "kvtier_tierd": ROOT / "services",
}


@pytest.fixture
def tree(tmp_path):
    """A copy of our packages and their contracts."""
    for package, folder in PACKAGES.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_contracts_hold(tree):
    done = check(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "planted"),
    [
        # Between packages, between files, and one that only types know.
        ("kvtier/retention/shares/base.py", "from kvtier.heads import profile"),
        ("kvtier_sglang/pool/kv_pool.py", "from kvtier_sglang.pool import allocator"),
        ("kvtier_tierd/stores/base.py", "if False:\n    from kvtier_tierd.service import service"),
    ],
)
def test_a_planted_circle_is_found(tree, path, planted):
    source = (tree / path).read_text()
    (tree / path).write_text(f"{source}\n{planted}\n")
    done = check(tree)
    assert done.returncode != 0
    assert "No circles, of files or of packages BROKEN" in done.stdout
