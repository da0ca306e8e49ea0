"""docs/extending.md, followed to the letter: what it says to write is like what is there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


@dataclass(frozen=True)
class Example:
    """What a section of the page says to write, and what holds it to its contract.

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
        registry = path.with_name("__init__.py")
        name = re.search(r"^class (\w+)", code, re.MULTILINE)[1]
        assert f"add `{name}` to the tuple in `{registry}`" in self.text()
        content = (tree / registry).read_text()
        line = f"from {'.'.join(path.with_suffix('').parts)} import {name}\n"
        content = content.replace("\nfrom kvtier.", f"\n{line}from kvtier.", 1)
        (tree / registry).write_text(content.replace(" in (\n", f" in (\n        {name},\n", 1))


EXAMPLES = [
    Example("A token scorer", "key-norm", "tests/retention/test_scorers.py"),
    Example("A share rule", "square-root", "tests/retention/test_shares.py"),
    Example("A head method", "attention-mass", "tests/heads/test_head_methods.py"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the core with the examples and their lines in the registries."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvtier", tree / "kvtier", ignore=ignored)
    for example in EXAMPLES:
        example.write(tree)
    return tree


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    others = os.pathsep.join(str(ROOT / name) for name in ("kernels", "services"))
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{others}"}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_does_what_all_of_its_kind_must(tree, example):
    tests = str(ROOT / example.tests)
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", example.name, tests)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 10


def test_settings_commands_and_tables_know_the_examples(tree):
    code = """
import sys
sys.path.insert(0, "DOCS")
import hooks
from kvtier.config import load_settings
from kvtier.retention.rules import scorer_of
from kvtier.retention.shares import asked_share
print(scorer_of(load_settings(scorer="key-norm")))
print(asked_share(load_settings(share_rule="square-root=64")))
for table in (hooks.scorers_table, hooks.share_rules_table, hooks.head_methods_table):
    print(table())
"""
    done = run(tree, "-c", code.replace("DOCS", str(PAGE.parent)))
    assert done.returncode == 0, done.stderr
    assert "KeyNorm(pool_width=1)" in done.stdout
    assert "SquareRoot'>, number=64.0)" in done.stdout
    assert "| `key-norm` | Key norm: tokens whose keys are short stay" in done.stdout
    assert "| `square-root` | Square root: a prompt of n tokens keeps" in done.stdout
    assert "| `attention-mass` | Attention mass: the heads that attend most" in done.stdout
    helped = run(tree, "-m", "kvtier", "calibrate", "heads", "--help").stdout
    assert "--answer-tokens N" in helped
    assert "attention-mass" in helped
