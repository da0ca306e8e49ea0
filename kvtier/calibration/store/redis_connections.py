"""Calls of redis-py that end: by one deadline each, after so many bytes.

redis-py knows a time-out for each read of a socket. A server that sends a byte now and then is
never late for that, so it could hold a caller for ever, or fill its memory. Here each call has a
thread of its own, for which its caller waits so long and no longer, whatever it does: look up a
name, connect, shake hands, log in, try again, read answers.

    bounded(lambda: client.get(...), timeout_s, max_bytes)

What takes longer raises CallTimeoutError, what is larger ReplyTooLargeError. Neither is retried.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

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

Answer = TypeVar("Answer")


class CallTimeoutError(RedisError):
    """A call has used up its time."""


class ReplyTooLargeError(RedisError):
    """A server sent more than the call may read."""


@dataclass
class _Call:
    """max_bytes: that may be read from one connection; used: the socket in use."""

    max_bytes: int
    read_bytes: int = 0
    is_over: bool = False
    used: socket.socket | None = None

    def use(self, connected: socket.socket | None) -> None:
        """Raises CallTimeoutError where nobody waits for the call any more."""
        self.used = connected
        if self.is_over:
            raise CallTimeoutError("the call is over")

    def end(self) -> None:
        """Have the call's thread end soon, whatever it waits for on a connection."""
        self.is_over = True
        if self.used is not None:
            with suppress(OSError):
                # A TLS socket's own shutdown is for the thread that reads.
                socket.socket.shutdown(self.used, socket.SHUT_RDWR)


_current = threading.local()


def bounded(ask: Callable[[], Answer], timeout_s: float, max_bytes: int) -> Answer:
    """The answer of a call to redis-py. Raises what it raises."""
    call, answer = _Call(max_bytes), queue.SimpleQueue[tuple[Answer | None, Exception | None]]()

    def work() -> None:
        _current.call = call
        try:
            answer.put((ask(), None))
        except Exception as error:
            answer.put((None, error))

    # The system's look-up of names cannot be interrupted: a late one is left to end by itself.
    threading.Thread(target=work, name="kvtier-redis", daemon=True).start()
    try:
        found, error = answer.get(timeout=timeout_s)
    except queue.Empty:
        call.end()
        raise CallTimeoutError(f"no complete answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


class _CountedSocket:
    """A connected socket that a call may read so much of."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, max_bytes: int) -> bytes:
        call: _Call = _current.call
        call.use(self._socket)
        received = self._socket.recv(max_bytes)
        call.read_bytes += len(received)
        if call.read_bytes > call.max_bytes:
            raise ReplyTooLargeError(f"answered with more than {call.max_bytes} bytes")
        return received

    def sendall(self, data: bytes) -> None:
        _current.call.use(self._socket)
        self._socket.sendall(data)


class _Counted(AbstractConnection):
    """Wraps the socket of the connection class that follows in the order of bases."""

    def _connect(self) -> Any:
        _current.call.use(None)
        _current.call.read_bytes = 0
        return _CountedSocket(super()._connect())  # type: ignore[no-untyped-call,safe-super]


class TcpConnection(_Counted, Connection):
    """redis://"""


class TlsConnection(_Counted, SSLConnection):
    """rediss://"""


class UnixConnection(_Counted, UnixDomainSocketConnection):
    """unix://"""
