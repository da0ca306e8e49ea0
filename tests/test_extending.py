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


def example(section: str) -> tuple[str, str]:
    """The file that a section of the page tells its reader to write, and what is in it."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    path = re.search(r"Write\s`([^`]+)`:", text)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert path is not None, "the section names no file"
    assert code is not None, "the section has no example"
    return path[1], code[1]


def follow(section: str, tree: Path, registry: str, table: str) -> None:
    """Write a section's example into a copy of our packages, and its line into the registry.

    registry: the file; table: the dictionary in it, made of a tuple of classes.
    """
    path, code = example(section)
    (tree / path).write_text(code)
    name = re.findall(r"^class (\w+)", code, re.MULTILINE)[-1]
    module = path.removesuffix(".py").removeprefix("services/").replace("/", ".")
    before, after = (tree / registry).read_text().split(f"\n{table}", maxsplit=1)
    after = after.replace(" in (\n", f" in (\n        {name},\n", 1)
    imported = f"from {module} import {name}\n"
    (tree / registry).write_text(f"{before}{imported}\n{table}{after}")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the core and of the tier's service with the examples and their registry lines."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("kvtier", "services"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    follow("A token scorer", tree, "kvtier/retention/scorers/__init__.py", "SCORERS")
    follow("A store", tree, "services/kvtier_tierd/stores/registry.py", "STORES")
    return tree


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
    ours = [root / name for name in ("kernels", "services") for root in (tree, ROOT)]
    path = os.pathsep.join(map(str, (tree, *ours, ROOT)))
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def passed(tree: Path, tests: str, pattern: str) -> int:
    """How many of a file's tests that match the pattern passed; none failed."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", pattern)
    done = run(tree, *command, str(ROOT / tests))
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


def test_the_example_does_what_every_scorer_must(tree):
    assert passed(tree, "tests/retention/test_scorers.py", "key-norm") >= 10


def test_settings_and_the_table_know_the_scorer(tree):
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
    assert passed(kernels_tree, "tests/kernels/test_registry.py", "mine") == 1


def test_the_example_does_what_every_store_must(tree):
    assert passed(tree, "tests/tierd/test_store_registry.py", "heap") >= 25


def test_the_command_line_and_the_table_know_the_store(tree):
    code = """
import sys
sys.path.insert(0, "DOCS")
import hooks
from kvtier_tierd.cli import parse
print(parse(["--store", "heap", "--heap", "1g"]).store)
print(hooks.stores_table())
parse(["--help"])
"""
    done = run(tree, "-c", code.replace("DOCS", str(PAGE.parent)))
    assert done.returncode == 0, done.stderr
    assert "HeapOptions(heap_bytes=1073741824)" in done.stdout
    assert "| `heap` | each blob in memory of its own; the least recently used" in done.stdout
    assert "--heap BYTES" in done.stdout
    assert "of the heap store (4g)" in done.stdout
