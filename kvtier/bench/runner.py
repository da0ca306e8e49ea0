"""Runs plans in worker processes, one after the other, and never leaves one behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kvtier.bench.options import LOCAL_TIER as LOCAL_TIER
from kvtier.bench.progress import Progress, following
from kvtier.bench.replay.schema import ReplayResult
from kvtier.bench.schema import EngineRun, Plan, Replay, RunFailure, RunResult
from kvtier.config import ENV_PREFIX
from kvtier.errors import StartupError

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "kvtier.bench.worker")
# A scheduler that fails has its traceback above what its watchdogs say.
LOG_TAIL_LINES = 80
TIER_VARIABLE = ENV_PREFIX + "TIER"
STOP_GRACE_S = 5.0
# These lines are what SGLang says of every batch, which is no reason of a failure.
ROUTINE = re.compile(r"(Prefill|Decode) batch")


def run_worker(plan: Plan, progress: Progress) -> EngineRun | RunFailure:
    """Run one plan to its end. The worker and all its children are gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        asked, result, log = (Path(name, one) for one in ("plan.json", "result.json", "log"))
        asked.write_text(plan.model_dump_json())
        environment = worker_environment(os.environ, plan, Path(name))
        read_end, write_end = os.pipe()
        command = [*WORKER_COMMAND, str(asked), str(result), str(write_end)]
        with (
            os.fdopen(read_end) as events,
            os.fdopen(write_end, "wb") as theirs,
            local_tier(environment, Path(name, "tier.log")) as tier,
            log.open("wb") as said,
            running(
                command, env=environment | tier, stdout=said, stderr=said, pass_fds=(write_end,)
            ) as process,
            following(log, lambda tokens: progress.prefilled(plan, tokens)),
        ):
            theirs.close()
            for line in events:
                progress.event(plan, json.loads(line))
            exit_code = process.wait()
        if exit_code == 0 and result.is_file():
            kind = ReplayResult if isinstance(plan.workload, Replay) else RunResult
            return kind.model_validate_json(result.read_text())
        return RunFailure(policy=plan.policy, exit_code=exit_code, log_tail=_tail(log))


def worker_environment(parent: Mapping[str, str], plan: Plan, folder: Path) -> dict[str, str]:
    """The parent's environment with the plan's settings and no other KVTIER_* variable.

    An empty configuration file in the folder keeps a kvtier.toml of the working directory out as
    well: the parent has already applied it.
    """
    config, profile = folder / "kvtier.toml", folder / "head_profile.json"
    config.touch()
    environment = {k: v for k, v in parent.items() if not k.startswith(ENV_PREFIX)}
    environment |= plan.environment
    environment[ENV_PREFIX + "CONFIG"] = str(config)
    if plan.head_profile is not None:
        plan.head_profile.save(profile)
        environment[ENV_PREFIX + "HEAD_PROFILE"] = str(profile)
    return environment


@contextmanager
def local_tier(environment: Mapping[str, str], log: Path) -> Iterator[dict[str, str]]:
    """A tier service of the run's own where the settings ask for a `local` one.

    Yields what replaces it in the environment. Raises StartupError when the service does not start.
    """
    if environment.get(TIER_VARIABLE) != LOCAL_TIER:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-tier-") as folder, log.open("wb") as stream:
        # A socket, because a port would be open to every user of the machine.
        address = f"unix:{folder}/tier.sock"
        command = [sys.executable, "-m", "kvtier_tierd", "--listen", address]
        with running(command, stdout=subprocess.PIPE, stderr=stream) as process:
            assert process.stdout is not None
            with process.stdout as lines:
                if not lines.readline():
                    raise StartupError("the local tier did not start: " + " ".join(_tail(log)))
                yield {TIER_VARIABLE: address}


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, all of which is stopped when the block is left."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
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
