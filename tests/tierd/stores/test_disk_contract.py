"""The disk store does what any store must do."""

from __future__ import annotations

from store_contract import StoreContract

from kvtier_tierd.stores.disk.store import DiskStore


class TestDiskStoreContract(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        return DiskStore(directory / "disk", capacity_bytes, quotas, sync=False)
