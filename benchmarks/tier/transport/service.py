"""A service under load: a neighbour, and what it holds in the long run."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Options
from benchmarks.tier.transport.hammer import IN_FLIGHT, QUOTA_BLOBS
from benchmarks.tier.transport.paths import LAYOUT, Bytes, seconds
from benchmarks.tier.transport.processes import SERVICE, hammering, resident_bytes, serving
from benchmarks.tier.transport.rows import Row, churn_row, neighbour_rows
from kvtier.errors import TierIntegrityError
from kvtier.sizes import format_size, parse_size
from kvtier.tier.client import Blob, Landing, TierClient

NAMESPACE, NEIGHBOUR = "bench", "neighbour"
# A second, of the neighbour's streams.
NEIGHBOUR_RATE = "8m"


def room(data: Bytes) -> str:
    """Memory for a service that is asked to keep all of the bytes."""
    return str(2 * data.num_bytes + (64 << 20))


def connected(stack: ExitStack, client: TierClient) -> Any:
    stack.enter_context(client)
    client.connect()
    return client


def patient(*arguments: Any, **named: Any) -> TierClient:
    """Slow answers are measured, not given up on."""
    return TierClient(*arguments, timeout_s=10.0, **named)


def getting(data: Bytes, client: TierClient) -> Any:
    """A call that gets the first blob, into the same room every time, of the calling thread."""
    rooms = threading.local()

    def get() -> None:
        if not hasattr(rooms, "landed"):
            rooms.landed = bytearray(data.blob_bytes)
        (landed,) = client.get(
            data.keys[:1], lambda offer: memoryview(rooms.landed), data.blob_bytes
        )
        if landed is not Landing.LANDED:
            raise TierIntegrityError(f"a blob that is {landed.value}")

    return get


def measure_neighbour(data: Bytes, options: Options, rows: list[Row]) -> dict[str, Any]:
    """p99 of gets beside a neighbour at his limits: with a rate, and without one."""
    outcome = {}
    for what, rate in ((f"{NEIGHBOUR_RATE}B/s", f",{NEIGHBOUR_RATE}"), ("no rate", "")):
        bounds = f"{NEIGHBOUR}={QUOTA_BLOBS * data.blob_bytes}{rate}"
        outcome[what] = measure_beside(data, bounds, options)
        for path, found in outcome[what].items():
            name = f"{format_size(data.blob_bytes)} {path} get"
            rows += neighbour_rows(name, what, found, claimed=bool(rate))
    return outcome


def measure_beside(data: Bytes, bounds: str, options: Options) -> dict[str, Any]:
    """p99 alone, beside a neighbour at his limits, and beside the same one at another service.

    The last one takes as much of the processor; what it does not explain is the service's doing.
    """
    flags = ["--namespace", NAMESPACE, "--namespace", bounds, "--in-flight", str(IN_FLIGHT)]
    with ExitStack() as stack:
        service = stack.enter_context(serving(SERVICE, "--memory", "128m", *flags))
        other = stack.enter_context(serving(SERVICE, "--memory", "128m", *flags))
        clients = {
            path: connected(stack, patient(service.address, NAMESPACE, shared=path == "shared"))
            for path in ("stream", "shared")
        }
        clients["stream"].put(data.blobs[0])
        latencies: dict[str, dict[str, list[float]]] = {
            path: {"alone": [], "beside": [], "elsewhere": []} for path in clients
        }
        for _ in range(max(1, options.rounds // 3)):
            for path, client in clients.items():
                get, found = getting(data, client), latencies[path]
                found["alone"] += closed_loop(get, options.neighbour_s)
                for where, address in (("beside", service.address), ("elsewhere", other.address)):
                    with hammering(address, NEIGHBOUR, data.blob_bytes):
                        found[where] += closed_loop(get, options.neighbour_s)
    return {
        path: {where: {"calls": len(one), "p99": p99(one)} for where, one in found.items()}
        for path, found in latencies.items()
    }


def closed_loop(get: Any, for_s: float) -> list[float]:
    until = time.perf_counter() + for_s
    latencies = [seconds(get)]
    while time.perf_counter() < until:
        latencies.append(seconds(get))
    return latencies


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, nearest rank."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def measure_churn(data: Bytes, options: Options, rows: list[Row]) -> dict[str, Any]:
    """Measure what a service holds while blobs come and go on both paths, far more than fit."""
    cap = parse_size(options.churn_memory, "--churn-memory")
    with ExitStack() as stack:
        service = stack.enter_context(serving(SERVICE, "--memory", options.churn_memory))
        clients = [TierClient(service.address, name, shared=name == "b") for name in ("a", "b")]
        for client in clients:
            connected(stack, client)
        path = Path(clients[0].connect().shared_path)
        first = peak = resident_bytes(service.pid, path)
        chance, put_bytes = random.Random(options.seed), 0
        until = time.monotonic() + options.churn_s
        for number in itertools.count():
            if time.monotonic() >= until and put_bytes:
                break
            client, key = clients[number % 2], number.to_bytes(32, "big")
            size = chance.randint(1, data.blob_bytes)
            client.put(Blob(key, LAYOUT, [data.source.data[:size]]))
            client.get([key], lambda offer: data.landing.data[: offer.num_bytes], size)
            put_bytes += size
            peak = max(peak, resident_bytes(service.pid, path))
        evictions = clients[0].stats().evictions
    found = {
        "cap_bytes": cap,
        "first_bytes": first,
        "peak_bytes": peak,
        "put_bytes": put_bytes,
        "evictions": evictions,
    }
    rows.append(churn_row(found))
    return found
