"""Every store of the registry does what any store must do, and is told what it is by its flags."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import test_memory_store
import test_mooncake_store
from store_contract import StoreContract

from kvtier.errors import UsageError
from kvtier_tierd.cli import parse
from kvtier_tierd.limits import Budget
from kvtier_tierd.stores.base import BlobStore, StoreResources
from kvtier_tierd.stores.disk.store import DiskStore
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore
from kvtier_tierd.stores.options import DIRECTORY, SIZE
from kvtier_tierd.stores.registry import STORES, make_store, parse_store, store_flags


class TestDiskStoreContract(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        return DiskStore(directory / "disk", capacity_bytes, quotas)


# These stores are held to the contract here and in files of their own, made with more than their
# flags say: nothing may be evicted ahead of time, no test shall wait for a disk, and Mooncake wants
# a master.
CONTRACTS = {
    "memory": test_memory_store.TestMemoryStoreContract,
    "disk": TestDiskStoreContract,
    "memory+disk": test_memory_store.TestLayeredStoreContractWhileNothingGetsToDisk,
    "mooncake": test_mooncake_store.TestMooncakeStoreContract,
}


def typed_flags(**typed: str) -> dict[str, str | None]:
    """Return what the command line hands over where only these are typed."""
    given = {f"--{name.replace('_', '-')}": text for name, text in typed.items()}
    return dict.fromkeys(store_flags()) | given


def registered(
    kind: str, directory: Path, capacity_bytes: int, quotas: Mapping[str, int] | None
) -> BlobStore:
    """A store as its flags make it: every size is the capacity, every directory a new one."""
    typed = typed_flags()
    for flag in STORES[kind].options_type.flags().values():
        if flag.type is SIZE:
            typed[flag.name] = str(capacity_bytes)
        elif flag.type is DIRECTORY:
            typed[flag.name] = str(directory / flag.name)
    resources = StoreResources(quotas or {}, None, Budget(sys.maxsize))
    return make_store(parse_store(kind, typed), resources)


def contract_of(kind: str) -> type[StoreContract]:
    class Contract(StoreContract):
        @staticmethod
        def make_store(directory, capacity_bytes, quotas):
            return registered(kind, directory, capacity_bytes, quotas)

    Contract.__name__ = Contract.__qualname__ = f"TestContractOf_{kind}"
    return Contract


# A store that has no file of tests is held to the contract here.
globals().update(
    {one.__name__: one for one in (contract_of(kind) for kind in STORES if kind not in CONTRACTS)}
)


@pytest.mark.parametrize("kind", sorted(STORES))
def test_a_store_is_made_of_its_flags_and_without_them_of_its_defaults(kind, tmp_path):
    assert parse_store(kind, typed_flags()) == STORES[kind].options_type()
    assert all(issubclass(contract, StoreContract) for contract in CONTRACTS.values())
    assert CONTRACTS.keys() <= STORES.keys()
    if kind == "mooncake":
        return  # wants a master
    store = registered(kind, tmp_path, 1 << 20, {"a": 5})
    assert type(store) is STORES[kind]
    assert store.kind == store.stats().kind == kind
    assert store.stats().capacity_bytes == 1 << 20
    if kind in CONTRACTS:
        assert type(CONTRACTS[kind].make_store(tmp_path, 1 << 20, None)) is STORES[kind]


def test_an_unknown_store_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(UsageError, match="memory, disk, memory\\+disk, mooncake"):
        parse(["--shared-memory=off", "--store=tape"])


def test_a_package_that_is_not_installed_is_said_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--store.*pip install mooncake-transfer-engine"):
        MooncakeStore(MooncakeOptions())
