"""The accounting of bounded stores: limits that hold, and no victim that could have been spared."""

from __future__ import annotations

from collections import Counter, OrderedDict
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.lru import LruAccount

CAPACITY = 100
QUOTAS = {"a": 40, "b": 1000}
NAMESPACES = st.sampled_from(["a", "b", "c"])
NAMES = st.builds(
    lambda namespace, number: BlobName(namespace, bytes([number]) * 32), NAMESPACES,
    st.integers(0, 3),
)  # fmt: skip
STEP = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(1, 60)),
    # Small enough for there to be several, whose order matters.
    st.tuples(st.just("put"), NAMES, st.integers(1, 10)),
    st.tuples(st.just("draft"), NAMES, st.integers(1, 30)),
    st.tuples(st.sampled_from(["pin", "unpin", "remove", "abort"]), NAMES),
    st.tuples(st.just("touch"), NAMES),
)
# Lists of any length are short ones, mostly.
STEPS = st.one_of(st.lists(STEP, max_size=60), st.lists(STEP, min_size=30, max_size=60))


class Accounts:
    """An account as stores use it, and a plain list of the same blobs, oldest use first."""

    def __init__(self) -> None:
        self.account = LruAccount(CAPACITY, QUOTAS)
        self.order: list[BlobName] = []
        self.drafts: dict[BlobName, int] = {}

    def play(self, step: str, name: BlobName, num_bytes: int = 0) -> None:
        entry = self.account.entries.get(name)
        if step in ("put", "draft"):
            self.make(step, name, num_bytes)
        elif step == "abort" and name in self.drafts:
            self.account.release(name.namespace, self.drafts.pop(name))
        elif entry is None:
            return
        elif step == "touch":
            self.account.touch(name)
            self.order.append(self.order.pop(self.order.index(name)))
        elif step == "pin":
            entry.pins += 1
        elif step == "unpin" and entry.pins:
            entry.pins -= 1
        elif step == "remove" and not entry.pins:
            self.remove(name)

    def make(self, step: str, name: BlobName, num_bytes: int) -> None:
        try:
            victims = self.account.plan(name.namespace, num_bytes)
        except TierExhaustedError:
            return
        for victim in victims:
            self.remove(victim)
        self.account.reserve(name.namespace, num_bytes)
        if step == "put" and name not in self.order:
            self.account.release(name.namespace, num_bytes)
            self.account.add(name, num_bytes)
            self.order.append(name)
        elif name not in self.drafts:
            self.drafts[name] = num_bytes
        else:
            self.account.release(name.namespace, num_bytes)

    def remove(self, name: BlobName) -> None:
        self.account.remove(name, evicted=True)
        self.order.remove(name)


def played(steps: list[tuple[str, BlobName, int]]) -> Accounts:
    accounts = Accounts()
    for step in steps:
        accounts.play(*step)
    return accounts


def over(
    account: LruAccount, namespace: str, num_bytes: int, gone: list[BlobName], *, own: bool = False
) -> bool:
    """Return whether so many more bytes break a limit, or only the quota, once `gone` are gone."""
    left = {name: entry for name, entry in account.entries.items() if name not in gone}
    total = sum(entry.num_bytes for entry in left.values()) + account.reserved.total()
    mine = sum(entry.num_bytes for name, entry in left.items() if name.namespace == namespace)
    mine += account.reserved[namespace]
    limit = min(CAPACITY, QUOTAS.get(namespace, CAPACITY))
    return mine + num_bytes > limit or (total + num_bytes > CAPACITY and not own)


@given(STEPS)
def test_limits_hold_and_bytes_add_up_whatever_happens(steps):
    accounts = Accounts()
    for step in steps:
        accounts.play(*step)
        account = accounts.account
        assert account.check_integrity() == []
        assert list(account.entries) == accounts.order
        stats = account.stats("", 0)
        assert stats.used_bytes == sum(stats.namespaces.values())
        assert all(stats.namespaces.values()), "a namespace without blobs is not listed"
        assert not over(account, "a", 0, [])


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


def planned(account: LruAccount, namespace: str, num_bytes: int) -> list[BlobName] | None:
    try:
        return account.plan(namespace, num_bytes)
    except TierExhaustedError:
        return None


@given(STEPS, NAMESPACES, st.integers(1, 120))
def test_a_plan_is_that_of_looking_at_all_entries_and_changes_nothing(steps, namespace, num_bytes):
    account = played(steps).account
    before = deepcopy((account.entries, +account.used, +account.reserved, account.evictions))
    assert planned(account, namespace, num_bytes) == simple_plan(account, namespace, num_bytes)
    assert (account.entries, +account.used, +account.reserved, account.evictions) == before


class Counted(OrderedDict):
    """Counts how often an entry is looked at."""

    looks = 0

    def __iter__(self):
        for name in super().__iter__():
            self.looks += 1
            yield name

    def items(self):
        return ((name, self[name]) for name in self)


@pytest.mark.parametrize(("namespace", "num_bytes", "evicted"), [
    ("a", 7, 7), ("b", 90, 90), ("c", 1, 1),
])  # fmt: skip
def test_a_plan_looks_at_what_it_evicts_and_at_nothing_else(namespace, num_bytes, evicted):
    account = LruAccount(20_010, {"a": 10, "b": 20_000})
    for number in range(10_000):
        account.add(BlobName("b", number.to_bytes(32, "big")), 1)
    for number in range(10):
        account.add(BlobName("a", number.to_bytes(32, "big")), 1)
        account.add(BlobName("b", (20_000 + number).to_bytes(32, "big")), 999)
    account.reserve("c", account.capacity_bytes - account.used_bytes)
    account.entries = Counted(account.entries)
    account.entries.looks = 0
    assert len(account.plan(namespace, num_bytes)) == evicted
    assert account.entries.looks <= evicted + 1


def test_a_quota_above_the_capacity_is_the_capacity():
    assert LruAccount(10, {"a": 50}).quota("a") == 10
    with pytest.raises(TierExhaustedError, match="10 bytes"):
        LruAccount(10, {"a": 50}).plan("a", 11)


def test_what_does_not_add_up_is_found():
    for change, problem in (
        (lambda account: setattr(account, "capacity_bytes", 3), "5 bytes held of 3"),
        (lambda account: setattr(account, "quotas", {"a": 3}), "over its quota"),
        (lambda account: setattr(account, "used", Counter(a=6)), "counted"),
        (lambda account: setattr(account, "reserved", Counter(b=-1)), "below zero"),
        (lambda account: account.entries.move_to_end(BlobName("a", b"")), "order"),
        (lambda account: setattr(account.entries[BlobName("a", b"")], "pins", -1), "closed more"),
    ):
        account = LruAccount(10, {"a": 6})
        account.add(BlobName("a", b""), 4)
        account.add(BlobName("a", b"2"), 1)
        assert account.check_integrity() == []
        change(account)
        assert problem in " ".join(account.check_integrity())
