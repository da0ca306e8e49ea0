"""Calibration documents in a Redis server.

Every call has one deadline over everything it does, and reads only so much: a server that is down,
slow or hostile costs seconds and never a request. The errors of redis-py become kvtier's, without a
password in any message:

StoreRefusedError      the server answered no: wrong or missing login, ACL, read-only replica,
                       out of memory, failing snapshots, a protocol that is not Redis
StoreUnavailableError  no connection, no answer in time, TLS that does not verify, a server that
                       is still loading its data or has lost its master, an answer that no Redis
                       gives or that is far too long
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from redis import ConnectionPool, Redis, exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from kvtier.addresses import HIDDEN, RedisAddress, parse_address
from kvtier.calibration.documents import Document, max_bytes, parse_document
from kvtier.calibration.keys import PREFIX, Key, parse_key
from kvtier.calibration.store.base import CalibrationStore, StoredKey, text_of
from kvtier.calibration.store.redis_connections import (
    PARSER,
    Answer,
    ReplyTooLargeError,
    TcpConnection,
    TlsConnection,
    UnixConnection,
    bounded,
)
from kvtier.errors import (
    CalibrationDocumentError,
    KvtierError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
    UsageError,
)

MAX_MESSAGE_CHARACTERS = 500

# redis-py calls a refused login a connection error, so these are asked for first.
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)
_PASSING = (exceptions.ClusterDownError, exceptions.MasterDownError, exceptions.TryAgainError)


def _store_error(error: Exception, address: RedisAddress) -> StoreError:
    """An error of redis-py as one that names the address, without its password."""
    said = f"{type(error).__name__}: {error}"
    if not isinstance(error, (exceptions.RedisError, OSError)):
        # Another protocol ends redis-py with whatever its parser ran into.
        said = f"answered what is not Redis's protocol ({said})"
    if address.password:
        said = said.replace(address.password, HIDDEN)
    # A server may quote a megabyte of its own; a log line shall not.
    if len(said) > MAX_MESSAGE_CHARACTERS:
        said = f"{said[:MAX_MESSAGE_CHARACTERS]}…"
    passing = not isinstance(error, exceptions.ResponseError) or isinstance(error, _PASSING)
    unavailable = passing and not isinstance(error, _REFUSED)
    kind = StoreUnavailableError if unavailable else StoreRefusedError
    return kind(f"calibration store {address}: {said}")


CLIENT_NAME = "kvtier"
RETRIES = 2
CALL_TIMEOUTS = 4
"""Longest that a call takes, in time-outs of a single answer: name look-up, connecting, TLS, login
and retries are all within."""
LIST_TIMEOUTS = 20
"""The same for a list, which asks once per SCAN_COUNT keys of the whole server."""
SPARE_BYTES = 64 << 10  # a login before a document takes so many
MAX_LIST_BYTES = 16 << 20
RETRY_BASE_S, RETRY_CAP_S = 0.02, 0.2
SCAN_COUNT = 200


class RedisStore(CalibrationStore):
    """A Redis server at `url`. Nothing connects before the first call.

    ca_certs:   file of the authorities to trust for rediss://; None: those of the system
    certificate, key: files that tell a server which asks who this client is; read again for every
                connection, so they may be renewed
    timeout_s:  to connect, and for each answer; CALL_TIMEOUTS of it for a whole call, LIST_TIMEOUTS
                for a list, however slowly the server answers
    ttl_s:      seconds a document lives after it was written, or read by a server

    Least ACL of its user: `~kvtier:v1:* +client|setname +get +expire +set +del +scan
    +pttl`. Without `+expire` documents live from when they were written.
    """

    def __init__(
        self,
        url: str,
        *,
        ca_certs: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout_s: float,
        ttl_s: int,
    ) -> None:
        try:
            self._address = parse_address(url)
        except ValueError as error:
            raise UsageError("redis.url", str(error), "another URL") from None
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._client = _client(
            self._address,
            timeout_s,
            ssl_ca_certs=ca_certs,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )

    def __repr__(self) -> str:
        return f"RedisStore({str(self._address)!r})"

    def get(self, key: Key, *, renew: bool = False) -> Document | None:
        most = max_bytes(key)

        def ask(client: Any) -> bytes | None:
            try:
                text = client.get(str(key))
            except ReplyTooLargeError:
                # Only this one: the store may well hold others that can be read.
                too_large = f"{key}: document: larger than {most} bytes"
                raise CalibrationDocumentError(too_large) from None
            if text is None or isinstance(text, bytes):
                return text
            raise TypeError(f"GET answered {type(text).__name__}")

        text = self._call(ask, max_bytes=most + SPARE_BYTES)
        if renew and text is not None:
            # A replica, or a user who may not, can still be read.
            with suppress(StoreError):
                self._call(lambda client: client.expire(str(key), self._ttl_s))
        return None if text is None else parse_document(key, text)

    def put(self, document: Document) -> Key:
        key, text = document.key, text_of(document)
        self._call(lambda client: client.set(str(key), text, ex=self._ttl_s))
        return key

    def delete(self, key: Key) -> bool:
        return bool(self._call(lambda client: client.delete(str(key))))

    def list(self) -> tuple[StoredKey, ...]:
        return self._call(_listed, LIST_TIMEOUTS, MAX_LIST_BYTES)

    def close(self) -> None:
        self._client.close()

    def _call(
        self,
        ask: Callable[[Any], Answer],
        timeouts: float = CALL_TIMEOUTS,
        max_bytes: int = SPARE_BYTES,
    ) -> Answer:
        """The answer of redis-py, which is all that `ask` calls: it is bounded, and whatever goes
        wrong is a StoreError."""
        try:
            return bounded(partial(ask, self._client), timeouts * self._timeout_s, max_bytes)
        except KvtierError:
            raise
        except Exception as error:
            # The original is not chained: a server may echo what it was sent, login included.
            raise _store_error(error, self._address) from None


def _listed(client: Any) -> tuple[StoredKey, ...]:
    names = [*client.scan_iter(match=f"{PREFIX}*", count=SCAN_COUNT)]
    found = sorted({key for name in names if (key := _key_of(name))}, key=str)
    with client.pipeline(transaction=False) as pipeline:
        for key in found:
            pipeline.pttl(str(key))
        ttls = [None if ttl < 0 else ttl / 1000 for ttl in pipeline.execute()]
    return tuple(map(StoredKey, found, ttls))


def _key_of(name: bytes) -> Key | None:
    try:
        return parse_key(name.decode())
    except (UsageError, UnicodeDecodeError):
        return None  # under our prefix, and not ours


def _client(address: RedisAddress, timeout_s: float, **files: Path | None) -> Any:
    """A redis-py client. Answers are bytes; RESP2, which every Redis and its forks speak."""
    where: dict[str, Any] = {"host": address.host, "port": address.port}
    connection_class: Any = TcpConnection
    if address.scheme == "unix":
        where = {"path": address.path}
        connection_class = UnixConnection
    elif address.scheme == "rediss":
        connection_class = TlsConnection
        where |= {name: None if file is None else str(file) for name, file in files.items()}
        where |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    pool = ConnectionPool(
        connection_class=connection_class,
        parser_class=PARSER,
        **where,
        db=address.db,
        username=address.username,
        password=address.password,
        client_name=CLIENT_NAME,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(ExponentialWithJitterBackoff(base=RETRY_BASE_S, cap=RETRY_CAP_S), RETRIES),
    )
    return Redis.from_pool(pool)
