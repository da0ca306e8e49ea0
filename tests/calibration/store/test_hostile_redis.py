"""A Redis that does everything wrong: each call ends, with a typed error or none. Without deadlines
most of these calls would never end."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from calibration_samples import MODEL, POLICY, REVISION, curve_document
from hostile_server import (
    HUGE_BYTES,
    POLL_S,
    SendsAHugeString,
    answering,
    drips_its_handshake,
    drips_its_reply,
    hostile_server,
    says_nothing,
)
from tls_redis import write_certificates
from waiting import SAFETY_S

from kvtier.calibration.keys import Key
from kvtier.calibration.store.redis import RedisStore
from kvtier.errors import CalibrationDocumentError, StoreUnavailableError

KEY = Key.of("curve", MODEL, REVISION, POLICY)
TIMEOUT_S = 0.15

GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00\xff\xfe\r\n",
    b"$abc\r\n",
    b"$99999999999999999999999\r\nx\r\n",
    b"$-7\r\nabcdefgh\r\n",
    b":not a number\r\n",
    b":5\r\n",
    b"*2\r\n$1\r\n0\r\n*0\r\n",
    b"*abc\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
    b"*1000000000\r\n:1\r\n",
    b"$10\r\nhalf",
    b"\r\n",
    b"",
]

HANGING = [says_nothing, drips_its_handshake, drips_its_reply]


def opened(url: str) -> RedisStore:
    return RedisStore(url, timeout_s=TIMEOUT_S, ttl_s=1000)


CALLS = {
    "get": lambda store: store.get(KEY),
    "put": lambda store: store.put(curve_document()),
    "delete": lambda store: store.delete(KEY),
    "list": lambda store: store.list(),
}


@pytest.mark.parametrize(
    ("call", "socket_name"), [("get", None), ("get", "s"), ("put", None), ("list", None)]
)
@pytest.mark.parametrize("answer", HANGING, ids=lambda answer: answer.__name__)
def test_however_slowly_it_answers_a_call_ends_by_its_deadline(answer, call, socket_name):
    """socket_name: of a unix socket, whose path must be short; None for TCP."""
    with (
        tempfile.TemporaryDirectory(prefix="kvh") as folder,
        hostile_server(answer, socket_name and Path(folder) / socket_name) as url,
        opened(url) as store,
        pytest.raises(StoreUnavailableError, match="TimeoutError"),
    ):
        CALLS[call](store)


def test_a_scan_that_never_ends_ends_by_the_deadline_of_a_list():
    def endless(connection: socket.socket, ended: threading.Event) -> None:
        while not ended.wait(0.01):
            name = connection.recv(65536)
            polite = b"CLIENT" in name
            connection.sendall(b"+OK\r\n" if polite else b"*2\r\n$1\r\n7\r\n*0\r\n")

    with (
        hostile_server(endless) as url,
        opened(url) as store,
        pytest.raises(StoreUnavailableError, match="TimeoutError"),
    ):
        store.list()


def test_a_server_that_reads_nothing_does_not_hold_a_writer_up():
    """Every byte it takes restarts a time-out that is not over the whole of the sending."""

    def sips(connection: socket.socket, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            connection.recv(2048)

    large = curve_document(parameters={"notes": "x" * 900_000})
    with (
        hostile_server(sips) as url,
        opened(url) as store,
        pytest.raises(StoreUnavailableError),
    ):
        store.put(large)


def test_a_name_server_that_does_not_answer_holds_no_caller_up(monkeypatch):
    asked, answered = threading.Event(), threading.Event()

    def silent(*where, **how):
        asked.set()
        answered.wait(SAFETY_S)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        with (
            opened("redis://redis.example") as store,
            pytest.raises(StoreUnavailableError, match="TimeoutError"),
        ):
            store.get(KEY)
        assert asked.is_set()
    finally:
        answered.set()


def over_tls(answer, folder: Path):
    """`answer` behind a TLS handshake, with the certificate of 127.0.0.1 in `folder`."""
    write_certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def wrapped(connection: socket.socket, ended: threading.Event) -> None:
        # A busy client takes its time for its side of the handshake.
        connection.settimeout(SAFETY_S)
        with context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.settimeout(POLL_S)
            answer(encrypted, ended)

    return wrapped


def over_tls_at(url: str, folder: Path | None, timeout_s: float = SAFETY_S) -> RedisStore:
    """folder: of the authority that is trusted; None: the system's."""
    ca = None if folder is None else folder / "ca.pem"
    encrypted = url.replace("redis://", "rediss://")
    return RedisStore(encrypted, ca_certs=ca, timeout_s=timeout_s, ttl_s=9)


def test_the_deadline_holds_in_a_tls_handshake_and_behind_it(tmp_path):
    with (
        hostile_server(drips_its_handshake) as url,
        over_tls_at(url, None, TIMEOUT_S) as store,
        pytest.raises(StoreUnavailableError),
    ):
        store.get(KEY)
    for answer, expected in (
        (drips_its_reply, "TimeoutError"),
        (answering(b"$abc\r\n"), "not Redis's protocol"),
    ):
        with (
            hostile_server(over_tls(answer, tmp_path)) as url,
            over_tls_at(url, tmp_path, TIMEOUT_S) as store,
            pytest.raises(StoreUnavailableError, match=expected),
        ):
            store.get(KEY)


def test_only_the_right_authority_and_host_are_trusted(tmp_path):
    document = curve_document().to_json().encode()
    answer = over_tls(answering(b"$%d\r\n%s\r\n" % (len(document), document)), tmp_path)
    write_certificates(tmp_path / "other")
    with hostile_server(answer) as url:
        with over_tls_at(url, tmp_path) as store:
            assert store.get(KEY).key == KEY
        for asked, trusted in (
            (url.replace("127.0.0.1", "localhost"), tmp_path),
            (url, tmp_path / "other"),
            (url, None),
        ):
            wrong = pytest.raises(StoreUnavailableError, match=r"(?i)certificate verify failed")
            with over_tls_at(asked, trusted) as store, wrong:
                store.get(KEY)


def test_a_huge_value_is_given_up_long_before_it_is_all_here():
    huge = SendsAHugeString()
    with (
        hostile_server(huge) as url,
        RedisStore(url, timeout_s=SAFETY_S, ttl_s=9) as store,
        pytest.raises(CalibrationDocumentError, match=f"{POLICY}: .*1048576 bytes"),
    ):
        store.get(KEY)
    # The bytes that were sent and not read lie in the kernel's buffers.
    assert huge.sent_bytes < HUGE_BYTES / 16


def test_a_list_of_endless_length_is_given_up():
    with (
        hostile_server(SendsAHugeString()) as url,
        RedisStore(url, timeout_s=SAFETY_S, ttl_s=9) as store,
        pytest.raises(StoreUnavailableError, match="more than"),
    ):
        store.list()


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_typed_error_of_every_call_and_never_a_document(garbage):
    typed = StoreUnavailableError, CalibrationDocumentError
    for name, call in CALLS.items():
        with (
            hostile_server(answering(garbage)) as url,
            opened(url) as store,
            # `:5` is a fine answer to DEL, and so is silence after it.
            pytest.raises(typed) if name == "get" else suppress(*typed),
        ):
            call(store)


def test_deadlines_of_several_threads_do_not_mix(server):
    with (
        hostile_server(drips_its_reply) as url,
        opened(url) as slow,
        RedisStore(server.url, timeout_s=SAFETY_S, ttl_s=1000) as good,
    ):
        key = good.put(curve_document())
        failed = []

        def ask_slow() -> None:
            try:
                slow.get(key)
            except StoreUnavailableError:
                failed.append(True)

        thread = threading.Thread(target=ask_slow)
        thread.start()
        while thread.is_alive():
            assert good.get(key) is not None
        assert failed == [True]
