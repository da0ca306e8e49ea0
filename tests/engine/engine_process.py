"""Starting engine processes from tests: isolated, and killed with their children; forked from one
that has SGLang imported (tests/forking)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import SAFETY_S

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "models" / "kvtier-demo"
RUNNER = Path(__file__).with_name("engine_runner.py")

# An engine runs as a user would start it, whatever the tests' own processes want; and what one test
# leaves in the environment later reaches no engine of another.
CLEAN_ENVIRONMENT = {
    k: v for k, v in os.environ.items() if not k.startswith("KVTIER_") and k != "TRITON_INTERPRET"
}
# A tier that answers is waited for, however fast computing would be.
PATIENT = {"KVTIER_TIER_TIMEOUT_S": "60", "KVTIER_TIER_PATIENCE_S": f"{SAFETY_S}"}


def run_script(
    script: Path, folder: Path, plan: dict[str, Any], env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run `script plan.json out.json` in a process of its own and return what it wrote."""
    plan_path, out_path = folder / "plan.json", folder / "out.json"
    plan_path.write_text(json.dumps(plan))
    environment = {**CLEAN_ENVIRONMENT, **PATIENT, "KVTIER_DATA_DIR": str(folder), **(env or {})}
    log = folder / "script.log"
    command = [sys.executable, str(script), str(plan_path), str(out_path)]
    with log.open("wb") as stream:
        code = subprocess.run(
            command, env=environment, stdout=stream, stderr=stream, timeout=SAFETY_S, check=False
        ).returncode
    assert code == 0, log.read_text(errors="replace")[-4000:]
    return json.loads(out_path.read_text())


def run_engine(
    folder: Path,
    engine: dict[str, Any],
    rounds: list[list[dict[str, Any]]],
    env: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """See engine_runner.py. environment: SGLang's variables, also those that it reads when it is
    imported."""
    plan = {"engine": engine, "rounds": rounds, "environment": environment}
    return run_script(RUNNER, folder, plan, env)


def with_aborts(rounds: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same rounds, with three requests more in each that are aborted while they are answered.
    The seed is one of those by which none begins like a session."""
    rng = random.Random(14)

    def aborted() -> dict[str, Any]:
        ids = [rng.randrange(6, 384) for _ in range(rng.randrange(2, 300))]
        return {"input_ids": ids, "max_new_tokens": 200, "abort_after": rng.randrange(1, 6)}

    return [[*requests, aborted(), aborted(), aborted()] for requests in rounds]


def retractions(out: dict[str, Any]) -> int:
    """Return the retractions of all requests of a run together."""
    return sum(request["retractions"] for requests in out["rounds"] for request in requests)
