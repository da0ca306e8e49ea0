"""Clients of the tier that is deployed: what is acknowledged, before and after SIGTERM, and what is
there later."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

from benchmarks.tier.transport.paths import Bytes
from benchmarks.tier.transport.processes import HOST
from kvtier.errors import TierError
from kvtier.tier.blobs.payload import checksum
from kvtier.tier.client import Landing, Offer, TierClient, TlsFiles
from kvtier.tier.transport.connection import open_channel
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc

NAMESPACE = "kvtier-engine"
TIMEOUT_S = 10.0


def client(address: str, tls: TlsFiles) -> TierClient:
    return TierClient(address, NAMESPACE, tls=tls, timeout_s=TIMEOUT_S, shared=False)


def asked(port: int, path: str) -> int | None:
    """The status of an answer over HTTP; None where there is none."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def scrape(port: int, names: tuple[str, ...]) -> dict[str, float]:
    """Return some of what Prometheus would get."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {one.name: one.value for family in families for one in family.samples}
    return {name: found[name] for name in names}


def refusals(address: str, tls: TlsFiles) -> dict[str, bool]:
    """Clients that must not come in, and whether they are kept out."""
    strangers: dict[str, tuple[str, TlsFiles | None]] = {
        "no certificate": (NAMESPACE, None),
        "another name than the certificate's": ("other", tls),
    }
    found = {}
    for what, (namespace, files) in strangers.items():
        with TierClient(address, namespace, tls=files, timeout_s=2.0, shared=False) as one:
            try:
                one.connect()
                found[what] = False
            except TierError:
                found[what] = True
    return found


class Writer(threading.Thread):
    """Puts one blob after the other until one is refused, which is what a drain does.

    acknowledged: positions of those whose put returned.
    """

    def __init__(self, address: str, tls: TlsFiles, data: Bytes, positions: range) -> None:
        super().__init__(name="writer")
        self._client, self._data, self._positions = client(address, tls), data, positions
        self.acknowledged: list[int] = []

    def run(self) -> None:
        with self._client as one:
            for position in self._positions:
                try:
                    one.put(self._data.blobs[position])
                except TierError:
                    return
                self.acknowledged.append(position)


class HalfPut:
    """A put whose payload comes once `go_on` is called. position: of its blob."""

    def __init__(self, address: str, tls: TlsFiles, data: Bytes, position: int) -> None:
        self.position, self._go_on = position, threading.Event()
        self._blob = data.blobs[position]
        self._channel = open_channel(address, tls)
        stub = tier_pb2_grpc.TierServiceStub(self._channel)
        self._call = stub.Put.future(self._requests(), timeout=TIMEOUT_S)

    def _requests(self) -> Iterator[pb.PutRequest]:
        blob = self._blob
        digest = checksum(blob.key, NAMESPACE, blob.layout, blob.payload)
        yield pb.PutRequest(
            header=pb.BlobHeader(
                key=blob.key, num_bytes=blob.num_bytes, layout=blob.layout, checksum=digest
            )
        )
        self._go_on.wait(TIMEOUT_S)
        for piece in blob.payload:
            yield pb.PutRequest(chunk=bytes(piece))

    def go_on(self) -> bool:
        """Go on with the put, and return whether it was acknowledged."""
        self._go_on.set()
        done = self._call.exception() is None and bool(self._call.result().stored)
        self._channel.close()
        return done


def missing_and_corrupt(
    address: str, tls: TlsFiles, data: Bytes, positions: list[int]
) -> tuple[int, int]:
    """Return how many of the blobs at these positions are not there, and how many are other
    bytes."""
    data.landing[:] = 1
    with client(address, tls) as one:
        one.connect()
        outcome = one.get(data.keys, data.land, data.num_bytes)
    landed = [position for position in positions if outcome[position] is Landing.LANDED]
    wrong = [
        position
        for position in landed
        if bytes(data.blobs[position].payload[0])
        != bytes(data.land(Offer(position, data.blob_bytes, b"")))
    ]
    return len(positions) - len(landed), len(wrong)
