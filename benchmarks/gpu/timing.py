"""Times of the device, by events, and calls replayed as one CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROUNDS = 20


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The device's median time of a call."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(rounds):
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(taken))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graphed(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """All the calls as one CUDA graph."""
    for call in calls:
        call()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
