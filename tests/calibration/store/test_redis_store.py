"""The store on a real Redis: times to live, others' keys, and every way a server can fail."""

from __future__ import annotations

import logging
import traceback
from contextlib import contextmanager, suppress

import pytest
from calibration_samples import curve_document
from hostile_server import answering, hostile_server
from redis_server import RedisServer, redis_server
from waiting import SAFETY_S, wait_for

from kvtier.addresses import parse_address
from kvtier.calibration.store.redis import RedisStore
from kvtier.errors import (
    CalibrationDocumentError,
    CalibrationMismatchError,
    StoreRefusedError,
    StoreUnavailableError,
    UsageError,
)

PASSWORD = "s3cr3t-&-p4ss"
ENCODED = "s3cr3t-%26-p4ss"
TIMEOUT_S = 0.2


def opened(url: str, timeout_s: float = SAFETY_S) -> RedisStore:
    return RedisStore(url, timeout_s=timeout_s, ttl_s=1000)


def test_every_key_expires_and_putting_again_starts_its_time_anew(server, store):
    key = store.put(curve_document())
    assert 500 < server.admin.ttl(str(key)) <= 1000
    server.admin.expire(str(key), 500)
    assert 0 < store.list()[0].ttl_s <= 500
    store.put(curve_document())
    assert store.list()[0].ttl_s > 500


def test_a_document_that_is_served_by_lives_on(server, store):
    document = curve_document()
    key = store.put(document)
    server.admin.expire(str(key), 500)
    assert store.get(key) == document
    assert store.list()[0].ttl_s <= 500
    reader = server.add_user("reader", "pw", "~kvtier:v1:*", "+client|setname", "+get")
    with opened(reader) as other:
        assert other.get(key, renew=True) == document
    assert store.list()[0].ttl_s <= 500
    assert store.get(key, renew=True) == document
    assert store.list()[0].ttl_s > 500


def test_listing_never_blocks_the_server_where_others_may_keep_keys(server, store):
    """SCAN in steps, never KEYS; more keys than fit one step are all found, once each."""
    server.admin.mset({"else": "1", "kvtier:v1:odd": "2", b"kvtier:v1:profile:\xff:r": "3"})
    for index in range(500):
        store.put(curve_document(policy=f"p{index}"))
    assert len(store.list()) == 500
    assert server.calls()["scan"] > 1
    assert "keys" not in server.calls()


def test_a_value_that_is_no_document_is_named_and_stays_listed(server, store):
    key = curve_document().key
    server.admin.set(str(key), b"\xff not json")
    with pytest.raises(CalibrationDocumentError, match="compactor-32: document"):
        store.get(key)
    assert [(stored.key, stored.ttl_s) for stored in store.list()] == [(key, None)]
    server.admin.set(str(key), curve_document(model="other").to_json())
    with pytest.raises(CalibrationMismatchError):
        store.get(key)
    server.admin.delete(str(key))
    server.admin.lpush(str(key), "a list")
    with pytest.raises(StoreRefusedError, match="WRONGTYPE"):
        store.get(key)


# Every failure: what is done to a server, and where it is asked then.


def down(server: RedisServer) -> str:
    server.stop()
    return server.url


def wrong_password(server: RedisServer) -> str:
    return server.add_user("ada", "right", "+@all", "~*").replace("right", ENCODED)


def no_login(server: RedisServer) -> str:
    server.admin.config_set("requirepass", PASSWORD)
    return server.url


def no_write_permission(server: RedisServer) -> str:
    return server.add_user("ada", PASSWORD, "+@all", "-set", "~*")


def no_key_permission(server: RedisServer) -> str:
    return server.add_user("ada", "pw", "+@all", "~other:*")


def out_of_memory(server: RedisServer) -> str:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1000)
    return server.url


def read_only_replica(server: RedisServer) -> str:
    server.admin.replicaof("127.0.0.1", 1)
    return server.url


def paused(server: RedisServer) -> str:
    server.admin.client_pause(60_000)
    return server.url


def stopped(server: RedisServer) -> str:
    server.pause()
    return server.url


@contextmanager
def nothing_listens():
    yield "redis://user:" + ENCODED + "@127.0.0.1:1/0"


@contextmanager
def no_redis():
    with hostile_server(answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as url:
        yield url.replace("//", f"//:{ENCODED}@")


@contextmanager
def failing(done):
    with redis_server() as server:
        yield done(server)


FAILURES = [
    (down, StoreUnavailableError, "ConnectionError"),
    (nothing_listens, StoreUnavailableError, "refused"),
    (paused, StoreUnavailableError, "TimeoutError"),
    (stopped, StoreUnavailableError, "TimeoutError"),
    (no_redis, StoreUnavailableError, "InvalidResponse"),
    (wrong_password, StoreRefusedError, "AuthenticationError"),
    (no_login, StoreRefusedError, "AuthenticationError"),
    (no_write_permission, StoreRefusedError, "NoPermissionError"),
    (no_key_permission, StoreRefusedError, "NoPermissionError"),
    (out_of_memory, StoreRefusedError, "OutOfMemoryError"),
    (read_only_replica, StoreRefusedError, "ReadOnlyError"),
]


@pytest.mark.parametrize(
    ("failure", "expected", "text"), FAILURES, ids=[failure.__name__ for failure, *_ in FAILURES]
)
def test_every_failure_has_its_error_and_keeps_the_password(failure, expected, text, caplog):
    caplog.set_level(logging.DEBUG)
    hangs = failure in (paused, stopped)
    at = failure() if failure in (nothing_listens, no_redis) else failing(failure)
    with at as url, opened(url, timeout_s=TIMEOUT_S if hangs else SAFETY_S) as store:
        with pytest.raises(expected, match=text) as caught:
            store.put(curve_document())
        seen = "".join(traceback.format_exception(caught.value)) + repr(store) + caplog.text
        assert "unix://" in seen or "redis://" in seen
        for secret in (PASSWORD, ENCODED, "right", ":pw@"):
            assert secret not in seen


def test_a_server_that_hangs_or_goes_while_it_is_in_use_is_used_again():
    """A call that ran out of time leaves no connection in the middle of an answer behind."""
    with (
        redis_server() as server,
        opened(server.url) as patient,
        opened(server.url, timeout_s=TIMEOUT_S) as store,
    ):
        key = patient.put(curve_document())

        def gets() -> bool | None:
            with suppress(StoreUnavailableError):
                return store.get(key) == patient.get(key)

        for _ in range(3):
            wait_for(gets)
            server.pause()
            with pytest.raises(StoreUnavailableError):
                store.get(key)
            server.resume()
        server.stop()
        with pytest.raises(StoreUnavailableError):
            patient.list()
        server.start()
        assert patient.list() == ()
        patient.put(curve_document())


def test_a_server_that_echoes_the_login_does_not_make_us_print_it():
    """An old or broken server may quote the command that it did not understand."""

    def echoes(connection, ended):
        line = b" ".join(connection.recv(4096).split(b"\r\n"))
        connection.sendall(b"-ERR unknown command, with args: " + line + b"\r\n")

    with hostile_server(echoes) as url:
        store = opened(url.replace("//", f"//ada:{ENCODED}@"))
        with store, pytest.raises(StoreRefusedError) as caught:
            store.list()
    assert "***" in str(caught.value)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


def test_the_documented_permissions_are_enough(server: RedisServer):
    rules = "~kvtier:v1:* +client|setname +get +expire +set +del +scan +pttl"
    assert rules in " ".join(RedisStore.__doc__.split())
    url = server.add_user("least", "pw", *rules.split())
    with opened(url) as store:
        key = store.put(curve_document())
        assert store.get(key) is not None
        assert len(store.list()) == 1
        assert store.delete(key)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h", "redis://h:6379/0"),
        ("redis://h:1/2", "redis://h:1/2"),
        ("rediss://u:p@h:1", "rediss://u:***@h:1/0"),
        ("redis://:p@[::1]:1", "redis://:***@[::1]:1/0"),
        ("unix://u:p@/a%20b?db=3", "unix://u:***@/a b?db=3"),
    ],
)
def test_addresses_are_shown_without_their_password(url, shown):
    assert str(parse_address(url)) == shown
    assert "p'" not in repr(parse_address(url))


def test_everything_special_may_be_percent_encoded():
    address = parse_address("redis://us%40er:p%3A%2F%40%23%3Fw@h")
    assert (address.username, address.password) == ("us@er", "p:/@#?w")


@pytest.mark.parametrize(
    "url",
    [
        "", "host:6379", "http://h", "redis:///1", "redis://u:se/cret@h", "unix://",
        "redis://u:se#cret@h", "redis://u:se?cret@h", "redis://h:notaport", "redis://h/notadb",
        "redis://h?ssl_cert_reqs=none", "unix:///s?password=secret", "unix://host/s",
        "redis://u:secret@[::1", "redis://h:99999",
    ],
)  # fmt: skip
def test_bad_addresses_are_refused_without_a_word_of_them(url):
    with pytest.raises(UsageError, match=r"^redis.url: expected") as refused:
        opened(url)
    shown = "".join(traceback.format_exception(refused.value)).replace(__file__, "")
    assert "cret" not in shown
    assert "redis://, rediss:// or unix://" in str(refused.value)
