"""The jobs of an installed wheel, built from the source distribution: the main ones run in an empty
folder with no checkout in sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_server import ask, free_port, metric, running, wait_until_healthy
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import load_curve

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvtier", "kvtier_kernels", "kvtier_sglang", "kvtier_tierd")


class Installed:
    """A wheel in an environment of its own, which has what the tests' environment has but for the
    checkout: a line of a .pth file adds a folder to sys.path, and reads none of its .pth files."""

    def __init__(self, folder: Path) -> None:
        wheels, self.prefix = folder / "wheels", folder / "venv"
        self.empty = folder / "empty"
        self.empty.mkdir()
        source = build(folder / "source", "sdist")
        self._pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
        (self.wheel,) = wheels.iterdir()
        venv.create(self.prefix, symlinks=True)
        (site,) = self.prefix.glob("lib/python*/site-packages")
        (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.python = str(self.prefix / "bin" / "python")
        # Never uninstalls: what the tests run by stays as it is.
        wanted = ("install", "--no-index", "--ignore-installed", str(self.wheel))
        self._pip("--python", self.python, *wanted)
        # The checkout gives it forked commands alone: see tests/forking.
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT / "tests" / "forking"),
            "KVTIER_DATA_DIR": str(folder / "data"),
            # Compiling the planner's loop would take most of a minute, for three requests.
            "NUMBA_DISABLE_JIT": "1",
        }

    def _pip(self, *words: str) -> None:
        options = ("--quiet", "--no-deps", "--disable-pip-version-check")
        at = words.index("install") if "install" in words else 0
        command = [*words[: at + 1], *options, *words[at + 1 :]]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def run(self, *words: str) -> str:
        """Return what a command prints: `python …` or one of the programs that the wheel brings."""
        done = subprocess.run(
            self._found(words),
            env=self.environment,
            cwd=self.empty,
            capture_output=True,
            text=True,
            timeout=SAFETY_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A command that goes on, and its log."""
        log = self.empty.with_name(f"{words[1]}.log")
        found = self._found(words)
        with running(found, log, env=self.environment, cwd=self.empty) as process:
            yield process, log

    def _found(self, words: tuple[str, ...]) -> list[str]:
        return [str(self.prefix / "bin" / words[0]), *words[1:]]


def build(folder: Path, target: str) -> Path:
    """Return a distribution of the checkout: the one file that hatchling, as `make build`, puts
    into a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def model(installed: Installed) -> str:
    return installed.run("python", "-m", "kvtier.demo_model").strip()


def test_the_source_distribution_builds_the_wheel_that_the_checkout_builds(installed, tmp_path):
    def files(wheel: Path) -> dict[str, int]:
        with zipfile.ZipFile(wheel) as opened:
            return {one.filename: one.CRC for one in opened.infolist()}

    of_checkout = files(build(tmp_path / "wheel", "wheel"))
    assert files(installed.wheel) == of_checkout
    assert {name for name in of_checkout if name.endswith("py.typed")} == {
        f"{name}/py.typed" for name in PACKAGES
    }


def test_everything_is_the_wheels_own_and_the_demo_model_is_in_it(installed, model):
    names = ", ".join(PACKAGES)
    files = f"[one.__file__ for one in ({names})]"
    script = f"import json, sys, {names}; print(json.dumps([{files}, sys.path]))"
    origins, path = json.loads(installed.run("python", "-c", script))
    for one in (*origins, model):
        assert Path(one).is_relative_to(installed.prefix)
    assert not {ROOT, *(ROOT / name for name in ("kernels", "sglang_patches", "services"))} & {
        Path(one) for one in path
    }
    there = {one.name for one in Path(model).iterdir()}
    assert there == {one.name for one in (ROOT / "models" / "kvtier-demo").iterdir()}


def test_the_bench_runs_and_recalls(installed):
    out = installed.empty.with_name("bench.json")
    sizes = ("--len", "512", "--turns", "1", "--questions", "2", "--policies", "kvtier")
    installed.run("python", "-m", "kvtier.bench", *sizes, "--json", str(out), "-q")
    (run,) = json.loads(out.read_text())["runs"]
    assert run["summary"]["recall"] == 1


def test_a_fleet_is_planned(installed):
    traffic = ("--sessions", "3", "--context-tokens", "4000", "--policies", "kvtier")
    printed = installed.run("kvtier", "plan", "-q", *traffic, "--replicas", "1")
    assert "meets the SLO" in printed


def test_a_curve_is_fitted(installed, model):
    """The curve uses the heads that the wheel has found: finding them again takes longest."""
    out, profile = installed.empty.with_name("calibration"), f"{model}/head_profile.json"
    sizes = ("--len", "512", "--contexts", "2", "--no-store", "-q", "--out", str(out))
    curve = ("calibrate", "curve", "--model-path", model, "--head-profile", profile)
    installed.run("kvtier", *curve, *sizes)
    assert load_curve(out / "curve.json").model == "kvtier-demo"


def test_a_server_answers_and_its_tier_has_the_turn(installed, model):
    port, metrics = free_port(), free_port()
    # Short, because a socket's path may not be long.
    with tempfile.TemporaryDirectory(prefix="kvw") as runtime:
        address = f"unix:{runtime}/tier.sock"
        tier = ("tier", "--listen", address, "--memory", "64m", "--metrics-port", str(metrics))
        serve = ("serve", "--model-path", model, "--dtype", "float32", "--tier", address)
        rest = ("--port", str(port), "--max-total-tokens", "8000")
        with (
            installed.running("kvtier", *tier),
            installed.running("python", "-m", "kvtier", *serve, *rest) as (server, log),
        ):
            wait_until_healthy(f"http://127.0.0.1:{port}", server, log)
            sampling = {"max_new_tokens": 4, "temperature": 0}
            body = {"input_ids": [6 + i % 300 for i in range(600)], "sampling_params": sampling}
            _, text = ask(f"http://127.0.0.1:{port}/generate", body)
            assert len(json.loads(text)["output_ids"]) == 4
            wait_for(lambda: metric(metrics, "kvtier_tier_blobs") > 0, "nothing reached the tier")
