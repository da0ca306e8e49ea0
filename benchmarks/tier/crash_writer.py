"""The process that benchmarks.tier.crash kills: fills a disk store and says what it is doing.

    python -m benchmarks.tier.crash_writer DIRECTORY CAPACITY_BYTES SEED

Lines on stdout, each written before the next thing happens:

    opening                      the store is about to start
    ready                        it has started
    put NUMBER VERSION BYTES     a blob is about to be put or replaced
    delete NUMBER                ... or deleted
    done NUMBER                  and now that has returned

Several tasks write at once, never two of them the same blob.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import struct
import sys
from pathlib import Path

import xxhash

from kvtier_tierd.stores.base import BlobInfo, BlobName
from kvtier_tierd.stores.disk.store import DiskStore

WRITERS = 4
BLOBS_PER_WRITER = 40
LEAST_BYTES, MOST_BYTES = 64, 1 << 20
DELETED_SHARE = 0.1

_HEADER = struct.Struct("<QQ")
_NOISE = random.Random(0).randbytes(2 * MOST_BYTES)


def blob_name(number: int) -> BlobName:
    return BlobName("crash", number.to_bytes(32, "big"))


def make_payload(number: int, version: int, num_bytes: int) -> bytes:
    """Bytes that say what they are, different for every version."""
    begin = version % MOST_BYTES
    return _HEADER.pack(number, version) + _NOISE[begin : begin + num_bytes - _HEADER.size]


def read_header(payload: memoryview) -> tuple[int, int]:
    """Number and version of a payload."""
    number, version = _HEADER.unpack_from(payload)
    return number, version


async def fill(directory: Path, capacity_bytes: int, seed: int) -> None:
    """Write until killed."""
    say("opening")
    store = DiskStore(directory, capacity_bytes)
    await store.start()
    say("ready")
    await asyncio.gather(*(write(store, writer, seed) for writer in range(WRITERS)))


async def write(store: DiskStore, writer: int, seed: int) -> None:
    chance = random.Random(f"{seed}/{writer}")
    while True:
        number = writer + WRITERS * chance.randrange(BLOBS_PER_WRITER)
        if chance.random() < DELETED_SHARE:
            say(f"delete {number}")
            await store.delete(blob_name(number))
        else:
            version = chance.getrandbits(63)
            num_bytes = int(math.exp(chance.uniform(math.log(LEAST_BYTES), math.log(MOST_BYTES))))
            payload = make_payload(number, version, num_bytes)
            info = BlobInfo(num_bytes, b"crash", xxhash.xxh3_128_digest(payload))
            say(f"put {number} {version} {num_bytes}")
            draft = await store.reserve(blob_name(number), info)
            draft.buffer[:] = payload
            await store.commit(draft)
        say(f"done {number}")


def say(line: str) -> None:
    """Unbuffered: what was said stays said when the process is killed."""
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(fill(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
