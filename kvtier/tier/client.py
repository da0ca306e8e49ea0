"""A blocking client of one tier service.

Every method has a deadline, for all that it asks of the service together, and raises a TierError;
kvtier.tier.link decides what to do about it (nothing, mostly). Thread-safe.

Payloads never pass through memory that the caller did not choose: `get` lands them in buffers that
it names, and checks them there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.errors import TierProtocolError, TierRefusedError
from kvtier.tier.blobs.payload import Bytes, checksum
from kvtier.tier.transport.connection import Connection, Deadline, TlsFiles, TlsPaths
from kvtier.tier.transport.landing import Land, Landing, Offer
from kvtier.tier.transport.shared import SharedGets, shared_put
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier.tier.transport.streams import stream_get, stream_put
from kvtier.tier.wire import (
    DEFAULT_NAMESPACE,
    MAX_CHUNK_BYTES,
    MAX_KEYS,
    MIN_CHUNK_BYTES,
    PROTOCOL_VERSION,
    check_version,
    shared_digest,
)
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc

CHUNK_BYTES = 1 << 20


class Blob(NamedTuple):
    """A blob to put. payload: pieces that follow each other."""

    key: bytes
    layout: bytes
    payload: Sequence[Bytes]

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(piece).nbytes for piece in self.payload)


class Presence(NamedTuple):
    """leading_run: how many keys from the first on are held; present: which of them all."""

    leading_run: int
    present: list[bool]


class TierClient:
    """One client of one service.

    address:   host:port or unix:/path; every call raises TierRefusedError while the socket there is
               neither this user's nor root's.
    namespace: whose blobs, printable ASCII; under TLS it must be the certificate's common name,
               because checksums are over it, and may be anything.
    tls:       paths are read again by a `connect` after which they changed; files never are.
    timeout_s: of a method that moves no payload; those that do get `bytes / slowest` more.
    shared:    whether to move payloads through shared memory where the service offers it here.
    interceptors: gRPC's, around every call; those of kvtier.tier.transport.tracing, say.
    """

    def __init__(
        self,
        address: str,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        timeout_s: float = 1.0,
        slowest_bytes_per_s: float = 100e6,
        tls: TlsFiles | TlsPaths | None = None,
        shared: bool = True,
        interceptors: Sequence[Any] = (),
    ) -> None:
        self.address, self.namespace = address, namespace
        self.timeout_s, self.slowest_bytes_per_s = timeout_s, slowest_bytes_per_s
        self._connection = Connection(address, namespace, tls, interceptors)
        self._wants_shared = shared
        self._shared: SharedMemory | None = None
        self._mapping = threading.Lock()
        self._chunk_bytes = CHUNK_BYTES
        self._shared_gets = SharedGets(self._connection)

    def __enter__(self) -> TierClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the calls under way, too: they raise TierUnavailableError, as later ones do.

        What was read is given back before, if that is a matter of a moment.
        """
        self._shared_gets.close()
        self._connection.close()
        self._shared = None

    @property
    def shares_memory(self) -> bool:
        """Return whether payloads go through shared memory, as of the last `connect`."""
        return self._shared is not None

    # -- calls --

    def connect(self) -> pb.GetServerInfoResponse:
        """Ask who is there and map its memory where that is possible; again after every failure.

        Raises TierProtocolError where the service speaks another version, and TierRefusedError
        where it takes this client for another namespace.
        """
        self._connection.renew()
        request = pb.GetServerInfoRequest(protocol_versions=[PROTOCOL_VERSION])
        info: pb.GetServerInfoResponse = self._call(self._stub.GetServerInfo, request)
        check_version(info.protocol_version, self.address)
        if info.namespace != self.namespace:
            raise TierRefusedError(
                f"tier {self.address} knows this client as {info.namespace!r}, not as "
                f"{self.namespace!r}"
            )
        self._chunk_bytes = min(max(info.chunk_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        self._map(info)
        return info

    def _map(self, info: pb.GetServerInfoResponse) -> None:
        with self._mapping:
            mapped = self._shared
            if mapped is not None and shared_digest(mapped.token) == info.shared_token:
                return
            self._shared = None
            if self._wants_shared and info.shared_path:
                self._shared = SharedMemory.open(
                    info.shared_path, info.shared_bytes, info.shared_token
                )

    def exists(self, keys: Sequence[bytes]) -> Presence:
        """Ask which blobs are held, and return that."""
        deadline, run = self.deadline(), 0
        present: list[bool] = []
        for begin in range(0, len(keys) or 1, MAX_KEYS):
            part = self._exists(keys[begin : begin + MAX_KEYS], deadline)
            if run == begin:
                run += part.leading_run
            present += part.present
        return Presence(run, present)

    def put(self, blob: Blob, *, replace: bool = False) -> bool:
        """Store one blob; False where it is held already. `replace` stores it even then."""
        header = pb.BlobHeader(
            key=blob.key,
            num_bytes=blob.num_bytes,
            layout=blob.layout,
            checksum=checksum(blob.key, self.namespace, blob.layout, blob.payload),
        )
        deadline = self.deadline(header.num_bytes)
        shared, payload = self._shared, blob.payload
        if shared is not None and not replace:
            return shared_put(self._connection, shared, header, payload, deadline)
        return stream_put(
            self._connection, header, payload, self._chunk_bytes, deadline, replace=replace
        )

    def get(self, keys: Sequence[bytes], land: Land, num_bytes: int) -> list[Landing]:
        """Read blobs into the buffers that `land` names, and verify them there.

        num_bytes: about how many are expected in all; sets the deadline.
        A blob that does not verify is reported to the service, which looks at its own copy. On an
        error the buffers hold anything; blobs that landed before it are not said to have.
        """
        deadline = self.deadline(num_bytes)
        outcome = [Landing.MISSING] * len(keys)
        shared, streamed = self._shared, list(range(len(keys)))
        if shared is not None:
            streamed = self._shared_gets.get(shared, keys, land, deadline, outcome)
        if streamed or shared is None:
            stream_get(self._connection, streamed, keys, land, deadline, outcome)
        corrupt = [key for key, one in zip(keys, outcome, strict=True) if one is Landing.CORRUPT]
        if corrupt:
            # Best effort: the next reader of the blob will report it again.
            request = pb.QuarantineRequest(keys=corrupt)
            self._connection.call_quietly(self._connection.stub.Quarantine, request, deadline)
        return outcome

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget blobs; returns how many there were."""
        response: pb.DeleteResponse = self._call(self._stub.Delete, pb.DeleteRequest(keys=keys))
        return response.deleted

    def stats(self) -> pb.StatsResponse:
        response: pb.StatsResponse = self._call(self._stub.Stats, pb.StatsRequest())
        return response

    # -- below --

    def deadline(self, num_bytes: int = 0) -> Deadline:
        """The deadline of a method that moves this many bytes."""
        return Deadline(self.timeout_s + num_bytes / self.slowest_bytes_per_s)

    def _exists(self, keys: Sequence[bytes], deadline: Deadline) -> Presence:
        """Ask for as many keys as one call may have."""
        response: pb.ExistsResponse = self._connection.call(
            self._stub.Exists, pb.ExistsRequest(keys=keys), deadline
        )
        if len(response.present) != (len(keys) + 7) // 8:
            raise TierProtocolError(f"tier {self.address}: an answer for other keys than asked")
        present = [bool(response.present[i // 8] >> i % 8 & 1) for i in range(len(keys))]
        run = response.leading_run
        if run > len(keys) or not all(present[:run]):
            raise TierProtocolError(f"tier {self.address}: an answer that contradicts itself")
        return Presence(run, present)

    @property
    def _stub(self) -> tier_pb2_grpc.TierServiceStub:
        return self._connection.stub

    def _call(self, method: Any, request: Any) -> Any:
        return self._connection.call(method, request, self.deadline())


__all__ = [
    "Blob",
    "Deadline",
    "Land",
    "Landing",
    "Offer",
    "Presence",
    "TierClient",
    "TlsFiles",
    "TlsPaths",
]
