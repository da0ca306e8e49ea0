"""Servers that misbehave on purpose: each answers a connection the way a function says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from waiting import SAFETY_S

Answer = Callable[[socket.socket, threading.Event], None]

DRIP_S = 0.05
# A server that waits for commands looks this often whether it is to end.
POLL_S = 0.2
HUGE_BYTES = 256 * 2**20


@contextmanager
def hostile_server(answer: Answer, unix_path: Path | None = None) -> Iterator[str]:
    """The URL of a server that hands every connection to `answer`, in a thread of its own.

    `answer` has to return soon after its event is set. Fails where who asked has no deadline, and
    still waits when the safety limit is over.
    """
    ended, outlived = threading.Event(), threading.Event()

    def live() -> None:
        if not ended.wait(SAFETY_S):
            outlived.set()
            ended.set()

    life = threading.Thread(target=live)
    life.start()
    listener = _listening(unix_path)
    thread = threading.Thread(target=_accept, args=(listener, answer, ended))
    thread.start()
    try:
        where = f"127.0.0.1:{listener.getsockname()[1]}" if unix_path is None else ""
        yield f"redis://{where}" if unix_path is None else f"unix://{unix_path}"
    finally:
        ended.set()
        life.join()
        thread.join()
        listener.close()
        if unix_path is not None:
            unix_path.unlink()  # or no other server could listen there
    assert not outlived.is_set(), "a call waited as long as it was let"


def _listening(unix_path: Path | None) -> socket.socket:
    family = socket.AF_INET if unix_path is None else socket.AF_UNIX
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0) if unix_path is None else str(unix_path))
    listener.listen()
    listener.settimeout(0.02)
    return listener


def _accept(listener: socket.socket, answer: Answer, ended: threading.Event) -> None:
    threads = []
    while not ended.is_set():
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            threads.append(threading.Thread(target=_serve, args=(connection, answer, ended)))
            threads[-1].start()
    for thread in threads:
        thread.join()


def _serve(connection: socket.socket, answer: Answer, ended: threading.Event) -> None:
    with connection, suppress(OSError):
        connection.settimeout(POLL_S)
        answer(connection, ended)


def commands(connection: socket.socket, ended: threading.Event) -> Iterator[str]:
    """The names of the commands that arrive, one at a time; ends with the connection."""
    while not ended.is_set():
        with suppress(TimeoutError):
            data = connection.recv(65536)
            if not data:
                return
            yield data.split(b"\r\n")[2].decode().upper()


def says_nothing(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait()


def drips_its_handshake(connection: socket.socket, ended: threading.Event) -> None:
    """A line that never ends, one byte at a time."""
    while not ended.wait(DRIP_S):
        connection.sendall(b"+")


def answering(reply: bytes) -> Answer:
    """A polite handshake, then `reply` to everything else, and the connection is closed."""

    def answer(connection: socket.socket, ended: threading.Event) -> None:
        for name in commands(connection, ended):
            connection.sendall(b"+OK\r\n" if name == "CLIENT" else reply)
            if name != "CLIENT":
                return

    return answer


def drips_its_reply(connection: socket.socket, ended: threading.Event) -> None:
    """A polite handshake, then a bulk string of which every byte is in time for a time-out."""
    for name in commands(connection, ended):
        connection.sendall(b"+OK\r\n" if name == "CLIENT" else b"$100000\r\n")
        while name != "CLIENT" and not ended.wait(DRIP_S):
            connection.sendall(b"x")


class SendsAHugeString:
    """A polite handshake, then a bulk string of HUGE_BYTES. sent_bytes: how much was taken."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def __call__(self, connection: socket.socket, ended: threading.Event) -> None:
        for name in commands(connection, ended):
            connection.sendall(b"+OK\r\n" if name == "CLIENT" else b"$%d\r\n" % HUGE_BYTES)
            began = self.sent_bytes
            while name != "CLIENT" and self.sent_bytes - began < HUGE_BYTES:
                self.sent_bytes += connection.send(b"x" * 65536)
