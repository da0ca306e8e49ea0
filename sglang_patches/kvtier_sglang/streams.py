"""Copies beside the engine's own streams, in order with them.

    scheduler's stream   gather ... what comes next, which may overwrite what was gathered
    a stream of ours             copy into pinned memory    copy ...
    the thread that reads it                                ready()

On a CPU there is one order of things, and nothing to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

# Device memory that waits to be copied is at most so many payloads; then the caller waits, too.
UNDER_WAY = 2


class HostPayload(NamedTuple):
    """Host memory that may still be written to.

    ready: blocks until it is all there, in any thread; None where it is already.
    """

    rows: torch.Tensor
    ready: Callable[[], None] | None


class SideCopies:
    """Copies between a device and the host, in order with the caller's stream; each direction has
    a stream, so that what comes in never queues behind what goes out. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = _new_stream(device), _new_stream(device)
        self._under_way: deque[torch.cuda.Event] = deque()

    def to_host(self, payload: torch.Tensor) -> HostPayload:
        """A copy of a tensor of this device, which the caller is done with."""
        if self._out is None:
            return HostPayload(payload, None)
        while len(self._under_way) >= UNDER_WAY:
            self._under_way.popleft().synchronize()
        host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(payload, non_blocking=True)
            done = _recorded()
        payload.record_stream(self._out)
        self._under_way.append(done)
        return HostPayload(host, done.synchronize)

    def to_device(self, payload: torch.Tensor) -> torch.Tensor:
        """Host memory on this device, for the caller's stream; the host waits for pageable memory
        to be read, and for nothing else."""
        if self._in is None:
            return payload
        with torch.cuda.stream(self._in):
            there = payload.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._in)
        there.record_stream(current)
        return there


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
