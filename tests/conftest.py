"""The environment that every test finds, and every process that it starts."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

# Tests run side by side, and CPU kernels with more threads than cores are far slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the tests may reach out for models.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import hypothesis
import pytest
import torch
from forking import faster_interpreter
from thorough import THOROUGH, TURN

# No deadlines: how long an example takes says more about what else the machine does than about what
# is tested.
hypothesis.settings.register_profile("kvtier", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("thorough" if THOROUGH else "kvtier")

if not torch.cuda.is_available():
    # Triton decides when it is imported. Without a GPU its kernels are tested in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    faster_interpreter.when_imported()


class EndsAtOnce:
    """Side by side, tests would otherwise all run before a file that cannot be imported is told."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            pytest.exit(f"{report.nodeid}\n{report.longreprtext}", pytest.ExitCode.INTERRUPTED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A third of the files with slow tests has its turn. Files that take long come first, so that
    no process has one left when the others are done."""
    if TURN is not None:
        slow = sorted({item.path for item in items if item.get_closest_marker("slow")})
        waits = {path for number, path in enumerate(slow) if number % 3 != TURN}
        left = {x for x in items if x.path in waits and x.get_closest_marker("slow")}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    slowest = {"slow": 0, "engine": 1}
    of_file: dict[Path, int] = {}
    for item in items:
        here = min((slowest.get(mark.name, 2) for mark in item.iter_markers()), default=2)
        of_file[item.path] = min(here, of_file.get(item.path, 2))
    items.sort(key=lambda item: of_file[item.path])


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("numprocesses", None) and not is_worker:
        config.pluginmanager.register(EndsAtOnce())


# Processes that tests start run this first: see tests/forking.
FORKING = str(Path(__file__).parent / "forking")
if FORKING not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [FORKING, os.environ.get("PYTHONPATH")])
    )
# Fork servers end when the process of the tests that came first has ended.
if sys.platform == "linux" and "TESTS_PROCESS" not in os.environ:
    os.environ["TESTS_PROCESS"] = str(os.getpid())
    os.environ["TESTS_FORK_SERVERS"] = tempfile.mkdtemp(prefix="kvtier-tests-")
    # Calibrations are here by default: a user's own must change no test.
    os.environ["XDG_DATA_HOME"] = os.environ["TESTS_FORK_SERVERS"]


def pytest_unconfigure() -> None:
    if os.environ.get("TESTS_PROCESS") == str(os.getpid()):
        shutil.rmtree(os.environ["TESTS_FORK_SERVERS"], ignore_errors=True)
