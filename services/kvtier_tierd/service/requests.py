"""Parts of several calls: checks of what requests say, limits of what one may ask for, and work on
pinned blobs in threads, which the caller that unpins waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sized
from typing import TypeVar

from kvtier.errors import TierExhaustedError, UsageError
from kvtier.tier.blobs.keys import KEY_BYTES
from kvtier.tier.blobs.payload import CHECKSUM_BYTES, MAX_LAYOUT_BYTES, verifies
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.stores.base import BlobInfo, BlobName, Handle

# The most keys of blobs that one call may open, lease or delete.
MAX_HELD_KEYS = 1 << 12
# Other calls have a turn after so many keys were opened or leased.
HELD_KEYS_A_TURN = 1 << 6

Result = TypeVar("Result")


def check_count(field: str, values: Sized, most: int = MAX_HELD_KEYS) -> None:
    """Raises UsageError for a field of a request that has more values than a call may."""
    if len(values) > most:
        raise UsageError(field, f"at most {most}", len(values))


def names_of(namespace: str, keys: Iterable[bytes]) -> list[BlobName]:
    """Raises UsageError for a key of another length than KEY_BYTES."""
    names = [BlobName(namespace, key) for key in keys]
    for name in names:
        if len(name.key) != KEY_BYTES:
            raise UsageError("keys", f"{KEY_BYTES} bytes each", f"{len(name.key)}")
    return names


def info_of(header: pb.BlobHeader, max_blob_bytes: int) -> BlobInfo:
    """Raises TierExhaustedError for a blob of more than `max_blob_bytes`, UsageError for a header
    that makes no sense."""
    if header.num_bytes > max_blob_bytes:
        raise TierExhaustedError(
            f"a blob of {header.num_bytes} bytes; at most {max_blob_bytes} are allowed"
        )
    if header.num_bytes < 1:
        raise UsageError("num_bytes", "at least 1", header.num_bytes)
    if len(header.layout) > MAX_LAYOUT_BYTES:
        raise UsageError("layout", f"at most {MAX_LAYOUT_BYTES} bytes", len(header.layout))
    if len(header.checksum) != CHECKSUM_BYTES:
        raise UsageError("checksum", f"{CHECKSUM_BYTES} bytes", len(header.checksum))
    return BlobInfo(header.num_bytes, header.layout, header.checksum)


def header_of(key: bytes, info: BlobInfo) -> pb.BlobHeader:
    return pb.BlobHeader(
        key=key, num_bytes=info.num_bytes, layout=info.layout, checksum=info.checksum
    )


async def yield_to_loop(number: int) -> None:
    """Let the event loop turn now and then. The caller numbers its keys and calls this for each."""
    if number % HELD_KEYS_A_TURN == 0:
        await asyncio.sleep(0)


async def await_uncancelled(work: Awaitable[Result]) -> Result:
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
    return await await_uncancelled(asyncio.to_thread(verifies, *known))
