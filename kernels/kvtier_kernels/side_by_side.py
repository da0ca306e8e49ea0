"""The head classes of a layer beside each other on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class SideBySide:
    """Does calls that do not depend on each other, while a CUDA graph is captured on two streams.

    A few contexts leave most of a device idle, and a replay starts both streams for nothing. Called
    eagerly the host is what takes time, so they go one after another. One thread; a call's tensors
    may be freed as soon as `run` has returned, which both streams have joined by then.
    """

    def __init__(self, device: torch.device | str) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self._side = torch.cuda.Stream() if on_cuda else None  # type: ignore[no-untyped-call]

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """The first call should be the longest."""
        if self._side is None or len(calls) < 2 or not torch.cuda.is_current_stream_capturing():
            for call in calls:
                call()
            return
        first, *others = calls
        stream = torch.cuda.current_stream()
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            for call in others:
                call()
        first()
        stream.wait_stream(self._side)


__all__ = ["SideBySide"]
