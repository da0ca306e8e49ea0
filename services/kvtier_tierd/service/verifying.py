"""Work on pinned blobs in threads: the caller that unpins waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from kvtier.tier.blobs.payload import verifies
from kvtier_tierd.stores.base import BlobName, Handle

Result = TypeVar("Result")


async def undisturbed(work: Awaitable[Result]) -> Result:
    """Return a thread's result, even when the call is over: the thread reads what is unpinned
    afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def is_intact(name: BlobName, handle: Handle) -> bool:
    """Return whether the store holds what was put under this name."""
    info = handle.info
    known = info.checksum, name.key, name.namespace, info.layout, handle.pieces
    return await undisturbed(asyncio.to_thread(verifies, *known))


__all__ = ["is_intact", "undisturbed"]
