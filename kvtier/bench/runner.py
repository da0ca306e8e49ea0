"""Runs plans in worker processes, one after the other, and never leaves one behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kvtier.bench.options import LOCAL_TIER as LOCAL_TIER
from kvtier.bench.progress.display import Progress
from kvtier.bench.progress.prefill_log import ROUTINE, following
from kvtier.bench.replay.schema import ReplayResult
from kvtier.bench.schema import EngineRun, Plan, Replay, RunFailure, RunResult
from kvtier.config import ENV_PREFIX
from kvtier.errors import StartupError

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "kvtier.bench.worker")
# A scheduler that fails has its traceback above what its watchdogs say.
LOG_TAIL_LINES = 80
TIER_VARIABLE = ENV_PREFIX + "TIER"
STOP_GRACE_S = 5.0


def run_worker(plan: Plan, progress: Progress) -> EngineRun | RunFailure:
    """Run one plan to its end. The worker and all its children are gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        files = _Files(Path(folder))
        files.plan.write_text(plan.model_dump_json())
        files.config.touch()
        environment = worker_environment(os.environ, plan, files)
        with local_tier(environment, files.tier_log) as tier:
            return _run_worker(plan, progress, files, environment | tier)


def _run_worker(
    plan: Plan, progress: Progress, files: _Files, environment: dict[str, str]
) -> EngineRun | RunFailure:
    read_end, write_end = os.pipe()
    with files.log.open("wb") as log, os.fdopen(read_end) as events:
        command = [*WORKER_COMMAND, str(files.plan), str(files.result), str(write_end)]
        with (
            _process(command, environment, log.fileno(), write_end) as process,
            following(files.log, lambda tokens: progress.prefilled(plan, tokens)),
        ):
            for line in events:
                progress.event(plan, json.loads(line))
            exit_code = process.wait()
    if exit_code == 0 and files.result.is_file():
        kind = ReplayResult if isinstance(plan.workload, Replay) else RunResult
        return kind.model_validate_json(files.result.read_text())
    return RunFailure(policy=plan.policy, exit_code=exit_code, log_tail=_tail(files.log))


class _Files:
    """The files of a run in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.plan = folder / "plan.json"
        self.result = folder / "result.json"
        self.log = folder / "worker.log"
        self.profile = folder / "head_profile.json"
        self.config = folder / "kvtier.toml"
        self.tier_log = folder / "tier.log"


def worker_environment(parent: Mapping[str, str], plan: Plan, files: _Files) -> dict[str, str]:
    """The parent's environment with the plan's settings and no other KVTIER_* variable.

    An empty configuration file keeps a kvtier.toml of the working directory out as well: the
    parent has already applied it.
    """
    environment = {k: v for k, v in parent.items() if not k.startswith(ENV_PREFIX)}
    environment |= plan.environment
    environment[ENV_PREFIX + "CONFIG"] = str(files.config)
    if plan.head_profile is not None:
        plan.head_profile.save(files.profile)
        environment[ENV_PREFIX + "HEAD_PROFILE"] = str(files.profile)
    return environment


@contextmanager
def local_tier(environment: Mapping[str, str], log: Path) -> Iterator[dict[str, str]]:
    """A tier service of the run's own where the settings ask for a `local` one.

    Yields what replaces it in the environment. Raises StartupError when the service does not start.
    """
    if environment.get(TIER_VARIABLE) != LOCAL_TIER:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-tier-") as folder:
        # A socket, because a port would be open to every user of the machine.
        address = f"unix:{folder}/tier.sock"
        with _tier_process(address, environment, log):
            yield {TIER_VARIABLE: address}


@contextmanager
def _tier_process(address: str, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """A tier service that listens at the address. Raises StartupError when it does not start."""
    command = [sys.executable, "-m", "kvtier_tierd", "--listen", address]
    if environment.get("KVTIER_REFRESH_BY") == "near-data":
        command += ["--refresh-workers", "1"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        with process.stdout as lines:
            said = lines.readline()
            if not said:
                raise StartupError("the local tier did not start: " + " ".join(_tail(log)))
            yield
    finally:
        stop_group(process)


@contextmanager
def _process(
    command: list[str], environment: dict[str, str], log: int, write_end: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The worker in its own process group, which is killed when the block is left."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(write_end,),
        start_new_session=True,
    )
    os.close(write_end)
    try:
        yield process
    finally:
        stop_group(process)


def stop_group(process: subprocess.Popen[Any]) -> None:
    """Stop a process and everything it started: politely, then not."""
    for sign, patience_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, None)):
        try:
            if process.poll() is None:
                os.killpg(process.pid, sign)
            process.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever the worker left in its group


def _tail(log: Path) -> tuple[str, ...]:
    lines = log.read_text(errors="replace").splitlines()
    telling = [line for line in lines if line.strip() and not ROUTINE.search(line)]
    return tuple(telling[-LOG_TAIL_LINES:])


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside the block, so that the same clean-up runs."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
