"""The speed of bytes, by path; every path's seconds over the same bytes, round after round."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tier.transport.echo import EchoClient
from kvtier.errors import TierIntegrityError
from kvtier.tier.blobs.payload import Digest, record_layout
from kvtier.tier.client import Blob, Landing, Offer, TierClient

LAYOUT = record_layout("bench")

# Moves the bytes once and returns the seconds that took.
Path = Callable[[], float]


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Bytes:
    """`count` blobs of random bytes, their keys, and room for them to land."""

    def __init__(self, blob_bytes: int, count: int, seed: int) -> None:
        self.blob_bytes, self.count = blob_bytes, count
        self.source = np.random.default_rng(seed).integers(0, 256, self.num_bytes, dtype=np.uint8)
        self.landing = np.ones(self.num_bytes, dtype=np.uint8)
        self.keys = [hashlib.sha256(f"{blob_bytes}/{i}".encode()).digest() for i in range(count)]
        self.blobs = [
            Blob(key, LAYOUT, [self._part(self.source, i)]) for i, key in enumerate(self.keys)
        ]

    @property
    def num_bytes(self) -> int:
        return self.blob_bytes * self.count

    def _part(self, array: NDArray[np.uint8], position: int) -> memoryview:
        return array.data[position * self.blob_bytes : (position + 1) * self.blob_bytes]

    def land(self, offer: Offer) -> memoryview:
        return self._part(self.landing, offer.position)

    def memcpy(self) -> float:
        return seconds(lambda: np.copyto(self.landing, self.source))

    def put(self, client: TierClient) -> float:
        """All of them, which are not held before."""
        client.delete(self.keys)
        began = time.perf_counter()
        stored = [client.put(blob) for blob in self.blobs]
        taken = time.perf_counter() - began
        if not all(stored):
            raise TierIntegrityError("a put that stored nothing")
        return taken

    def get(self, client: TierClient) -> float:
        """All of them in one call, verified as ever and then compared, too."""
        self.landing[:: self.blob_bytes] ^= 1
        began = time.perf_counter()
        landed = client.get(self.keys, self.land, self.num_bytes)
        taken = time.perf_counter() - began
        if {*landed} != {Landing.LANDED} or not np.array_equal(self.landing, self.source):
            raise TierIntegrityError("a get that landed something else")
        return taken


def throughput_paths(
    data: Bytes, stream: TierClient, shared: TierClient, tls: TierClient, echo: EchoClient
) -> dict[str, Path]:
    """All paths. A get comes some time after a put of the same client, so it finds its blobs."""

    def echo_put() -> None:
        for _ in range(data.count):
            echo.echo_put(data.blob_bytes)

    return {
        "memcpy": data.memcpy,
        "shared put": lambda: data.put(shared),
        "shared get": lambda: data.get(shared),
        "stream put": lambda: data.put(stream),
        "stream get": lambda: data.get(stream),
        "tls put": lambda: data.put(tls),
        "tls get": lambda: data.get(tls),
        "echo put": lambda: seconds(echo_put),
        "echo get": lambda: seconds(lambda: echo.echo_get(data.blob_bytes, data.count)),
    }


def checksum_paths(data: Bytes, stream: TierClient, shared: TierClient) -> dict[str, Path]:
    """Return the paths whose checksum's share is asked for; each returns that share instead of
    seconds."""
    return {
        "stream put": lambda: digest_share(lambda: data.put(stream)),
        "stream get": lambda: digest_share(lambda: data.get(stream)),
        "shared put": lambda: digest_share(lambda: data.put(shared)),
        "shared get": lambda: digest_share(lambda: data.get(shared)),
    }


def in_rounds(paths: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Return what every path returned in every round, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in paths}
    names = list(paths)
    for number in range(-1, rounds):
        # Another one first every time, so that a machine that gets slower favours none; in the
        # order given, so that what was put is there.
        first = max(number, 0) % len(names)
        for name in names[first:] + names[:first]:
            value = paths[name]()
            if number >= 0:
                found[name].append(value)
    return found


def digest_share(call: Path) -> float:
    """The share of a call's seconds that the checksum takes, of client and caller together."""
    with digest_seconds() as spent:
        taken = call()
    return sum(spent) / taken


@contextmanager
def digest_seconds() -> Iterator[list[float]]:
    """Time every `Digest.update` of this process while the block runs."""
    original, spent = Digest.update, []

    def update(self: Digest, piece: Any) -> None:
        began = time.perf_counter()
        original(self, piece)
        spent.append(time.perf_counter() - began)

    Digest.update = update  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Digest.update = original  # type: ignore[method-assign]


def paired(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return how many times as fast as the baseline it is, round by round."""
    return [b / m for m, b in zip(mine, base, strict=True)]
