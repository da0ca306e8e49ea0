"""`python -m kvtier.bench`: parse, plan, run each policy, print. Exit codes are in `--help`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvtier.bench.metrics import compare_all
from kvtier.bench.options import PROGRAM, Options, parse_options
from kvtier.bench.planning import Model, PolicyPlan, make_plans
from kvtier.bench.progress import Progress
from kvtier.bench.replay.page import render_replay
from kvtier.bench.replay.schema import ReplayDocument, ReplayResult
from kvtier.bench.replay.table import print_replay
from kvtier.bench.report.html import render_report
from kvtier.bench.runner import run_worker, terminated_as_interrupted
from kvtier.bench.schema import (
    Document,
    EngineRun,
    Replay,
    RunFailure,
    RunResult,
    Workload,
)
from kvtier.bench.table import make_console, print_document, print_plan
from kvtier.environment import describe_environment
from kvtier.errors import KvtierError

EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code; only `--help` exits by itself."""
    given = tuple(sys.argv[1:] if argv is None else argv)
    try:
        options = parse_options(given)
        model, plans = make_plans(options)
    except KvtierError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.dry_run:
        return show_plan(options, model, plans)
    try:
        with terminated_as_interrupted():
            document = run_all(options, model, plans, given)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    publish(options, document)
    return EXIT_RUN_FAILED if document.failures else EXIT_OK


def run_all(
    options: Options, model: Model, plans: Sequence[PolicyPlan], command: tuple[str, ...]
) -> Document | ReplayDocument:
    """Run every policy, one after the other, and collect what came of it."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    outcomes: list[EngineRun | RunFailure] = []
    with Progress(options.quiet) as progress:
        for entry in plans:
            warn_if_small(entry, progress)
            outcomes.append(run_worker(entry.plan, progress))
    common: dict[str, Any] = {
        "started_at": started_at,
        "command": command,
        "environment": describe_environment(options.workload.seed),
        "model": describe_model(model, plans),
        "settings": plans[0].settings.model_dump(mode="json", exclude={"data_dir"}),
        "failures": tuple(outcome for outcome in outcomes if isinstance(outcome, RunFailure)),
        "notes": tuple(note for entry in plans for note in entry.notes),
    }
    workload = plans[0].plan.workload
    if isinstance(workload, Replay):
        replays = tuple(outcome for outcome in outcomes if isinstance(outcome, ReplayResult))
        return ReplayDocument(**common, workload=workload, runs=replays)
    runs = tuple(outcome for outcome in outcomes if isinstance(outcome, RunResult))
    ratios, comparisons = compare_all(runs)
    return Document(**common, workload=workload, runs=runs, ratios=ratios, comparisons=comparisons)


def warn_if_small(entry: PolicyPlan, progress: Progress) -> None:
    """Say beforehand when kvtier's own budget will make it recompute."""
    pools, workload = entry.plan.pools, entry.plan.workload
    # A trace's conversations come and go; how many there are at once nobody says.
    wanted = workload.sessions if isinstance(workload, Workload) else 1
    if entry.policy.splits_heads and pools.sessions < wanted:
        progress.note(
            f"{entry.policy.name}: the budget holds {pools.sessions:.1f} of {wanted} sessions, so "
            "later turns will recompute"
        )


def describe_model(model: Model, plans: Sequence[PolicyPlan]) -> dict[str, Any]:
    """The model for the outcome, with the head profile that was used."""
    profiles = {entry.policy.name: entry.profile_note for entry in plans if entry.profile_note}
    return {
        "path": str(model.path),
        "shape": model.shape.model_dump(),
        "device": model.device,
        "dtype": model.dtype,
        "kv_dtype": model.kv_dtype,
        "head_profiles": profiles,
    }


def publish(options: Options, document: Document | ReplayDocument) -> None:
    """Write the files asked for, print to stdout, and show what failed on stderr."""
    if options.json_path is not None:
        options.json_path.write_text(document.model_dump_json(indent=1) + "\n")
    if options.report_path is not None:
        options.report_path.write_text(render(document), encoding="utf-8")
    if options.json_output:
        print(document.model_dump_json(indent=1))
    elif isinstance(document, ReplayDocument):
        print_replay(document, make_console())
    else:
        print_document(document, make_console())
    for failure in document.failures:
        print(f"{PROGRAM}: {failure.policy} failed; its last log lines:", file=sys.stderr)
        for line in failure.log_tail:
            print(f"  {line}", file=sys.stderr)


def render(document: Document | ReplayDocument) -> str:
    """The outcome as a page."""
    if isinstance(document, ReplayDocument):
        return render_replay(document)
    return render_report(document)


def show_plan(options: Options, model: Model, plans: Sequence[PolicyPlan]) -> int:
    """The dry run."""
    text = json.dumps(plan_document(model, plans), indent=1)
    if options.json_path is not None:
        options.json_path.write_text(text + "\n")
    if options.json_output:
        print(text)
    else:
        print_plan(model, plans, make_console())
    return EXIT_OK


def plan_document(model: Model, plans: Sequence[PolicyPlan]) -> dict[str, Any]:
    """The dry run as data: every worker's plan, and the bytes it is made from."""
    return {
        "model": describe_model(model, plans),
        "workload": plans[0].plan.workload.model_dump(),
        "plans": [
            {
                **entry.plan.model_dump(mode="json"),
                "bytes_per_token": entry.slot_bytes,
                "session_bytes": entry.session_bytes,
                "prefill_bytes": entry.prefill_bytes,
            }
            for entry in plans
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
