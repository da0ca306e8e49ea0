"""docs/extending.md, followed to the letter: what it says to write is like what is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


@dataclass(frozen=True)
class Example:
    """The code that a section of the page says to write, and what holds it to its contract.

    heading:  of the section
    name:     what users choose the example by
    tests:    file of the contract, relative to the repository
    """

    heading: str
    name: str
    tests: str

    def text(self) -> str:
        return PAGE.read_text().split(f"## {self.heading}\n")[1].split("\n## ")[0]

    def written(self) -> tuple[Path, str]:
        """The file that the section tells its reader to write, and what is in it."""
        path = re.search(r"Write\s`([^`]+)`:", self.text())
        code = re.search(r"```python\n(.*?)```", self.text(), re.DOTALL)
        assert path is not None, f"{self.heading}: the section names no file"
        assert code is not None, f"{self.heading}: the section has no example"
        return Path(path[1]), code[1]

    def write(self, tree: Path) -> None:
        """The file and its line in the registry."""
        path, code = self.written()
        (tree / path).write_text(code)
        added = re.search(r"add `(\w+)` to the tuple in `([^`]+)`", self.text())
        assert added is not None, f"{self.heading}: the section names no registry"
        name, registry = added[1], tree / added[2]
        module = ".".join(path.with_suffix("").parts).removeprefix("services.")
        content = registry.read_text().replace(
            "\nfrom kvtier", f"\nfrom {module} import {name}\nfrom kvtier", 1
        )
        registry.write_text(content.replace(" in (\n", f" in (\n        {name},\n", 1))


EXAMPLES = [
    Example("A token scorer", "key-norm", "tests/retention/test_scorers.py"),
    Example("A share rule", "square-root", "tests/retention/test_shares.py"),
    Example("A head method", "question-mass", "tests/heads/methods/test_head_methods.py"),
    Example("A store", "heap", "tests/tierd/stores/test_store_registry.py"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the core and of the tier's service with the examples and their registry lines."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("kvtier", "services"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for example in EXAMPLES:
        example.write(tree)
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


def passed(tree: Path, names: Sequence[str], files: Sequence[str]) -> list[str]:
    """Return which of the files' tests that have one of the names in theirs passed; none failed."""
    command = ("-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "-k", " or ".join(names))
    done = run(tree, *command, *(str(ROOT / file) for file in files))
    assert done.returncode == 0, done.stdout
    return re.findall(r"^PASSED (.*)$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def passed_examples(tree):
    """Tests that passed, of all examples in one process, as most of its time goes into imports."""
    return passed(tree, [example.name for example in EXAMPLES], [e.tests for e in EXAMPLES])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_does_what_all_of_its_kind_must(passed_examples, example):
    own = [t for t in passed_examples if example.tests in t and example.name in t]
    assert len(own) >= 10


def test_settings_commands_and_tables_know_the_examples(tree):
    code = """
import sys
sys.path.insert(0, "DOCS")
import hooks
from kvtier.config import load_settings
from kvtier.retention.rules import scorer_of
from kvtier.retention.shares import configured_share
from kvtier_tierd.cli import parse
print(scorer_of(load_settings(scorer="key-norm")))
print(configured_share(load_settings(share_rule="square-root=64")))
print(parse(["--store", "heap", "--heap", "1g"]).store)
for table in (hooks.scorers_table, hooks.share_rules_table, hooks.head_methods_table,
              hooks.stores_table):
    print(table())
parse(["--help"])
"""
    done = run(tree, "-c", code.replace("DOCS", str(PAGE.parent)))
    assert done.returncode == 0, done.stderr
    assert "KeyNorm(pool_width=1)" in done.stdout
    assert "SquareRoot'>, number=64.0)" in done.stdout
    assert "HeapOptions(heap_bytes=1073741824)" in done.stdout
    assert "| `key-norm` | Key norm: tokens whose keys are short stay" in done.stdout
    assert "| `square-root` | Square root: a prompt of n tokens keeps" in done.stdout
    assert "| `question-mass` | Question mass: the heads that attend most" in done.stdout
    assert "| `heap` | each blob in memory of its own; the least recently used" in done.stdout
    assert "--heap BYTES" in done.stdout
    assert "of the heap store (4g)" in done.stdout
    helped = run(tree, "-m", "kvtier", "calibrate", "heads", "--help").stdout
    assert "--question-tokens N" in helped
    assert "question-mass" in helped


def test_a_kernel_backend_is_one_file_and_its_line(kernels_tree):
    assert len(passed(kernels_tree, ["mine"], ["tests/kernels/test_registry.py"])) == 1
