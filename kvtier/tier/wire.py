"""The conventions of both ends of a connection besides the messages of proto/kvtier/v1/tier.proto:
versions and limits, chunks of payload without a message around them, and the gRPC status codes that
stand for errors.

A chunk is most of what a Put or a Get moves, and building and parsing a message costs it two more
copies. Field 2 of PutRequest and of GetResponse, which is all that such a message has, is

    0x12 | varint(len(payload)) | payload

and these are the bytes that protobuf makes of it, too: the other end may be any gRPC program.
Whatever does not look exactly like that is left to protobuf.

A status that has no code of ours means that the tier is unavailable: a deadline, a lost connection,
a service that dies. So does a TLS handshake that fails, whichever of the two is not content with
the other's certificate. A client cannot tell a server that hung up on its certificate from one that
hung up, and either is over, with nothing done here, once certificates are renewed there.
TierRefusedError is for a client that was let in and may not do what it asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvtier.errors import (
    KvtierError,
    TierError,
    TierExhaustedError,
    TierIntegrityError,
    TierProtocolError,
    TierRefusedError,
    TierUnavailableError,
    UsageError,
)
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc

PROTOCOL_VERSION = 1

# The metadata key of a call's namespace without TLS; with it, the certificate says who is calling.
NAMESPACE_METADATA = "kvtier-namespace"
DEFAULT_NAMESPACE = "default"

# The file that clients on the same host map is called so, and begins with a random token.
SHARED_FILE_PREFIX = "kvtier-tier-"
SHARED_TOKEN_BYTES = 16

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 20
# The most bytes of a message without a payload: one that names many blobs.
MAX_NAMES_BYTES = 4 << 20
# The most bytes around the payload of a message: header, layout and framing.
MESSAGE_OVERHEAD_BYTES = 64 << 10

# The most keys of one Exists.
MAX_KEYS = 1 << 16

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TierService"].full_name
Parsed = TypeVar("Parsed", pb.PutRequest, pb.GetResponse)

# Field 2, length-delimited.
CHUNK_TAG = b"\x12"
# The bytes of a length below 2**35; protobuf knows no longer ones.
MAX_VARINT_BYTES = 5

_CODES: dict[type[KvtierError], grpc.StatusCode] = {
    TierExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TierIntegrityError: grpc.StatusCode.DATA_LOSS,
    TierRefusedError: grpc.StatusCode.PERMISSION_DENIED,
    TierProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    TierUnavailableError: grpc.StatusCode.UNAVAILABLE,
    UsageError: grpc.StatusCode.INVALID_ARGUMENT,
}
_ERRORS: dict[grpc.StatusCode, type[TierError]] = {
    **{code: kind for kind, code in _CODES.items() if issubclass(kind, TierError)},
    grpc.StatusCode.UNAUTHENTICATED: TierRefusedError,
    grpc.StatusCode.INVALID_ARGUMENT: TierProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: TierProtocolError,
    grpc.StatusCode.OUT_OF_RANGE: TierProtocolError,
}


def shared_digest(token: bytes) -> bytes:
    """Return what a server says of the token that its shared file begins with: who can read the
    file knows that it is this one, and nobody else learns the token."""
    return hashlib.sha256(token).digest()


def check_version(theirs: int, address: str) -> None:
    """Raise TierProtocolError unless a server speaks PROTOCOL_VERSION."""
    if theirs != PROTOCOL_VERSION:
        raise TierProtocolError(
            f"tier {address} speaks protocol version {theirs}, this is {PROTOCOL_VERSION}"
        )


def negotiate(theirs: Iterable[int]) -> int:
    """The version that a server answers a client with; one that says nothing gets ours.

    Raises TierProtocolError where there is none in common.
    """
    offered = list(theirs)
    if offered and PROTOCOL_VERSION not in offered:
        raise TierProtocolError(f"protocol version {PROTOCOL_VERSION} only, not {offered}")
    return PROTOCOL_VERSION


def frame_chunk(payload: bytes | bytearray | memoryview) -> bytes:
    """The message that has this chunk, serialized. payload: 1-D, of bytes; copied once."""
    return b"".join((CHUNK_TAG, _varint(len(payload)), payload))


def chunk_of(message: bytes) -> memoryview | None:
    """The chunk of a serialized message that is nothing else, not copied; else None."""
    if message[:1] != CHUNK_TAG:
        return None
    size = 0
    for at in range(1, min(len(message), 1 + MAX_VARINT_BYTES)):
        size |= (message[at] & 0x7F) << 7 * (at - 1)
        if message[at] < 0x80:
            return memoryview(message)[at + 1 :] if at + 1 + size == len(message) else None
    return None


def serialize(message: Message | bytes) -> bytes:
    """Return the bytes that gRPC sends of a message, or of what `frame_chunk` made."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _parser(kind: type[Parsed]) -> Callable[[bytes], Parsed | memoryview]:
    """Return what parses a message, or gives the chunk of one that has a chunk. It raises
    DecodeError."""

    def parse(message: bytes) -> Parsed | memoryview:
        chunk = chunk_of(message)
        if chunk is not None:
            return chunk
        # Another program may have made it, with fields that we do not know, say.
        parsed = kind.FromString(message)
        return memoryview(parsed.chunk) if parsed.WhichOneof("part") == "chunk" else parsed

    return parse


parse_put_request = _parser(pb.PutRequest)
parse_get_response = _parser(pb.GetResponse)


def frame_stub(stub: tier_pb2_grpc.TierServiceStub, channel: grpc.Channel) -> None:
    """Let a stub send and yield chunks as they are: Put takes messages and what `frame_chunk`
    made, Get yields messages and memoryviews."""
    stub.Put = channel.stream_unary(
        f"/{SERVICE_NAME}/Put",
        request_serializer=serialize,
        response_deserializer=pb.PutResponse.FromString,
    )
    stub.Get = channel.unary_stream(
        f"/{SERVICE_NAME}/Get",
        request_serializer=pb.GetRequest.SerializeToString,
        response_deserializer=parse_get_response,  # type: ignore[arg-type]
    )


def framed_handlers(
    servicer: tier_pb2_grpc.TierServiceServicer,
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The other end of it, for a server to register instead of the generated ones: Get writes
    messages and what `frame_chunk` made, Put reads messages and memoryviews."""
    return {
        "Put": grpc.stream_unary_rpc_method_handler(
            servicer.Put,
            request_deserializer=parse_put_request,
            response_serializer=pb.PutResponse.SerializeToString,
        ),
        "Get": grpc.unary_stream_rpc_method_handler(
            servicer.Get,
            request_deserializer=pb.GetRequest.FromString,
            response_serializer=serialize,
        ),
    }


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def error_of(error: grpc.RpcError, address: str) -> TierError:
    """Return the error that a client raises for a failed call."""
    code, details = error.code(), error.details()
    kind = _ERRORS.get(code, TierUnavailableError)
    return kind(f"tier {address}: {code.name.lower()}: {details}")


def code_of(error: KvtierError) -> grpc.StatusCode:
    """Return the status code of the service's answer to an error; a bug, which is no KvtierError,
    never gets here."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL
