"""Stores by name, imported only when they are asked for.

memory         one arena; nothing survives a restart
disk           LMDB index and a file per blob; what was committed survives
memory+disk    memory first, everything written behind to disk
mooncake       Mooncake Store: the memory of several services as one
"""

from __future__ import annotations

from kvtier.errors import UsageError
from kvtier_tierd.limits.budget import Budget
from kvtier_tierd.options import TierOptions
from kvtier_tierd.stores.base import BlobStore
from kvtier_tierd.stores.memory import MemoryStore

STORES = ("memory", "disk", "memory+disk", "mooncake")


def make_store(options: TierOptions, budget: Budget) -> BlobStore:
    """The store that the options ask for, not started. Raises UsageError for an unknown name.

    budget: of what the store reads into memory that is not its own.
    """
    if options.store not in STORES:
        raise UsageError("--store", f"one of {', '.join(STORES)}", options.store)
    if options.store == "memory":
        return _memory(options)
    if options.store == "mooncake":
        from kvtier_tierd.stores.mooncake.store import MooncakeStore

        return MooncakeStore(options.mooncake, options.quotas())
    # Before the memory is taken, which is slow and has to be undone.
    disk = _disk(options, budget)
    if options.store == "disk":
        return disk
    from kvtier_tierd.stores.layered import LayeredStore

    return LayeredStore(_memory(options), disk)


def _memory(options: TierOptions) -> MemoryStore:
    return MemoryStore(options.memory_bytes, options.quotas(), options.shared_directory)


def _disk(options: TierOptions, budget: Budget) -> BlobStore:
    from kvtier_tierd.stores.disk.store import DiskStore

    if options.disk_path is None:
        raise UsageError("--disk-path", f"a directory for --store {options.store}", None)
    return DiskStore(options.disk_path, options.disk_bytes, options.quotas(), budget=budget)
