"""Memory for payloads on their way through the service: a byte budget that all namespaces share.

    counted       what puts have sent and is not stored yet; what a store has read for its readers
    not counted   a store's own memory, and the chunk or two of each stream that gRPC has

Clients decide how many transfers there are and how fast they go, so without a budget they decide
how large the service grows.
"""

from __future__ import annotations

from collections import Counter

from kvtier.errors import TierExhaustedError

# The share of the budget that one namespace may take: one that hoards leaves the others something.
NAMESPACE_SHARE = 0.5


class Budget:
    """capacity_bytes: of everything together. Belongs to one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._held: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        return self._held.total()

    def take(self, namespace: str, num_bytes: int) -> None:
        """Count bytes of a namespace. Raises TierExhaustedError, and counts none, beyond what the
        namespace, or all of them together, may have."""
        most = int(NAMESPACE_SHARE * self.capacity_bytes)
        if self._held[namespace] + num_bytes > most:
            raise TierExhaustedError(
                f"namespace {namespace!r} has {self._held[namespace]} bytes on their way, of the "
                f"{most} that it may have (--transfer-memory)"
            )
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise TierExhaustedError(
                f"{self.used_bytes} bytes are on their way, of the {self.capacity_bytes} that may "
                "be (--transfer-memory)"
            )
        self._held[namespace] += num_bytes

    def give_back(self, namespace: str, num_bytes: int) -> None:
        """Count bytes no longer."""
        self._held[namespace] -= num_bytes
        if not self._held[namespace]:
            del self._held[namespace]


__all__ = ["Budget"]
