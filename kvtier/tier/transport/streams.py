"""Payloads in chunks over a stream, to any service and from any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.payload import Bytes
from kvtier.tier.transport.connection import Connection, Deadline
from kvtier.tier.transport.landing import Arriving, Land, Landing
from kvtier.tier.wire import error_of, frame_chunk
from kvtier.v1 import tier_pb2 as pb


def stream_put(
    connection: Connection,
    header: pb.BlobHeader,
    payload: Sequence[Bytes],
    chunk_bytes: int,
    deadline: Deadline,
    *,
    replace: bool,
) -> bool:
    """Store one blob; False where it is held already. Raises TierError."""

    def requests() -> Iterator[pb.PutRequest | bytes]:
        yield pb.PutRequest(header=header, replace=replace)
        for piece in payload:
            view = memoryview(piece).cast("B")
            for begin in range(0, len(view), chunk_bytes):
                yield frame_chunk(view[begin : begin + chunk_bytes])

    response: pb.PutResponse = connection.call(connection.stub.Put, requests(), deadline)
    return response.stored


def stream_get(
    connection: Connection,
    wanted: Sequence[int],
    keys: Sequence[bytes],
    land: Land,
    deadline: Deadline,
    outcome: list[Landing],
) -> None:
    """Get the blobs at the `wanted` positions of `keys`, and set their outcomes. Raises TierError.

    A blob whose outcome is not set is missing.
    """
    request = pb.GetRequest(keys=[keys[position] for position in wanted])
    positions = iter(wanted)
    arriving: Arriving | None = None
    for response in _responses(connection, request, deadline):
        if isinstance(response, memoryview):
            if arriving is None:
                raise TierProtocolError(f"tier {connection.address}: a chunk of nothing")
            arriving.add(response)
            continue
        part = response.WhichOneof("part")
        if arriving is not None:
            outcome[arriving.position] = arriving.finish()
            arriving = None
        position = next(positions, None)
        key = response.missing if part == "missing" else response.header.key
        if position is None or key != keys[position]:
            raise TierProtocolError(f"tier {connection.address}: a blob that was not asked for")
        if part == "header":
            arriving = Arriving(position, response.header, connection.namespace, land)
    if arriving is not None:
        outcome[arriving.position] = arriving.finish()


def _responses(
    connection: Connection, request: pb.GetRequest, deadline: Deadline
) -> Iterator[pb.GetResponse | memoryview]:
    call = connection.call(connection.stub.Get, request, deadline)
    try:
        yield from call
    except grpc.RpcError as error:
        raise error_of(error, connection.address) from error
    finally:
        call.cancel()
