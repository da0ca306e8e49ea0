"""Waiting for something to come true: the only place of the tests that sleeps or reads a clock.

How long a thing takes says something about the machine, so no test bounds it. The safety limit is
there for what will never come true, and for nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

SAFETY_S = 900.0
# The pauses between two looks: short at first, and then so long that looking costs those who work
# nothing.
FIRST_POLL_S, LONGEST_POLL_S, LONGER = 0.001, 0.1, 1.3


class FakeClock:
    """Seconds that pass only where a test says so. It stands for a clock, which is called, or for
    the module `time`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = perf_counter = __call__

    def passes(self, seconds: float) -> None:
        self.now += seconds

    sleep = passes


Found = TypeVar("Found")
What = str | Callable[[], object]


def wait_for(
    fact: Callable[[], Found], what: What = "did not come true", *, poll_s: float | None = None
) -> Found:
    """Wait until `fact` is true and return what it says. what: the failure's message, or what
    makes it. poll_s: how often is looked, for a fact that does something; by default less and
    less often."""
    for pause_s in _pauses(what, poll_s):
        found = fact()
        if found:
            return found
        time.sleep(pause_s)
    raise AssertionError


async def wait_for_async(
    fact: Callable[[], Awaitable[Found] | Found], what: What = "did not come true"
) -> Found:
    """Wait like `wait_for`, in an event loop; the fact may be a coroutine function."""
    for pause_s in _pauses(what):
        asked = fact()
        found: Found = await asked if isinstance(asked, Awaitable) else asked
        if found:
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError


def be_slow(seconds: float) -> None:
    """Be as slow as a stand-in for something slow is: how slow decides no test."""
    time.sleep(seconds)


async def be_slow_async(seconds: float) -> None:
    """Be slow like `be_slow`, in an event loop."""
    await asyncio.sleep(seconds)


def _pauses(what: What, poll_s: float | None = None) -> Iterator[float]:
    """Yield how long to wait after each look; fails when the safety limit is over."""
    deadline, pause_s = time.monotonic() + SAFETY_S, poll_s or FIRST_POLL_S
    while time.monotonic() < deadline:
        yield pause_s
        if poll_s is None:
            pause_s = min(LONGER * pause_s, LONGEST_POLL_S)
    raise AssertionError(what if isinstance(what, str) else what())
