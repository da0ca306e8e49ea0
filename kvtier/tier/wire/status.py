"""Tier errors and gRPC status codes, one table for both ends of the wire.

What has no code of ours means that the tier is unavailable: a deadline, a lost connection, a
service that dies. So does a TLS handshake that fails, whichever of the two is not content with the
other's certificate. A client cannot tell a server that hung up on its certificate from one that
hung up, and either is over, with nothing done here, once certificates are renewed there.
TierRefusedError is for a client that was let in and may not do what it asks.
"""

from __future__ import annotations

import grpc

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

_ERRORS: dict[grpc.StatusCode, type[TierError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: TierExhaustedError,
    grpc.StatusCode.DATA_LOSS: TierIntegrityError,
    grpc.StatusCode.PERMISSION_DENIED: TierRefusedError,
    grpc.StatusCode.UNAUTHENTICATED: TierRefusedError,
    grpc.StatusCode.FAILED_PRECONDITION: TierProtocolError,
    grpc.StatusCode.INVALID_ARGUMENT: TierProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: TierProtocolError,
    grpc.StatusCode.OUT_OF_RANGE: TierProtocolError,
}

_CODES: dict[type[KvtierError], grpc.StatusCode] = {
    TierExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TierIntegrityError: grpc.StatusCode.DATA_LOSS,
    TierRefusedError: grpc.StatusCode.PERMISSION_DENIED,
    TierProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    TierUnavailableError: grpc.StatusCode.UNAVAILABLE,
    UsageError: grpc.StatusCode.INVALID_ARGUMENT,
}


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
