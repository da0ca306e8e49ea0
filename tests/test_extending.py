"""docs/extending.md, followed to the letter: what it says to write is a scorer or a kernel backend
like any other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


def example() -> tuple[str, str]:
    """The file that the page tells its reader to write, and what is in it."""
    text = PAGE.read_text()
    path = re.search(r"Write `([^`]+)`:", text)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert path is not None, "the page names no file"
    assert code is not None, "the page has no example"
    return path[1], code[1]


@pytest.fixture
def tree(tmp_path):
    """A copy of the core with the example and its line in the registry."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvtier", tmp_path / "kvtier", ignore=ignored)
    path, code = example()
    (tmp_path / path).write_text(code)
    registry = tmp_path / path
    registry = registry.with_name("__init__.py")
    name = re.search(r"^class (\w+)", code, re.MULTILINE)[1]
    text = registry.read_text()
    text = text.replace("    for scorer in (\n", f"    for scorer in (\n        {name},\n")
    module = Path(path).stem
    line = f"from kvtier.retention.scorers.{module} import {name}\n"
    registry.write_text(text.replace("\nSCORERS", f"{line}\nSCORERS", 1))
    return tmp_path


BACKEND = """
from kvtier_kernels.reference_backend.kernels import ReferenceKernels

class Mine(ReferenceKernels):
    name = "mine"

def make_kernels():
    return Mine()
"""


@pytest.fixture
def kernels_tree(tmp_path):
    """A copy of the kernels with a backend in one file, and the page's line in the registry."""
    package = tmp_path / "kernels" / "kvtier_kernels"
    shutil.copytree(
        ROOT / "kernels" / "kvtier_kernels", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    line = re.search(r'```python\n( +"mine": "kvtier_kernels\.(\w+):.*\n)```', PAGE.read_text())
    assert line is not None, "the page has no line for the registry"
    (package / f"{line[2]}.py").write_text(BACKEND)
    registry = package / "registry.py"
    begin = "BACKENDS: dict[str, str] = {\n"
    text = registry.read_text()
    assert begin in text
    registry.write_text(text.replace(begin, begin + line[1]))
    return tmp_path


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    others = [tree, tree / "kernels", *(ROOT / name for name in ("kernels", "services"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, others))}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_example_does_what_every_scorer_must(tree):
    tests = ROOT / "tests" / "retention" / "test_scorers.py"
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "key-norm", str(tests))
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 10


def test_settings_and_the_table_know_the_example(tree):
    code = """
import sys
sys.path.insert(0, "DOCS")
import hooks
from kvtier.config import load_settings
from kvtier.retention.rules import scorer_of
print(scorer_of(load_settings(scorer="key-norm")))
print(hooks.scorers_table())
"""
    done = run(tree, "-c", code.replace("DOCS", str(PAGE.parent)))
    assert done.returncode == 0, done.stderr
    assert "KeyNorm(pool_width=1)" in done.stdout
    assert "| `key-norm` | Key norm: tokens whose keys are short stay" in done.stdout


def test_a_kernel_backend_is_one_file_and_its_line(kernels_tree):
    tests = ROOT / "tests" / "kernels" / "test_registry.py"
    done = run(
        kernels_tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mine", str(tests)
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
