"""Latency under load that does not wait for answers, and what a neighbour does to it."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# A p999 needs a thousand samples.
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def quantile(values: Sequence[float], q: float) -> float | None:
    """Nearest rank; None where there are too few values to have one."""
    if not values or len(values) * (1 - q) < 1 - 1e-9:
        return None
    return sorted(values)[math.ceil(q * len(values) - 1e-9) - 1]


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    return {name: quantile(values, q) for name, q in QUANTILES.items()}


def poisson_arrivals(per_s: float, seconds: float, seed: int) -> list[float]:
    """Return when calls are due, in seconds from the start."""
    chance, arrivals, at = random.Random(seed), [], 0.0
    while (at := at + chance.expovariate(per_s)) < seconds:
        arrivals.append(at)
    return arrivals


def open_loop(call: Callable[[], Any], arrivals: Sequence[float], workers: int) -> list[float]:
    """Make a call for every arrival; returns seconds from when it was due until it was done.

    A call that finds all workers busy is late, and its lateness counts: measured from when a call
    could begin, the wait for a worker would be left out.
    """
    due = iter(arrivals)
    lock, latencies = threading.Lock(), []
    start = time.perf_counter() + 0.05

    def work() -> None:
        while True:
            with lock:
                at = next(due, None)
            if at is None:
                return
            time.sleep(max(0.0, start + at - time.perf_counter()))
            call()
            latencies.append(time.perf_counter() - start - at)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    return latencies


def capacity(call: Callable[[], Any], seconds: float, workers: int) -> float:
    """Calls per second when every worker begins the next one as soon as one is done."""
    done = itertools.count()
    start = time.perf_counter()

    def work() -> None:
        while time.perf_counter() < start + seconds:
            call()
            next(done)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    return next(done) / (time.perf_counter() - start)
