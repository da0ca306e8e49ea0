"""The accounting under every bounded store: who holds how many bytes, and who goes first.

    used + reserved <= capacity                      always
    held(namespace) <= quota(namespace)              always, reservations included
    victims: least recently used first, never a pinned one; while the quota of a namespace binds,
    only its own

Knows names and sizes only. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobName, StoreStats


@dataclass
class Entry:
    """One blob of the account. num_bytes: what it costs of the budget; pins: open handles."""

    num_bytes: int
    pins: int = 0


class LruAccount:
    """The bytes of one store's blobs, and the order of their uses.

    capacity_bytes: of everything together.
    quotas:         bytes by namespace; a namespace without one may use all of the capacity.
    """

    def __init__(self, capacity_bytes: int, quotas: Mapping[str, int] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.quotas = dict(quotas or {})
        self.entries: OrderedDict[BlobName, Entry] = OrderedDict()
        # The same by namespace, so that a quota's victims need not be looked for among all blobs.
        self._orders: dict[str, OrderedDict[BlobName, None]] = {}
        self.used: Counter[str] = Counter()
        self.reserved: Counter[str] = Counter()
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of committed blobs."""
        return self.used.total()

    def quota(self, namespace: str) -> int:
        return min(self.capacity_bytes, self.quotas.get(namespace, self.capacity_bytes))

    def check(self, namespace: str, num_bytes: int) -> None:
        """Raises TierExhaustedError for what a namespace could not hold if it held nothing else."""
        if num_bytes > self.quota(namespace):
            raise TierExhaustedError(
                f"a blob of {num_bytes} bytes is larger than what namespace {namespace!r} may hold "
                f"({self.quota(namespace)} bytes)"
            )

    def fitting(self, costs: Mapping[BlobName, int]) -> set[BlobName]:
        """Return the blobs that an empty account would hold of these, of which the most recently
        used one is the last: the most recently used ones that fit."""
        room, fitting = self.capacity_bytes, set()
        held: Counter[str] = Counter()
        for name in reversed(list(costs)):
            if costs[name] <= min(room, self.quota(name.namespace) - held[name.namespace]):
                room -= costs[name]
                held[name.namespace] += costs[name]
                fitting.add(name)
        return fitting

    def plan(self, namespace: str, num_bytes: int) -> list[BlobName]:
        """Whom to evict, in order, before `num_bytes` more may be reserved for a namespace.

        Looks at no more blobs than it names and at the pinned ones among them.
        Raises TierExhaustedError, and changes nothing, when no eviction makes enough room.
        """
        self.check(namespace, num_bytes)
        own = self.used[namespace] + self.reserved[namespace] + num_bytes - self.quota(namespace)
        total = self.used_bytes + self.reserved.total() + num_bytes - self.capacity_bytes
        victims: dict[BlobName, int] = {}
        for order, missing in ((self._orders.get(namespace, {}), own), (self.entries, total)):
            missing -= sum(victims.values())
            for name in order:
                if missing <= 0:
                    break
                entry = self.entries[name]
                if not entry.pins and name not in victims:
                    victims[name] = entry.num_bytes
                    missing -= entry.num_bytes
            if missing > 0:
                raise TierExhaustedError(
                    f"no room for {num_bytes} bytes of namespace {namespace!r}: everything that is "
                    "left is being read or written"
                )
        return list(victims)

    def reserve(self, namespace: str, num_bytes: int) -> None:
        """Set bytes aside for a draft; `plan` must have found room and its victims be gone."""
        self.reserved[namespace] += num_bytes

    def release(self, namespace: str, num_bytes: int) -> None:
        """Give a draft's bytes back."""
        _subtract(self.reserved, namespace, num_bytes)

    def add(self, name: BlobName, num_bytes: int) -> Entry:
        """A committed blob, now the most recently used one; the name must be free. Its entry is the
        store's to count open handles in, also when it is not of the account any more."""
        assert name not in self.entries, "replacing a blob removes it first"
        self.entries[name] = entry = Entry(num_bytes)
        self._orders.setdefault(name.namespace, OrderedDict())[name] = None
        self.used[name.namespace] += num_bytes
        return entry

    def remove(self, name: BlobName, *, evicted: bool = False) -> None:
        _subtract(self.used, name.namespace, self.entries.pop(name).num_bytes)
        order = self._orders[name.namespace]
        del order[name]
        if not order:
            del self._orders[name.namespace]
        self.evictions += evicted

    def touch(self, name: BlobName) -> None:
        """Count a use."""
        self.entries.move_to_end(name)
        self._orders[name.namespace].move_to_end(name)

    def stats(self, kind: str, quarantined: int) -> StoreStats:
        """Return the state of the store that this is the account of."""
        return StoreStats(
            kind=kind,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            blobs=len(self.entries),
            evictions=self.evictions,
            quarantined=quarantined,
            namespaces={namespace: held for namespace, held in self.used.items() if held},
        )

    def check_integrity(self) -> list[str]:
        """Violations of the account's invariants; empty when healthy."""
        problems = []
        held: Counter[str] = Counter()
        orders: dict[str, list[BlobName]] = {}
        for name, entry in self.entries.items():
            orders.setdefault(name.namespace, []).append(name)
            held[name.namespace] += entry.num_bytes
            if entry.pins < 0:
                problems.append(f"{name} was closed more often than opened")
        if orders != {namespace: list(order) for namespace, order in self._orders.items()}:
            problems.append("the order of a namespace is not that of all")
        if +held != +self.used:
            problems.append(f"counted {dict(self.used)} bytes, the blobs are {dict(held)}")
        if any(reserved < 0 for reserved in self.reserved.values()):
            problems.append(f"reservations below zero: {dict(self.reserved)}")
        if self.used_bytes + self.reserved.total() > self.capacity_bytes:
            problems.append(f"{self.used_bytes} bytes held of {self.capacity_bytes}")
        for namespace in self.used | self.reserved:
            if self.used[namespace] + self.reserved[namespace] > self.quota(namespace):
                problems.append(f"namespace {namespace} is over its quota")
        return problems


def _subtract(held: Counter[str], namespace: str, num_bytes: int) -> None:
    """Count bytes no longer; a namespace without any has no entry, because there may be many."""
    held[namespace] -= num_bytes
    if not held[namespace]:
        del held[namespace]
