"""The accounting of bounded stores: no victim that could have been spared, and no look at others.

That limits hold and bytes add up, whatever happens, is part of the contract of every store.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.lru import LruAccount

CAPACITY = 100
# A quota above the capacity is the capacity.
QUOTAS = {"a": 40, "b": 1000}
NAMESPACES = st.sampled_from(["a", "b", "c"])
STATES = st.sampled_from(["free", "free", "pinned", "draft"])
BLOBS = st.lists(st.tuples(NAMESPACES, st.integers(1, 20), STATES), max_size=40)


class Counted(OrderedDict):
    """Counts how often a name is looked at."""

    looks = 0

    def __iter__(self):
        for name in super().__iter__():
            self.looks += 1
            yield name


def account_of(blobs: list[tuple[str, int, str]]) -> LruAccount:
    """An account that holds those of the blobs that it has room for, the oldest use first."""
    account = LruAccount(CAPACITY, QUOTAS)
    for number, (namespace, num_bytes, state) in enumerate(blobs):
        if over(account, namespace, num_bytes, []):
            continue
        if state == "draft":
            account.reserve(namespace, num_bytes)
        else:
            entry = account.add(BlobName(namespace, bytes([number])), num_bytes)
            entry.pins = int(state == "pinned")
    assert account.check_integrity() == []
    return account


def over(
    account: LruAccount, namespace: str, num_bytes: int, gone: list[BlobName], *, own: bool = False
) -> bool:
    """Return whether so many more bytes break a limit, or only the quota, once `gone` are gone."""
    left = {name: account.entries[name] for name in account.entries.keys() - set(gone)}
    total = sum(entry.num_bytes for entry in left.values()) + account.reserved.total()
    mine = sum(entry.num_bytes for name, entry in left.items() if name.namespace == namespace)
    mine += account.reserved[namespace]
    limit = min(CAPACITY, QUOTAS.get(namespace, CAPACITY))
    return mine + num_bytes > limit or (total + num_bytes > CAPACITY and not own)


def simple_plan(account: LruAccount, namespace: str, num_bytes: int) -> list[BlobName] | None:
    """Return what `plan` names, by looking at all entries: first for the quota, then for the
    capacity."""
    victims: list[BlobName] = []
    for own in (True, False):
        for name, entry in account.entries.items():
            if not over(account, namespace, num_bytes, victims, own=own):
                break
            if not entry.pins and name not in victims and (name[0] == namespace or not own):
                victims.append(name)
    return None if over(account, namespace, num_bytes, victims) else victims


@given(BLOBS, NAMESPACES, st.integers(1, 120))
def test_a_plan_is_that_of_looking_at_all_entries_and_looks_at_few(blobs, namespace, num_bytes):
    account = account_of(blobs)
    expected = simple_plan(account, namespace, num_bytes)
    before = deepcopy((account.entries, +account.used, +account.reserved, account.evictions))
    account.entries = entries = Counted(account.entries)
    account._orders = {name: Counted(order) for name, order in account._orders.items()}
    try:
        planned = account.plan(namespace, num_bytes)
    except TierExhaustedError:
        planned = None
    # Read first: comparing looks at all of them.
    looks = entries.looks + sum(order.looks for order in account._orders.values())
    assert planned == expected
    assert (account.entries, +account.used, +account.reserved, account.evictions) == before
    if planned is not None:
        pinned = sum(entry.pins for entry in account.entries.values())
        # Once for the quota, once for the capacity, each with the first that is left in peace.
        assert looks <= 2 * (len(planned) + pinned + 1)


def test_a_namespace_that_holds_nothing_any_more_costs_nothing():
    account = LruAccount(CAPACITY)
    for number in range(50):
        name = BlobName(f"tenant-{number}", bytes(32))
        account.reserve(name.namespace, 10)
        account.release(name.namespace, 10)
        account.add(name, 10)
        account.remove(name)
    assert not account.used
    assert not account.reserved
