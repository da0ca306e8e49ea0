"""The payload of a put before it is stored: what has arrived, and nothing for what has not.

Only a payload that is there as a whole takes room in a store, so a header alone evicts nothing, and
a put that never ends holds no more than what its client has sent. Chunks are kept as gRPC handed
them over; the one copy that a payload costs is the one into the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType

from kvtier.errors import TierIntegrityError
from kvtier_tierd.limits.budget import Budget
from kvtier_tierd.stores.base import Buffer

# A chunk is an object of some hundred bytes: shorter ones than this are joined.
JOINED_BYTES = 16 << 10


class Staged:
    """A payload of `num_bytes`, counted in the budget until the block that it opens is left."""

    def __init__(self, budget: Budget, namespace: str, num_bytes: int) -> None:
        self._budget, self._namespace, self._num_bytes = budget, namespace, num_bytes
        self._arrived_bytes = 0
        self._pieces: deque[Buffer | bytearray] = deque()

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pieces.clear()
        self._budget.give_back(self._namespace, self._arrived_bytes)
        self._arrived_bytes = 0

    def add(self, chunk: Buffer) -> None:
        """Raises TierIntegrityError for more than the payload, TierExhaustedError for more than
        the budget."""
        if self._arrived_bytes + len(chunk) > self._num_bytes:
            raise TierIntegrityError(
                f"more than the {self._num_bytes} bytes of the header were sent"
            )
        self._budget.take(self._namespace, len(chunk))
        self._arrived_bytes += len(chunk)
        last = self._pieces[-1] if self._pieces else None
        if len(chunk) >= JOINED_BYTES:
            self._pieces.append(chunk)
        elif isinstance(last, bytearray) and len(last) < JOINED_BYTES:
            last += chunk
        elif chunk:
            self._pieces.append(bytearray(chunk))

    def finish(self) -> None:
        """Raises TierIntegrityError where some of the payload is missing."""
        if self._arrived_bytes != self._num_bytes:
            raise TierIntegrityError(f"{self._arrived_bytes} of {self._num_bytes} bytes were sent")

    def pieces(self) -> Iterator[Buffer]:
        """The payload in order, once: each piece is let go of when the next one is asked for."""
        while self._pieces:
            yield memoryview(self._pieces.popleft())


__all__ = ["Staged"]
