"""A neighbour without manners: more transfers at a time than its namespace may have, no pauses.

    python -m benchmarks.tier.transport.hammer ADDRESS NAMESPACE BLOB_BYTES

Puts run into the quota, where the oldest blobs go, every other call is one too many and refused,
and streams are as fast as the namespace may be. It ends with its standard input.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence

from kvtier.errors import TierError
from kvtier.tier.blobs.payload import record_layout
from kvtier.tier.client import Blob, TierClient

IN_FLIGHT = 2
THREADS = 2 * IN_FLIGHT
QUOTA_BLOBS = 4


def main(argv: Sequence[str]) -> int:
    address, namespace, size = argv[0], argv[1], int(argv[2])
    stopping = threading.Event()
    with TierClient(address, namespace, timeout_s=10.0, shared=False) as client:
        client.connect()
        threads = [
            threading.Thread(target=hammer, args=(client, size, number, stopping))
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        print("hammering", flush=True)
        sys.stdin.read()
        stopping.set()
        for thread in threads:
            thread.join()
    return 0


def hammer(client: TierClient, size: int, number: int, stopping: threading.Event) -> None:
    """Put a blob and get it back, as fast as it goes."""
    payload, layout, landed = bytes(size), record_layout("hammer"), bytearray(size)
    for turn in itertools.count():
        if stopping.is_set():
            return
        key = (number * QUOTA_BLOBS + turn % QUOTA_BLOBS).to_bytes(32, "big")
        try:
            client.put(Blob(key, layout, [payload]), replace=True)
            client.get([key], lambda offer: memoryview(landed), size)
        except TierError:
            # Refused, as is right.
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
