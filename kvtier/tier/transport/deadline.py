"""The deadline of a method."""

from __future__ import annotations

import time


class Deadline:
    """at: time.monotonic()."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def left_ms(self) -> int:
        """Return the milliseconds that are left, at least 1, because 0 means something else to
        those who are told."""
        return max(1, round(1000 * self.left()))
