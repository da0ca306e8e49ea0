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
from calibration_samples import DTYPE, MODEL, POLICY, REVISION, curve_document
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
from test_redis_tls import write_certificates
from waiting import SAFETY_S

from kvtier.calibration.keys import curve_key
from kvtier.calibration.store.directory import LocalCopy
from kvtier.calibration.store.redis import RedisStore
from kvtier.calibration.store.watcher import CalibrationWatcher, Served
from kvtier.errors import CalibrationDocumentError, StoreUnavailableError

KEY = curve_key(MODEL, REVISION, POLICY)
TIMEOUT_S = 0.15
SERVED = Served(MODEL, REVISION, POLICY, DTYPE)

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


@pytest.fixture(params=["tcp", "unix"])
def unix_path(request):
    """Yield where a server listens: None for TCP; a socket's path must be short."""
    if request.param == "tcp":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvh") as folder:
        yield Path(folder) / "s"


CALLS = [
    ("get", lambda store: store.get(KEY)),
    ("put", lambda store: store.put(curve_document())),
    ("delete", lambda store: store.delete(KEY)),
    ("list", lambda store: store.list()),
]


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
@pytest.mark.parametrize("answer", HANGING, ids=lambda answer: answer.__name__)
def test_however_slowly_it_answers_a_call_ends_by_its_deadline(answer, call, unix_path):
    with (
        hostile_server(answer, unix_path) as url,
        opened(url) as store,
        pytest.raises(StoreUnavailableError, match="TimeoutError"),
    ):
        call(store)


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


@pytest.mark.parametrize("answer", [says_nothing, drips_its_handshake], ids=["silent", "drips"])
def test_a_tls_handshake_is_within_the_deadline(answer):
    with (
        hostile_server(answer) as url,
        opened(url.replace("redis://", "rediss://")) as store,
        pytest.raises(StoreUnavailableError),
    ):
        store.get(KEY)


def over_tls(answer, folder: Path):
    """`answer` behind a TLS handshake, with the certificate of 127.0.0.1 in `folder`."""
    write_certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def wrapped(connection: socket.socket, ended: threading.Event) -> None:
        # A busy client takes its time for its side of the handshake.
        connection.settimeout(SAFETY_S)
        with context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.settimeout(POLL_S)
            answer(encrypted, ended)

    return wrapped


@pytest.mark.parametrize("reply", [None, b"$abc\r\n"], ids=["drips", "garbage"])
def test_the_deadline_holds_behind_tls(reply, tmp_path):
    answer = over_tls(drips_its_reply if reply is None else answering(reply), tmp_path)
    with (
        hostile_server(answer) as url,
        RedisStore(
            url.replace("redis://", "rediss://"),
            ca_certs=tmp_path / "ca.pem",
            timeout_s=TIMEOUT_S,
            ttl_s=9,
        ) as store,
    ):
        expected = "TimeoutError" if reply is None else "not Redis's protocol"
        with pytest.raises(StoreUnavailableError, match=expected):
            store.get(KEY)


def test_what_behaves_behind_tls_is_read(tmp_path):
    document = curve_document().to_json().encode()
    answer = over_tls(answering(b"$%d\r\n%s\r\n" % (len(document), document)), tmp_path)
    options = {"ca_certs": tmp_path / "ca.pem", "timeout_s": SAFETY_S, "ttl_s": 9}
    with (
        hostile_server(answer) as url,
        RedisStore(url.replace("redis://", "rediss://"), **options) as store,
    ):
        assert store.get(KEY).key == KEY
        other = url.replace("redis://127.0.0.1", "rediss://localhost")
        with RedisStore(other, **options) as store, pytest.raises(StoreUnavailableError) as caught:
            store.get(KEY)
        assert "certificate verify failed" in str(caught.value).lower()


def test_a_huge_value_is_given_up_long_before_it_is_all_here(unix_path):
    huge = SendsAHugeString()
    with (
        hostile_server(huge, unix_path) as url,
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
def test_garbage_is_a_typed_error_of_every_call(garbage, unix_path):
    for _, call in CALLS:
        with (
            hostile_server(answering(garbage), unix_path) as url,
            opened(url) as store,
            # `:5` is a fine answer to DEL, and so is silence after it.
            suppress(StoreUnavailableError, CalibrationDocumentError),
        ):
            call(store)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_never_a_document(garbage):
    wrong = pytest.raises((StoreUnavailableError, CalibrationDocumentError))
    with hostile_server(answering(garbage)) as url, opened(url) as store, wrong:
        store.get(KEY)


@pytest.mark.parametrize(
    "answer",
    [*HANGING, SendsAHugeString(), *(answering(garbage) for garbage in GARBAGE)],
    ids=["silent", "drips_at_once", "drips", "huge", *map(str, range(len(GARBAGE)))],
)
def test_a_watcher_falls_back_to_its_local_copy_and_never_to_an_exception(answer, tmp_path, caplog):
    """The watcher has the time-out of its own tests: the first poll is over soon, whatever it
    meets."""
    local, known = LocalCopy(tmp_path), curve_document()
    local.save(known)
    with hostile_server(answer) as url:
        watcher = CalibrationWatcher(opened(url), SERVED, local=local, poll_s=60)
        try:
            assert watcher.wait_first_poll(SAFETY_S)
            assert watcher.curve() == known
            assert watcher.counters["unexpected"] == 0, caplog.text
        finally:
            watcher.close()


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
