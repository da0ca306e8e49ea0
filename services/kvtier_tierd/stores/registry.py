"""The stores that `kvtier tier --store` knows. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.errors import UsageError
from kvtier_tierd.stores.base import BlobStore, StoreResources
from kvtier_tierd.stores.disk.store import DiskStore
from kvtier_tierd.stores.layered import LayeredStore
from kvtier_tierd.stores.memory import MemoryStore
from kvtier_tierd.stores.mooncake.store import MooncakeStore
from kvtier_tierd.stores.options import Flag, StoreOptions

STORES: dict[str, type[BlobStore]] = {
    store.options_type.kind: store
    for store in (
        MemoryStore,
        DiskStore,
        LayeredStore,
        MooncakeStore,
    )
}


def make_store(options: StoreOptions, resources: StoreResources) -> BlobStore:
    """The store that the options are of, not started. Raises KvtierError where it cannot be had."""
    return STORES[options.kind].make(options, resources)


def store_flags() -> dict[str, Flag]:
    """The flags of all stores, by their names; stores that are told the same share a flag."""
    flags: dict[str, Flag] = {}
    for store in STORES.values():
        for given in store.options_type.flags().values():
            known = flags.setdefault(given.name, given)
            assert known == given, f"two stores mean different things by {given.name}"
    return flags


def parse_store(kind: str, typed: Mapping[str, str | None]) -> StoreOptions:
    """The options of the store called `kind`.

    typed: by the names of `store_flags`; None: not typed.
    Raises UsageError for an unknown store, and naming the flag for a value that makes no sense and
    for a flag of other stores.
    """
    options = {name: store.options_type.parse(typed) for name, store in STORES.items()}
    if kind not in options:
        raise UsageError("--store", f"one of {', '.join(STORES)}", kind)
    for flag, text in typed.items():
        having = [name for name in STORES if flag in _flags_of(name)]
        if text is not None and kind not in having:
            raise UsageError(flag, f"--store {' or '.join(having)} beside it", kind)
    return options[kind]


def _flags_of(kind: str) -> set[str]:
    return {flag.name for flag in STORES[kind].options_type.flags().values()}
