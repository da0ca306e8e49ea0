"""Copies to host memory that nobody on the scheduler's thread waits for.

    scheduler's stream   gather ... what comes next, which may overwrite what was gathered
    this stream                  copy into pinned memory    copy ...
    whoever reads it                                        ready()

On a CPU there is nothing to copy. Not thread-safe, but `ready` may be called anywhere.
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

    ready: blocks until it is all there; None where it is already.
    """

    rows: torch.Tensor
    ready: Callable[[], None] | None


class HostCopies:
    """See the module docstring. device: where payloads are gathered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way: deque[torch.cuda.Event] = deque()

    def to_host(self, payload: torch.Tensor) -> HostPayload:
        """A copy of a tensor of this device, which the caller is done with."""
        if self._stream is None:
            return HostPayload(payload, None)
        while len(self._under_way) >= UNDER_WAY:
            self._under_way.popleft().synchronize()
        host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(payload, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        payload.record_stream(self._stream)
        self._under_way.append(done)
        return HostPayload(host, done.synchronize)


__all__ = ["HostCopies", "HostPayload"]
