"""Two engines and one tier under everything at once, their answers compared with stock SGLang's.

    python -m benchmarks.soak --minutes 60

Five real processes on one machine: engine A, which keeps everything; engine B, which compresses by
one rule after the other; their tier, on memory and disk; their Redis; and a reference, stock SGLang
without any cache. Clients hold sessions whose turns go to either engine, fork them, give requests
up, ask the same under other salts, extra keys and adapters. Meanwhile the tier and Redis are killed
and started again, engines get other weights and back, are emptied, and engine B is ended and
started by another rule. Device pools and tier are small: KV is evicted and restored all the time.

An answer is compared wherever it must come from exact KV, by its tokens and by their
log-probabilities (soak/check.py):

    everything kept      all answers of engine A, whichever engine stored what it restored
    computed whole       of B: nothing cached reaches behind a dropped span
    short                of B: contexts that locality heads keep whole, from the cache
    prompt logprobs      of B: they are computed behind nothing that is dropped
    exact fork           of B: it leaves a compressed context early enough; its exact prefix comes
                         from the tier, or is computed
    another rule's KV    of either: restored from the tier, where nothing of it was stored by this
                         engine's rule

What B says from compressed KV is not compared, but some of it is shown to the reference as well: it
tells what the comparison sees. Exit code 1 where a bar is not met.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL
from benchmarks.soak import faults as soak_faults
from benchmarks.soak import load as soak_load
from benchmarks.soak import run as soak_run
from benchmarks.soak.check import OFF, TIE
from benchmarks.soak.models import POLICIES, SPAN_TOKENS
from benchmarks.soak.report import make_bars, make_outcome, make_table
from kvtier.bench.runner import terminated_as_interrupted
from kvtier.bench.table import make_console
from kvtier.environment import describe_environment
from kvtier.errors import UsageError

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "soak.json"
MOST_GROWTH = 0.10


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when every bar is met, 1 when one is not or a process ended, 2 for bad
    input."""
    with terminated_as_interrupted():
        return run_command("soak", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language")
    add("--minutes", type=float, default=60.0, help="of load; starting up is extra (%(default)s)")
    add("--most-growth", type=float, default=MOST_GROWTH, metavar="SHARE",
        help="of any process's resident memory (%(default)s)")  # fmt: skip
    add("--folder", type=Path, help="keep logs and all else there (a temporary one)")
    add("--seed", type=int, default=0, help="of sessions, clients and faults (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Soak, and return the outcome."""
    if not options.minutes > 0:
        raise UsageError("--minutes", "more than 0", options.minutes)
    environment = describe_environment(options.seed).model_dump()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    # Sockets live in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as name:
        folder = Path(name)
        if options.folder is not None:
            folder = options.folder.resolve()
            folder.mkdir(parents=True, mode=0o700)
        model = options.model_path.resolve()
        seen = soak_run.Soak(folder, model, options.minutes, options.seed).run()
    outcome = make_outcome(seen)
    bars = make_bars(outcome, options.most_growth)
    make_console().print(make_table(outcome, bars))
    for example in outcome["examples"]:
        print(example, file=sys.stderr)
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "settings": {
            "model": model.name,
            "minutes": options.minutes,
            "clients": soak_run.CLIENTS,
            "sessions_of_a_client": soak_load.OPEN_SESSIONS,
            "context_tokens": {"short": soak_load.SHORT, "long": soak_load.LONG},
            "more_in_a_turn": {"tokens": soak_load.MORE, "share": soak_load.MORE_OFTEN},
            "device_tokens": soak_run.DEVICE_TOKENS,
            "requests_at_a_time": soak_run.REQUESTS_AT_A_TIME,
            "tier": {"memory": soak_run.TIER_MEMORY, "disk": soak_run.TIER_DISK},
            "tier_span_tokens": SPAN_TOKENS,
            "rules_of_engine_b": POLICIES,
            "mean_seconds_between_faults": soak_faults.EVERY_S,
            "tie_nats": TIE,
            "wrong_logprob_nats": OFF,
            "most_growth": options.most_growth,
            "seed": options.seed,
        },
        "outcome": outcome,
        "bars": bars,
    }


if __name__ == "__main__":
    sys.exit(main())
