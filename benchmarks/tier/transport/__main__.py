"""The speed at which the KV tier moves bytes, against what this machine's memory and gRPC could do.

    python -m benchmarks.tier.transport

The service runs in a process of its own, on loopback; so does an echo, the same server without a
store (benchmarks.tier.transport.echo). All paths move the same blobs in every round, one after the
other; a ratio is the median over rounds of (baseline's seconds / ours).

    shared    through shared memory; get includes the checksum, put computes it
    stream    over gRPC in chunks, likewise
    echo      the stream's chunks as plain protobuf messages, dropped on arrival
    tls       the stream under mutual TLS
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import show
from benchmarks.tier.transport.echo import EchoClient
from benchmarks.tier.transport.paths import Bytes, checksum_paths, in_rounds, throughput_paths
from benchmarks.tier.transport.processes import ECHO, SERVICE, make_certificates, serving
from benchmarks.tier.transport.rows import Row, make_bars, make_table, path_rows, share_rows
from benchmarks.tier.transport.service import (
    NAMESPACE,
    connected,
    measure_churn,
    measure_neighbour,
    room,
)
from kvtier.errors import UsageError
from kvtier.sizes import format_size, parse_size
from kvtier.tier.client import TierClient

# The measurement, and a try of a few seconds whose numbers mean nothing: sizes of blobs, how many
# are in a call, rounds of all paths, seconds with a neighbour and without, memory for blobs that
# come and go, and the seconds of these.
FULL = {
    "blobs": ["8m", "768k"], "count": 64, "rounds": 9, "neighbour_s": 5.0, "churn_memory": "2g",
}  # fmt: skip
QUICK = {
    "blobs": ["768k"], "count": 2, "rounds": 1, "neighbour_s": 0.3, "churn_memory": "64m",
    "churn_s": 0.3,
}  # fmt: skip


def declare(arguments: Arguments) -> None:
    arguments.number("--churn-s", 60.0, "of blobs that come and go")
    arguments.add("--quick", action="store_true", help="a few seconds in all; no bar is judged")


def run(options: Options) -> Measured:
    """Measure throughput, a neighbour and churn."""
    vars(options).update(QUICK if options.quick else FULL)
    sizes = {text: parse_size(text, "--blobs") for text in options.blobs}
    rows: list[Row] = []
    outcome: dict[str, Any] = {"throughput": {}}
    for size in sizes.values():
        name = format_size(size)
        data = Bytes(size, options.count, options.seed)
        outcome["throughput"][name] = measure_paths(data, options, rows)
    smallest = Bytes(min(sizes.values()), 1, options.seed)
    outcome["neighbour"] = measure_neighbour(smallest, options, rows)
    outcome["churn"] = measure_churn(data, options, rows)
    show(make_table(rows))
    settings = {
        "grpcio": version("grpcio"),
        "xxhash": version("xxhash"),
        **{key: value for key, value in vars(options).items() if key != "out"},
    }
    figures = {"settings": settings, "outcome": outcome}
    return Measured(figures, None if options.quick else make_bars(rows))


def measure_paths(data: Bytes, options: Options, rows: list[Row]) -> dict[str, Any]:
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


BENCHMARK = Benchmark(
    "tier.transport", __doc__, declare, run, out=RESULTS / "tier-transport.json", schema_version=2
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
