"""The stage of the tests of the distributed store, which play a scenario on one store of a
mooncake_master."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from mooncake_master import MIB, MooncakeMaster
from store_blobs import blob_name, payload_of, put

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore

TIMEOUT_S = 2.0
SEGMENT = 16 * MIB
prefixes = (f"test-{number}" for number in itertools.count())


def options_of(master: MooncakeMaster, prefix: str = "", **others: Any) -> MooncakeOptions:
    """Return the options of a small service; with a prefix of its own unless it is to share one."""
    given = {"segment_bytes": SEGMENT, "buffer_bytes": 64 * MIB, "timeout_s": TIMEOUT_S} | others
    return MooncakeOptions(master=master.address, prefix=prefix or next(prefixes), **given)


@asynccontextmanager
async def opened(options: MooncakeOptions, quotas: Any = None) -> Any:
    store = MooncakeStore(options, quotas)
    try:
        await store.start()
        yield store
        assert store.check_integrity() == []
    finally:
        await store.close()


def play(options: MooncakeOptions, scenario: Callable[[MooncakeStore], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with opened(options) as store:
            return await scenario(store)

    return asyncio.run(run())


async def puts(store: MooncakeStore, number: int, num_bytes: int = MIB) -> bool:
    """Return whether a put works, which may fail as the interface allows only."""
    try:
        await put(store, blob_name(number), payload_of(number, num_bytes))
    except (TierUnavailableError, TierExhaustedError):
        return False
    return True
