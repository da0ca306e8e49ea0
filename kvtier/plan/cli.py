"""The command `kvtier plan`: its flags, and the question that they ask. Nothing heavy is imported
before it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import UnknownPolicyError, UsageError
from kvtier.sizes import parse_count, parse_number, parse_size

if TYPE_CHECKING:
    from kvtier.plan.study import PlanDocument, Question

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_POLICIES = "full,kvtier,kvtier-tier"
EXIT_OK, EXIT_NO_FLEET = 0, 1
# Between the requests of the probe, beside what --probe-token-time says.
PROBE_GAP_S = 0.5
# Reads the text of a flag, and raises UsageError naming it.
Read = Callable[[str, str], Any]


def add_plan_parser(commands: Subparsers) -> None:
    """Add the parser of `kvtier plan`; parsed arguments carry `handler`, and `readers`: how the
    texts of flags are read."""
    parser = commands.add_parser(
        "plan",
        help="how many GPUs a workload needs, with and without kvtier",
        description="Simulate a fleet under a trace or a described workload.",
        epilog="exit codes: 0 each policy has a fleet that meets the SLO, 1 some has none or "
        "refuses requests, 2 usage",
        allow_abbrev=False,
    )
    readers: dict[str, tuple[str, Read]] = {}

    def adding(title: str) -> Callable[..., None]:
        group = parser.add_argument_group(title)

        def add(flag: str, read: Read | None = None, **more: Any) -> None:
            action = group.add_argument(flag, **more)
            if read is not None:
                readers[action.dest] = (flag, read)

        return add

    _add_traffic(adding("traffic: a trace, or sessions as described"))
    _add_replica(adding("a replica: as measured, or by stated figures"))
    _add_fleet(adding("fleet"))
    add = adding("before a calibration")
    add("--write-probe", metavar="FILE", help="write a trace whose replay measures an engine's "
        "rates, and simulate nothing")  # fmt: skip
    add("--probe-token-time", default="1e-4", metavar="S", help="more for each of their tokens: "
        "longer than the engine takes, or they are not alone (%(default)s)")  # fmt: skip
    add = adding("output")
    add("--json", metavar="FILE", help="write the whole answer as JSON")
    add("--report", metavar="FILE", help="write one self-contained HTML page")
    add("--format", choices=("table", "json"), default="table", help="of stdout (%(default)s)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(handler=run_plan, readers=readers)


def _add_traffic(add: Callable[..., None]) -> None:
    from kvtier.traffic.described import Description

    add("--trace", _file, metavar="FILE", help="JSON lines in Mooncake's format")
    add("--requests", parse_count, metavar="N", help="of the trace, the first so many (all)")
    add("--copies", parse_count, default="1", metavar="N", help="so many times the trace's users "
        "(%(default)s)")  # fmt: skip
    add("--spread", _from_zero, dest="spread_s", default="0", metavar="S", help="a copy begins up "
        "to so much later (%(default)s)")  # fmt: skip
    for field in fields(Description):
        flag = "--" + field.name.replace("_", "-").replace("spread", "length-spread")
        read = partial(parse_count, least=0) if isinstance(field.default, int) else _from_zero
        add(flag, read, dest=f"described_{field.name}", metavar="N", help=f"({field.default})")
    add("--seed", partial(parse_count, least=0), default="0",
        help="of everything that is drawn (%(default)s)")  # fmt: skip


def _add_replica(add: Callable[..., None]) -> None:
    from kvtier.plan.fleet import STREAMING
    from kvtier.plan.hardware import ACCELERATORS, MODELS, Assumptions
    from kvtier.retention.shares.base import CODED_PAGES

    share = partial(parse_number, most=1)
    add("--calibration", _file, metavar="FILE", help="JSON of `python -m kvtier.bench --trace …`: "
        "its engine is a replica, with its pool")  # fmt: skip
    add("--gpu", default="h100", help=f"{', '.join(ACCELERATORS)} (%(default)s)")
    add("--model", default="llama-3-70b", help=f"{', '.join(MODELS)} (%(default)s)")
    add("--tp", parse_count, default="8", help="accelerators of a replica (%(default)s)")
    for field in fields(Assumptions):
        flag = "--" + field.name.replace("_", "-")
        dest, about = f"assumed_{field.name}", f"({field.default:g})"
        add(flag, parse_number, dest=dest, metavar="X", help=about)
    add("--ca-share", share, default="1", help="context-anchored heads of a head profile "
        "(%(default)s: heads compete)")  # fmt: skip
    add("--retention", share, default="0.25", help="of a context, what they keep (%(default)s)")
    add("--kept-dtype", choices=CODED_PAGES, help="what that is coded to (as it is)")
    add("--compress-prefill", choices=STREAMING, default="auto", help="prompts that are compressed "
        "while they are prefilled (%(default)s: those that do not fit otherwise)")  # fmt: skip
    add("--tier-bytes", parse_size, default="1000g", metavar="SIZE", help="that each replica's "
        "machine gives to the tier (%(default)s)")  # fmt: skip
    add("--chunk", parse_size, dest="chunk_tokens", default="8k", metavar="SIZE",
        help="tokens of a prefill pass (%(default)s)")  # fmt: skip
    add("--max-running", parse_count, default="64", help="requests of a replica at once "
        "(%(default)s)")  # fmt: skip


def _add_fleet(add: Callable[..., None]) -> None:
    from kvtier.plan.fleet import ROUTINGS, SCHEDULE_POLICIES

    add("--policies", _policies, default=DEFAULT_POLICIES, help="side by side (%(default)s)")
    add("--routing", choices=ROUTINGS, default="affinity", help="(%(default)s)")
    add("--routing-slack", partial(parse_count, least=0), default="8", help="cache-aware: requests "
        "more than the least loaded (%(default)s)")  # fmt: skip
    add("--schedule-policy", choices=SCHEDULE_POLICIES, default="fcfs", help="SGLang's: first "
        "come first served, or longest cached prefix first (%(default)s)")  # fmt: skip
    add("--replicas", parse_count, metavar="N",
        help="simulate so many (the fewest that meet the SLO)")  # fmt: skip
    add("--max-replicas", parse_count, default="4096", metavar="N", help="of the search "
        "(%(default)s)")  # fmt: skip
    add("--slo-ttft", parse_number, default="2000", metavar="MS",
        help="time to the first token (%(default)s)")  # fmt: skip
    add("--slo-tpot", parse_number, default="50", metavar="MS",
        help="time per output token (%(default)s)")  # fmt: skip
    add("--slo-percentile", partial(parse_number, most=99.99), default="90", metavar="P",
        help="of both (%(default)s)")  # fmt: skip
    add("--gpu-hour-cost", parse_number, metavar="X", help="for the cost of a million tokens")
    add("--warm", _from_zero, dest="warm_s", default="0", metavar="S", help="requests before that "
        "only fill caches (%(default)s)")  # fmt: skip


def write_probe(options: argparse.Namespace) -> None:
    """Write the trace of `kvtier.traffic.probe` into the file that --write-probe names."""
    from kvtier.bench.options import output_file
    from kvtier.traffic.probe import probe_trace

    file = output_file(options.write_probe, "--write-probe")
    assert file is not None
    trace = probe_trace(PROBE_GAP_S, parse_number(options.probe_token_time, "--probe-token-time"))
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

    given = {name: text for name in options.readers if (text := getattr(options, name)) is not None}
    described = [name for name in given if name.startswith("described_")]
    if options.trace is not None and described:
        flag, _ = options.readers[described[0]]
        raise UsageError(flag, "no such flag beside --trace", given[described[0]])
    values: dict[str, Any] = {}
    for name, text in given.items():
        flag, read = options.readers[name]
        values[name] = read(text, flag)

    def taken(prefix: str) -> dict[str, Any]:
        names = [name for name in values if name.startswith(prefix)]
        return {name.removeprefix(prefix): values.pop(name) for name in names}

    slo = taken("slo_")
    return Question(
        slo=Slo(ttft_s=slo["ttft"] / 1e3, tpot_s=slo["tpot"] / 1e3, percentile=slo["percentile"]),
        described=Description(**taken("described_")),
        assumed=Assumptions(**taken("assumed_")),
        gpu=options.gpu,
        model=options.model,
        kept_dtype=options.kept_dtype,
        compress_prefill=options.compress_prefill,
        routing=options.routing,
        schedule_policy=options.schedule_policy,
        **values,
    )


def _policies(text: str, argument: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    known = DEFAULT_POLICIES.split(",")
    for name in names:
        if name not in known:
            raise UnknownPolicyError(argument, f"some of {', '.join(known)}", name)
    return names


def _file(text: str, argument: str) -> Path:
    return Path(text)


def _from_zero(text: str, argument: str) -> float:
    return parse_number(text, argument, zero=True)
