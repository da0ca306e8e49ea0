"""Contracts of the code's own shape: those of imports and of the language, which `make lint`
checks, and one about time in tests. All of them find what is planted to break them.
"""

import ast
import re
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


# Circles between packages, between files, and one that only types know: a file, what it is given to
# import, and the dependency that closes the circle.
CIRCLES = [
    ("kvtier/retention/shares/base.py", "from kvtier.heads import profile", ".retention -> .heads"),
    (
        "kvtier_sglang/pool/kv_pool.py",
        "from kvtier_sglang.pool import allocator",
        ".kv_pool -> .allocator",
    ),
    (
        "kvtier_tierd/stores/base.py",
        "if False:\n    from kvtier_tierd.service import service",
        ".stores -> .service",
    ),
]


def test_planted_circles_are_found(tmp_path):
    """`make lint` says that there are none."""
    for package, folder in PACKAGES.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, planted, _ in CIRCLES:
        source = (tmp_path / path).read_text()
        (tmp_path / path).write_text(f"{source}\n{planted}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "No circles, of files or of packages BROKEN" in done.stdout
    for _, _, closing in CIRCLES:
        assert f"- {closing} (1 import)" in done.stdout


LANGUAGE = '''"""Where entries go."""
def go():
    """Return where entries go. Of a head there are some."""
    # Of a head there are some,
    # As many as it keeps.
    return 1  # of all
class Process:
    "Of one process."
    tasks = "Of one process."
    # The tasks
    # Of one process.
'''


def test_a_planted_fragment_is_found(tmp_path):
    (tmp_path / "planted.py").write_text(LANGUAGE)
    ast_grep, rules = Path(sys.executable).with_name("ast-grep"), ROOT / "ast-grep.yml"
    command = [str(ast_grep), "scan", "--rule", str(rules), "--report-style", "short"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.findall(r"planted\.py:(\d+):.*names-its-subject", done.stdout) == ["1", "4", "8"]


# No test measures time, and none waits for it to pass: see tests/waiting.py.
WAITING = "tests/waiting.py"
CLOCKS = re.compile(r"(monotonic|perf_counter|process_time|thread_time|time)(_ns)?")
# `be_slow` is there for these: how slow they are decides no test.
SLOW_ON_PURPOSE = {
    "tests/engine/fuzz_runner.py": "a client that takes breath between its requests",
    "tests/engine/ranks/faulty_ranks.py": "a rank whose tier answers late",
    "tests/tier/test_lanes.py": "a job that still runs when another fails",
}


def about_time(source: str) -> list[str]:
    """Return what of a test sleeps, sets a timer or reads a clock, line by line. To let an event
    loop turn (a sleep of the number 0) takes no time; a sleep in a script is one, too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args):
                turns = [getattr(one, "value", None) for one in args] == [0]
                of_a_loop = name == "time" and isinstance(node.func, ast.Attribute) and not args
                if (name == "sleep" and not turns) or name == "Timer" or of_a_loop:
                    found.append(f"{node.lineno}: {name}")
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if CLOCKS.fullmatch(name):
                found.append(f"{node.lineno}: {name}")
            case ast.ImportFrom(module="time", names=names):
                found += [f"{node.lineno}: {one.name}" for one in names]
            case ast.Constant(value=str(text)) if re.search(r"\bsleep\(\d", text):
                found.append(f"{node.lineno}: sleep in a script")
    return found


def test_no_test_measures_time_or_waits_for_it_to_pass():
    found, slow = {}, set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        own = str(path.relative_to(ROOT))
        if own == WAITING:
            continue
        source = path.read_text()
        if lines := about_time(source):
            found[own] = lines
        if re.search(r"import .*\bbe_slow(_async)?\b", source):
            slow.add(own)
    assert found == {}
    assert slow == SLOW_ON_PURPOSE.keys()


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("time.{}(1)", ["1: sleep"]),
        ("async def f():\n    await asyncio.{}(0.01)", ["2: sleep"]),
        ("async def f():\n    await asyncio.{}(0)", []),
        ("began = time.monotonic()", ["1: monotonic"]),
        ("assert clock() < 3\nclock = time.perf_counter", ["2: perf_counter"]),
        ("asyncio.get_running_loop().time()", ["1: time"]),
        ("from time import monotonic", ["1: monotonic"]),
        ("threading.Timer(1.0, f).start()", ["1: Timer"]),
        ("SCRIPT = 'import time; time.{}(600)'", ["1: sleep in a script"]),
        ("clock.monotonic(), clock.now, one.time, took_s", []),
    ],
)
def test_a_planted_sleep_or_clock_is_found(planted, found):
    assert about_time(planted.format("sleep")) == found
