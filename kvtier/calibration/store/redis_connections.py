"""Connections of redis-py whose calls end: by one deadline each, after so many bytes.

redis-py knows a time-out for each read of a socket. A server that sends a byte now and then is
never late for that, so it could hold a caller for ever, or fill its memory. Here a call has
`limits`, and every socket below obeys those of the call that uses it:

    with limits(timeout_s, max_bytes):      a call: connecting, logging in, retries, all answers
        client.get(...)

What takes longer raises CallTimeoutError, what is larger ReplyTooLargeError. Neither is retried.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from redis._parsers import _RESP2Parser
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import RedisError

# redis-py's own parser reads element by element. hiredis, which redis-py takes where it is
# installed, reserves memory for whatever number of elements an answer claims to have.
PARSER = _RESP2Parser

AddressInfo = tuple[int, int, int, Any]  # family, type, protocol, address


class CallTimeoutError(RedisError):
    """A call has used up its time."""


class ReplyTooLargeError(RedisError):
    """A server sent more than the call may read."""


@dataclass
class _Limits:
    """deadline: in seconds of the monotonic clock; max_bytes: read from one connection."""

    timeout_s: float
    max_bytes: int
    deadline: float = field(init=False)
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        """Seconds left, more than 0. Raises CallTimeoutError when there are none."""
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise CallTimeoutError(f"no complete answer within {self.timeout_s:g} s")
        return remaining_s

    def count(self, num_bytes: int) -> None:
        """Raise ReplyTooLargeError once more was read than is allowed."""
        self.read_bytes += num_bytes
        if self.read_bytes > self.max_bytes:
            raise ReplyTooLargeError(f"answered with more than {self.max_bytes} bytes")


_current: ContextVar[_Limits] = ContextVar("kvtier_calibration_limits")


@contextmanager
def limits(timeout_s: float, max_bytes: int) -> Iterator[None]:
    """Bound everything that this thread asks of a store inside the block.

    timeout_s: for all of it together; max_bytes: that may be read from one connection, which a
    retry starts anew.
    """
    token = _current.set(_Limits(timeout_s, max_bytes))
    try:
        yield
    finally:
        _current.reset(token)


class BoundedSocket:
    """A connected socket that keeps to the limits of the call that uses it.

    Its own time-out, as redis-py sets it, still counts for each read and write; 0 does not block.
    """

    def __init__(self, connected: socket.socket, timeout_s: float | None) -> None:
        self._socket, self._timeout_s = connected, timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def recv(self, max_bytes: int) -> bytes:
        self._wait_no_longer_than_allowed()
        received = self._socket.recv(max_bytes)
        if (call := _current.get(None)) is not None:
            call.count(len(received))
        return received

    def sendall(self, data: bytes) -> None:
        # The socket's own sendall is not used: over TLS, its time-out starts anew with every piece.
        rest = memoryview(data)
        while rest:
            self._wait_no_longer_than_allowed()
            rest = rest[self._socket.send(rest) :]

    def _wait_no_longer_than_allowed(self) -> None:
        self._socket.settimeout(_wait_s(self._timeout_s))


def _wait_s(timeout_s: float | None) -> float | None:
    """The shorter of a socket's time-out and what the call has left. Raises CallTimeoutError."""
    call = _current.get(None)
    if call is None or timeout_s == 0:
        return timeout_s
    remaining_s = call.remaining_s()
    return remaining_s if timeout_s is None else min(timeout_s, remaining_s)


class _Bounded(AbstractConnection):
    """Wraps the socket of the connection class that follows in the order of bases."""

    def _connect(self) -> Any:
        if (call := _current.get(None)) is not None:
            call.read_bytes = 0
        connected = super()._connect()  # type: ignore[no-untyped-call,safe-super]
        return BoundedSocket(connected, self.socket_timeout)


class _Dialing(Connection):
    """TCP whose name is looked up within the deadline, too."""

    def _connect(self) -> Any:
        addresses = _look_up(self.host, self.port, _wait_s(self.socket_connect_timeout))
        return _dial(addresses, self.socket_connect_timeout)


class _UnixDialing(UnixDomainSocketConnection):
    def _connect(self) -> Any:
        address = (socket.AF_UNIX, socket.SOCK_STREAM, 0, self.path)
        return _dial([address], self.socket_connect_timeout)


class TcpConnection(_Bounded, _Dialing):
    """redis://"""


class TlsConnection(_Bounded, SSLConnection, _Dialing):
    """rediss://. The handshake has what is left for connecting, as a whole."""


class UnixConnection(_Bounded, _UnixDialing):
    """unix://"""


def _dial(addresses: Sequence[AddressInfo], timeout_s: float | None) -> socket.socket:
    """The first address that answers; each has timeout_s, all together what the call has left.

    The time-out that is left on the socket is that of a handshake. Raises OSError.
    """
    error = OSError("the name has no address")
    for family, kind, protocol, where in addresses:
        dialing = socket.socket(family, kind, protocol)
        try:
            dialing.settimeout(_wait_s(timeout_s))
            dialing.connect(where)
            if family != socket.AF_UNIX:
                dialing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                dialing.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            dialing.settimeout(_wait_s(timeout_s))
            return dialing
        except OSError as failed:
            dialing.close()
            error = failed
        except BaseException:
            dialing.close()
            raise
    raise error


def _look_up(host: str, port: int, timeout_s: float | None) -> list[AddressInfo]:
    """The addresses of a name. Raises OSError, and TimeoutError (which is one) after timeout_s."""
    answer: queue.SimpleQueue[list[AddressInfo] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
            answer.put([(family, kind, number, at) for family, kind, number, _, at in found])
        except OSError as error:
            answer.put(error)
        except UnicodeError as error:
            answer.put(OSError(f"no host name: {error}"))

    # The system's look-up cannot be interrupted: a late one is left to end by itself.
    threading.Thread(target=ask, name="kvtier-look-up", daemon=True).start()
    try:
        found = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no address of {host} within {timeout_s} s") from None
    if isinstance(found, OSError):
        raise found
    return found
