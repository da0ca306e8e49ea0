"""A module of ours in a process of its own that does what it is told, a line at a time.

    with running_module("benchmarks.x", [job], environment, log) as remote:
        remote.tell("sing", song=3)      {"do": "sing", "song": 3} to it, an object back

The process is `python -m benchmarks.x JOB READ_FD WRITE_FD`, in a group of its own, and all of it
is gone when the block ends. Once it has written an answer it has nothing to do until the next
line, so that several can be told in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.common.benchmark import ROOT
from kvtier.bench.runner import stop_group
from kvtier.config import ENV_PREFIX
from kvtier.errors import KvtierError

LOG_TAIL_LINES = 20
LAST_WORDS_S = 10.0  # to end in, for a worker that answers no more: its traceback comes last


class WorkerError(KvtierError):
    """A worker that did not finish; the message ends with its last log lines."""

    def __init__(self, log: Path) -> None:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        super().__init__("the worker failed:\n" + "\n".join(tail))


class Remote:
    """One running module."""

    def __init__(
        self, process: subprocess.Popen[bytes], writes: IO[str], reads: IO[str], log: Path
    ) -> None:
        self._process, self._writes, self._reads, self._log = process, writes, reads, log

    def tell(self, do: str, **more: Any) -> dict[str, Any]:
        """Say something and wait for the answer. Raises WorkerError where none comes."""
        try:
            print(json.dumps({"do": do, **more}), file=self._writes, flush=True)
            line = self._reads.readline()
        except BrokenPipeError:
            # The command that broke the pipe must not be sent again by closing.
            with suppress(BrokenPipeError):
                self._writes.close()
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_S)
            raise WorkerError(self._log)
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running_module(
    module: str, files: Sequence[Path], environment: Mapping[str, str], log: Path
) -> Iterator[Remote]:
    """See the module docstring. log: gets what the process says on stdout and stderr."""
    their_reads, our_writes = os.pipe()
    our_reads, their_writes = os.pipe()
    descriptors = (their_reads, their_writes)
    with os.fdopen(our_writes, "w") as writes, os.fdopen(our_reads) as reads:
        try:
            process = _start(module, [*files, *descriptors], environment, log, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            yield Remote(process, writes, reads, log)
        finally:
            stop_group(process)


def run_module(
    module: str,
    files: Sequence[Path],
    environment: Mapping[str, str],
    log: Path,
    limit_s: float | None = None,
) -> None:
    """`python -m module files…` in a process group of its own, to its end or until `limit_s` have
    passed, which the log says then.

    Raises WorkerError where that is not a good end.
    """
    process = _start(module, files, environment, log)
    exit_code, late = None, ""
    try:
        exit_code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        late = f"\nstopped after {limit_s:g} s\n"
    finally:
        stop_group(process)
    with log.open("a") as stream:
        stream.write(late)
    if exit_code != 0:
        raise WorkerError(log)


def clean_environment() -> dict[str, str]:
    """This process's environment without KVTIER_* variables: what a worker starts from."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _start(
    module: str,
    arguments: Sequence[Path | int],
    environment: Mapping[str, str],
    log: Path,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            pass_fds=descriptors,
            start_new_session=True,
        )


@contextmanager
def parents_lines(descriptors: Sequence[str]) -> Iterator[tuple[IO[str], IO[str]]]:
    """The worker's side: what its parent says, and where answers go. descriptors: READ_FD and
    WRITE_FD, which the worker's own children do not get."""
    numbers = [int(one) for one in descriptors]
    for number in numbers:
        os.set_inheritable(number, False)
    with os.fdopen(numbers[0]) as reads, os.fdopen(numbers[1], "w") as writes:
        yield reads, writes


__all__ = [
    "Remote",
    "WorkerError",
    "clean_environment",
    "parents_lines",
    "run_module",
    "running_module",
]
