"""Times of this process; those of a GPU are taken in benchmarks/gpu/timing.py."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


__all__ = ["seconds"]
