"""The command `kvtier plan`: its flags, and the question that they ask. Nothing heavy is imported
before it runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import UnknownPolicyError, UsageError
from kvtier.sizes import parse_count, parse_number, parse_size

if TYPE_CHECKING:
    from kvtier.plan.fleet import Windows
    from kvtier.plan.study import PlanDocument, Question

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_POLICIES = "full,kvtier,kvtier-tier"
EXIT_OK, EXIT_NO_FLEET = 0, 1


def add_plan_parser(commands: Subparsers) -> None:
    """Add the parser of `kvtier plan`; parsed arguments carry `handler`."""
    parser = commands.add_parser(
        "plan",
        help="how many GPUs a workload needs, with and without kvtier",
        description="Simulate a fleet under a trace or a described workload.",
        epilog="exit codes: 0 each policy has a fleet that meets the SLO, 1 some has none or "
        "refuses requests, 2 usage",
        allow_abbrev=False,
    )
    _add_traffic(parser.add_argument_group("traffic: a trace, or sessions as described"))
    _add_replica(parser.add_argument_group("a replica: as measured, or by stated figures"))
    _add_fleet(parser.add_argument_group("fleet"))
    _add_probe(parser.add_argument_group("before a calibration"))
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write the whole answer as JSON")
    add("--report", metavar="FILE", help="write one self-contained HTML page")
    add("--format", choices=("table", "json"), default="table", help="of stdout (%(default)s)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(handler=run_plan)


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    from kvtier.traffic.described import Description

    add = group.add_argument
    add("--trace", metavar="FILE", help="JSON lines in Mooncake's format")
    add("--requests", metavar="N", help="of the trace, the first so many (all)")
    add("--copies", default="1", metavar="N", help="so many times the trace's users (%(default)s)")
    add(
        "--spread", default="0", metavar="S", help="a copy begins up to so much later (%(default)s)"
    )
    for field in fields(Description):
        flag = "--" + field.name.replace("_", "-").replace("spread", "length-spread")
        add(flag, dest=f"described_{field.name}", metavar="N", help=f"({field.default})")
    add("--seed", default="0", help="of everything that is drawn (%(default)s)")


def _add_replica(group: argparse._ArgumentGroup) -> None:
    from kvtier.plan.fleet import STREAMING
    from kvtier.plan.hardware import ACCELERATORS, MODELS, Assumptions
    from kvtier.retention.shares.base import CODED_PAGES

    add = group.add_argument
    add("--calibration", metavar="FILE", help="JSON of `python -m kvtier.bench --trace …`: its "
        "engine is a replica, with its pool")  # fmt: skip
    add("--gpu", default="h100", help=f"{', '.join(ACCELERATORS)} (%(default)s)")
    add("--model", default="llama-3-70b", help=f"{', '.join(MODELS)} (%(default)s)")
    add("--tp", default="8", help="accelerators of a replica (%(default)s)")
    for field in fields(Assumptions):
        flag = "--" + field.name.replace("_", "-")
        add(flag, dest=f"assumed_{field.name}", metavar="X", help=f"({field.default:g})")
    add("--ca-share", default="1", help="context-anchored heads of a head profile (%(default)s: "
        "heads compete)")  # fmt: skip
    add("--retention", default="0.25", help="of a context, what they keep (%(default)s)")
    add("--kept-dtype", choices=CODED_PAGES, help="what that is coded to (as it is)")
    add("--compress-prefill", choices=STREAMING, default="auto", help="prompts that are compressed "
        "while they are prefilled (%(default)s: those that do not fit otherwise)")  # fmt: skip
    add("--sink", default="4", help="first tokens that all heads keep (%(default)s)")
    add("--recent", help="last tokens of a turn that they keep (one in 128, at most 16)")
    add("--branch-recent", default="0", help="of them, before a branch (%(default)s)")
    add("--tier-bytes", default="1000g", metavar="SIZE", help="that each replica's machine gives "
        "to the tier (%(default)s)")  # fmt: skip
    add("--chunk", default="8k", metavar="SIZE", help="tokens of a prefill pass (%(default)s)")
    add("--max-running", default="64", help="requests of a replica at once (%(default)s)")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    from kvtier.plan.fleet import ROUTINGS, SCHEDULE_POLICIES

    add = group.add_argument
    add("--policies", default=DEFAULT_POLICIES, help="side by side (%(default)s)")
    add("--routing", choices=ROUTINGS, default="affinity", help="(%(default)s)")
    add("--routing-slack", default="8", help="cache-aware: requests more than the least loaded "
        "(%(default)s)")  # fmt: skip
    add("--schedule-policy", choices=SCHEDULE_POLICIES, default="fcfs", help="SGLang's: first "
        "come first served, or longest cached prefix first (%(default)s)")  # fmt: skip
    add("--replicas", metavar="N", help="simulate so many (the fewest that meet the SLO)")
    add("--max-replicas", default="4096", metavar="N", help="of the search (%(default)s)")
    add("--slo-ttft", default="2000", metavar="MS", help="time to the first token (%(default)s)")
    add("--slo-tpot", default="50", metavar="MS", help="time per output token (%(default)s)")
    add("--slo-percentile", default="90", metavar="P", help="of both (%(default)s)")
    add("--gpu-hour-cost", metavar="X", help="for the cost of a million tokens")
    add("--warm", default="0", metavar="S", help="requests before that only fill caches "
        "(%(default)s)")  # fmt: skip


def _add_probe(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--write-probe", metavar="FILE", help="write a trace whose replay measures an engine's "
        "rates, and simulate nothing")  # fmt: skip
    add("--probe-gap", default="0.5", metavar="S", help="between its requests (%(default)s)")
    add("--probe-token-time", default="1e-4", metavar="S", help="more for each of their tokens: "
        "longer than the engine takes, or they are not alone (%(default)s)")  # fmt: skip


def write_probe(options: argparse.Namespace) -> None:
    """Write the trace of `kvtier.traffic.probe` into the file that --write-probe names."""
    from kvtier.bench.options import output_file
    from kvtier.traffic.probe import probe_trace

    file = output_file(options.write_probe, "--write-probe")
    assert file is not None
    trace = probe_trace(
        parse_number(options.probe_gap, "--probe-gap", zero=True),
        parse_number(options.probe_token_time, "--probe-token-time"),
    )
    trace.write(file)
    if not options.quiet:
        requests = trace.requests
        print(f"{file}: {len(requests)} requests in {requests[-1].arrival_s:.0f} s")


def run_plan(options: argparse.Namespace) -> int:
    """Run `kvtier plan`, and return its exit code. Raises KvtierError."""
    from kvtier.bench.options import output_file

    if options.write_probe is not None:
        write_probe(options)
        return EXIT_OK
    question = read_question(options)
    outputs = [output_file(options.json, "--json"), output_file(options.report, "--report")]
    document = answer(question, options.quiet)
    if outputs[0] is not None:
        outputs[0].write_text(document.model_dump_json(indent=1) + "\n")
    if outputs[1] is not None:
        from kvtier.plan.page import render_plan

        outputs[1].write_text(render_plan(document), encoding="utf-8")
    if options.format == "json":
        print(document.model_dump_json(indent=1))
    else:
        from kvtier.bench.table import make_console
        from kvtier.plan.table import print_plan

        print_plan(document, make_console())
    return EXIT_OK if all(plan.shown.meets_slo for plan in document.policies) else EXIT_NO_FLEET


def answer(question: Question, quiet: bool = True) -> PlanDocument:
    """Return the answer to a question, with the environment that it was simulated in. quiet: no
    progress goes to stderr. Raises UsageError."""
    from kvtier.environment import describe_environment
    from kvtier.plan.study import PlanDocument, ask

    started_at = datetime.now(UTC).isoformat(timespec="seconds")

    def tell(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return PlanDocument(
        started_at=started_at,
        command=tuple(sys.argv[2:]),
        environment=describe_environment(question.seed),
        **ask(question, tell),
    )


def read_question(options: argparse.Namespace) -> Question:
    """Return the question that the flags ask. Raises UsageError naming the flag."""
    from kvtier.plan.answers import Slo
    from kvtier.plan.hardware import Assumptions
    from kvtier.plan.study import Question
    from kvtier.traffic.described import Description

    described = _described(options)
    if options.trace is not None and described:
        flag = "--" + next(iter(described)).replace("_", "-")
        raise UsageError(flag, "no such flag beside --trace", next(iter(described.values())))
    assumed = {
        field.name: parse_number(text, "--" + field.name.replace("_", "-"))
        for field in fields(Assumptions)
        if (text := getattr(options, f"assumed_{field.name}")) is not None
    }
    return Question(
        policies=_policies(options.policies),
        slo=Slo(
            ttft_s=parse_number(options.slo_ttft, "--slo-ttft") / 1e3,
            tpot_s=parse_number(options.slo_tpot, "--slo-tpot") / 1e3,
            percentile=parse_number(options.slo_percentile, "--slo-percentile", most=99.99),
        ),
        trace=None if options.trace is None else Path(options.trace),
        requests=_maybe_count(options.requests, "--requests"),
        copies=parse_count(options.copies, "--copies"),
        spread_s=parse_number(options.spread, "--spread", zero=True),
        described=Description(**described),
        calibration=None if options.calibration is None else Path(options.calibration),
        gpu=options.gpu,
        model=options.model,
        tp=parse_count(options.tp, "--tp"),
        assumed=Assumptions(**assumed),
        ca_share=parse_number(options.ca_share, "--ca-share", most=1),
        retention=parse_number(options.retention, "--retention", most=1),
        kept_dtype=options.kept_dtype,
        compress_prefill=options.compress_prefill,
        windows=_windows(options),
        tier_bytes=parse_size(options.tier_bytes, "--tier-bytes"),
        replicas=_maybe_count(options.replicas, "--replicas"),
        max_replicas=parse_count(options.max_replicas, "--max-replicas"),
        chunk_tokens=parse_size(options.chunk, "--chunk"),
        max_running=parse_count(options.max_running, "--max-running"),
        routing=options.routing,
        schedule_policy=options.schedule_policy,
        routing_slack=parse_count(options.routing_slack, "--routing-slack", least=0),
        gpu_hour_cost=None
        if options.gpu_hour_cost is None
        else parse_number(options.gpu_hour_cost, "--gpu-hour-cost"),
        warm_s=parse_number(options.warm, "--warm", zero=True),
        seed=parse_count(options.seed, "--seed", least=0),
    )


def _windows(options: argparse.Namespace) -> Windows:
    from kvtier.plan.fleet import Windows

    windows = Windows(
        parse_count(options.sink, "--sink", least=0),
        branch_recent=parse_count(options.branch_recent, "--branch-recent", least=0),
    )
    if options.recent is None:
        return windows
    return replace(windows, recent=parse_count(options.recent, "--recent"), recent_of=1)


def _described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a description that were given, as whole numbers where their defaults
    are. Raises UsageError naming the flag."""
    from kvtier.traffic.described import Description

    found: dict[str, Any] = {}
    for field in fields(Description):
        text = getattr(options, f"described_{field.name}")
        if text is None:
            continue
        flag = "--" + field.name.replace("_", "-")
        whole = isinstance(field.default, int)
        found[field.name] = (
            parse_count(text, flag, least=0) if whole else parse_number(text, flag, zero=True)
        )
    return found


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    known = DEFAULT_POLICIES.split(",")
    for name in names:
        if name not in known:
            raise UnknownPolicyError("--policies", f"some of {', '.join(known)}", name)
    return names


def _maybe_count(text: str | None, argument: str) -> int | None:
    return None if text is None else parse_count(text, argument)


__all__ = ["add_plan_parser", "answer", "read_question", "run_plan"]
