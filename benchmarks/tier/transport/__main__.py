"""How fast the KV tier moves bytes, against what this machine's memory and gRPC could do.

    python -m benchmarks.tier.transport

The service runs in a process of its own, on loopback; so does an echo, the same server without a
store (benchmarks.tier.transport.echo). All paths move the same blobs in every round, one after the
other; a ratio is the median over rounds of (baseline's seconds / ours).

    shared    through shared memory; get includes the checksum, put computes it
    stream    over gRPC in chunks, likewise
    echo      the stream's chunks as plain protobuf messages, dropped on arrival
    raw       the same bytes, prepared before and never parsed: all that gRPC has to give
    tls       the stream under mutual TLS

Latency is counted from when a call was due, at arrivals that do not wait for answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.command import ROOT, run_command
from benchmarks.tier.transport.echo import EchoClient
from benchmarks.tier.transport.paths import Bytes, checksum_paths, in_rounds, throughput_paths
from benchmarks.tier.transport.processes import ECHO, SERVICE, make_certificates, serving
from benchmarks.tier.transport.rows import Row, make_table, path_rows, share_rows
from benchmarks.tier.transport.service import (
    NAMESPACE,
    connected,
    measure_churn,
    measure_latency,
    measure_neighbour,
    room,
)
from kvtier.bench.table import make_console
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.sizes import format_size, parse_size
from kvtier.tier.client import TierClient

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "tier-transport.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when the tier failed, 2 for bad input."""
    return run_command("tier_transport", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tier.transport", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--blobs", nargs="+", default=["8m", "768k"], metavar="BYTES", help="(%(default)s)")
    add("--count", type=int, default=64, help="blobs in a call (%(default)s)")
    add("--rounds", type=int, default=9, help="of all paths (%(default)s)")
    add("--workers", type=int, default=2, help="threads that get under load (%(default)s)")
    add("--latency-s", type=float, default=20.0, help="per path, blob and load (%(default)s)")
    add("--neighbour-s", type=float, default=5.0, help="with it, and without (%(default)s)")
    add(
        "--neighbour-rate",
        default="8m",
        metavar="BYTES",
        help="a second, of its streams (%(default)s); it is measured without a rate, too",
    )
    add("--churn-s", type=float, default=60.0, help="(%(default)s)")
    add("--churn-memory", default="2g", metavar="BYTES", help="the cap to keep (%(default)s)")
    add("--seed", type=int, default=0, help="of bytes and arrivals (%(default)s)")
    add("--quick", action="store_true", help="a few seconds in all; the numbers mean nothing")
    options = parser.parse_args(argv)
    if options.quick:
        options.blobs, options.count, options.rounds = ["768k"], 2, 1
        options.latency_s = options.neighbour_s = options.churn_s = 0.3
        options.churn_memory = "64m"
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and return the outcome."""
    for name, least in (("count", 1), ("rounds", 1), ("workers", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}", f"at least {least}", getattr(options, name))
    for name in ("latency_s", "neighbour_s", "churn_s"):
        if not getattr(options, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')}", "seconds", getattr(options, name))
    sizes = {text: parse_size(text, "--blobs") for text in options.blobs}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    environment = describe_environment(options.seed).model_dump()
    rows: list[Row] = []
    outcome: dict[str, Any] = {"throughput": {}, "latency": {}}
    for size in sizes.values():
        name = format_size(size)
        data = Bytes(size, options.count, options.seed)
        outcome["throughput"][name] = measure_paths(data, options, rows)
        outcome["latency"][name] = measure_latency(data, options, rows)
    smallest = Bytes(min(sizes.values()), 1, options.seed)
    outcome["neighbour"] = measure_neighbour(smallest, options, rows)
    outcome["churn"] = measure_churn(data, options, rows)
    make_console().print(make_table(rows))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "environment": environment,
        "settings": {
            "grpcio": version("grpcio"),
            "xxhash": version("xxhash"),
            **{key: value for key, value in vars(options).items() if key != "out"},
        },
        "outcome": outcome,
        "bars": {row.what: row.met for row in rows if row.met is not None},
    }


def measure_paths(data: Bytes, options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Seconds of every path in every round, and the checksum's share."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags, files = make_certificates(folder, NAMESPACE)
        memory = ("--memory", room(data))
        plain = stack.enter_context(serving(SERVICE, *memory))
        secure = stack.enter_context(serving(SERVICE, *memory, *flags))
        dropping = stack.enter_context(serving(ECHO, "--memory", "64k", "--shared-memory", "off"))
        stream = connected(stack, TierClient(plain.address, "stream", shared=False))
        shared = connected(stack, TierClient(plain.address, "shared"))
        tls = connected(stack, TierClient(secure.address, NAMESPACE, tls=files, shared=False))
        echo = connected(stack, EchoClient(dropping.address, NAMESPACE))
        if not shared.shares_memory:
            raise UsageError("shared memory", "a host that has /dev/shm", "none")
        seconds = in_rounds(throughput_paths(data, stream, shared, tls, echo), options.rounds)
        shares = in_rounds(checksum_paths(data, stream, shared), max(1, options.rounds // 3))
    rows += path_rows(data, seconds)
    rows += share_rows(data, shares)
    return {"num_bytes": data.num_bytes, "seconds": seconds, "checksum_share": shares}


if __name__ == "__main__":
    sys.exit(main())
