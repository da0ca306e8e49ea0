"""A process that has SGLang imported, and forks the processes that tests run engines in.

    pytest ── zygote (imports once) ─┬─ fork: a script ── fork: scheduler, detokenizer
                                     └─ fork: the next script ── …

Importing SGLang takes ten seconds of CPU, which is most of what an engine costs a test. An engine's
own processes are forked, too (tests/forking), and all else is as it is for users. There is one for
each environment that decides what is imported (Triton, PYTHONPATH, SGLang's own variables).
Whatever tests start as a command is started afresh.

As a program it reads one job per line from stdin, {"script", "arguments", "environment", "log",
"timeout_s"}, and answers each with the exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 900.0
# Variables that may differ from the zygote's own, as they decide nothing about what is imported;
# but for one of ours, which chooses SGLang's platform.
HARMLESS = ("KVTIER_", "PYTEST_")
PLATFORM = "KVTIER_FORCE_CPU"


class Zygote:
    """A process that imports SGLang under `environment`, started when it is first needed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment = environment

    def run(
        self, script: Path, arguments: list[str], environment: dict[str, str], log: Path
    ) -> int:
        """Run a script as a process of its own; its output goes to `log`. Returns the exit code."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
            atexit.register(self.close)
        job = {
            "script": str(script),
            "arguments": arguments,
            "environment": environment,
            "log": str(log),
            "timeout_s": TIMEOUT_S,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the zygote itself has ended; its output is above"
        return int(answer)

    def close(self) -> None:
        """End the zygote; what it runs has ended by then."""
        if self._process is not None:
            with self._process as process:
                assert process.stdin is not None
                process.stdin.close()
            self._process = None


class Zygotes:
    """Those of this process, each started when a script first needs it."""

    def __init__(self) -> None:
        self._by_environment: dict[frozenset[tuple[str, str]], Zygote] = {}

    def of(self, environment: dict[str, str]) -> Zygote:
        """The one that a script with this environment can be forked from."""
        imports_by = _imports_by(environment)
        key = frozenset(imports_by.items())
        return self._by_environment.setdefault(key, Zygote(imports_by))


def _imports_by(environment: dict[str, str]) -> dict[str, str]:
    """Variables that may decide what is imported, or how."""
    return {k: v for k, v in environment.items() if k == PLATFORM or not k.startswith(HARMLESS)}


def serve() -> None:
    """Import what engines need, then fork a process per job until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What is imported may print.
    os.dup2(2, 1)
    preload()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run_script(job)
        print(wait(child, job["timeout_s"]), file=answers)


def preload() -> None:
    import sglang
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    import kvtier_sglang.plugin  # noqa: F401


def wait(child: int, timeout_s: float) -> int:
    """The exit code of a child, whose group is gone then; one that takes too long is killed."""
    deadline = time.monotonic() + timeout_s
    pid, status = os.waitpid(child, os.WNOHANG)
    while not pid and time.monotonic() < deadline:
        time.sleep(0.05)
        pid, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not pid:
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def save_coverage() -> None:
    """Where it is measured, before a process ends that saves nothing at its end."""
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()):
        measured.save()


def run_script(job: dict[str, Any]) -> None:
    """In the forked process: become the script. Does not return."""
    code = 1
    try:
        os.setsid()
        with open(job["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(job["environment"])
        random.seed()
        sys.argv = [job["script"], *job["arguments"]]
        sys.path.insert(0, str(Path(job["script"]).parent))
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        save_coverage()
        os._exit(code)


if __name__ == "__main__":
    serve()
