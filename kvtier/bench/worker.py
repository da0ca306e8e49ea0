"""One policy in its own process: reads a plan, writes a result.

    python -m kvtier.bench.worker PLAN.json RESULT.json [EVENTS_FD]

A process per policy, because an engine takes its settings from the environment and leaves
nothing behind that way. Progress goes as JSON lines to the file descriptor EVENTS_FD.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.bench.engine import EngineFactory, SglangEngine
from kvtier.bench.measure import Emit, run_plan
from kvtier.bench.replay.measure import replay_plan
from kvtier.bench.schema import EngineRun, Plan, Replay


def event_writer(descriptor: int | None) -> Emit:
    """A function that sends one event to the parent, or nowhere."""
    if descriptor is None:
        return lambda event: None
    os.set_inheritable(descriptor, False)  # or a surviving engine process would keep it open
    stream = os.fdopen(descriptor, "w", buffering=1)
    return lambda event: print(json.dumps(event), file=stream, flush=True)


def die_with_parent() -> None:
    """Have the kernel kill this process if the bench is killed, so that no engine outlives it."""
    if sys.platform == "linux":
        import ctypes
        import signal

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def open_sglang(plan: Plan) -> SglangEngine:
    """Start the engine of a plan."""
    return SglangEngine(plan.engine_args)


def main(argv: Sequence[str], open_engine: EngineFactory = open_sglang) -> int:
    """Run the plan named by `argv`."""
    plan = Plan.model_validate_json(Path(argv[0]).read_text())
    emit = event_writer(int(argv[2]) if len(argv) > 2 else None)
    die_with_parent()
    replays = isinstance(plan.workload, Replay)
    run: Callable[..., EngineRun] = replay_plan if replays else run_plan
    result = run(plan, open_engine, emit)
    Path(argv[1]).write_text(result.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
