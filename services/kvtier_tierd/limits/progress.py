"""The limit on how long a stream may keep the service waiting.

A stream that moves may take as long as it needs; one that stalls holds a transfer, and what it has
pinned or sent, from all others. What a client makes us wait, altogether, may be `stall_s` and
the time that its bytes take at SLOWEST_BYTES_PER_S, so that a byte now and then is no progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from kvtier.errors import TierUnavailableError

SLOWEST_BYTES_PER_S = 1e6

Result = TypeVar("Result")


class StalledError(TierUnavailableError):
    """A stream that its client keeps waiting. writing: the message that it does not read, if it is
    reading that it does not do; it is still under way."""

    writing: asyncio.Future[None] | None = None


class Progress:
    """The progress of one stream. stall_s: how long it may stand still."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_bytes = 0
        self._waited_s = 0.0

    def moved(self, num_bytes: int) -> None:
        self._moved_bytes += num_bytes

    async def wait(self, work: Awaitable[Result]) -> Result:
        """Return the result of the work that the client is waited for. Raises StalledError when
        that takes too long."""
        earned_s = self._moved_bytes / SLOWEST_BYTES_PER_S
        allowed_s = min(self._stall_s, self._stall_s + earned_s - self._waited_s)
        began = time.monotonic()
        try:
            async with asyncio.timeout(allowed_s):
                return await work
        except TimeoutError:
            raise StalledError(
                f"the stream stalled: {self._moved_bytes} bytes moved, and then {self._stall_s} s "
                f"were over, or it is slower than {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s"
            ) from None
        finally:
            self._waited_s += time.monotonic() - began


__all__ = ["Progress", "StalledError"]
