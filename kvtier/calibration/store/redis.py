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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    ReplyTooLargeError,
    TcpConnection,
    TlsConnection,
    UnixConnection,
    limits,
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


@contextmanager
def redis_errors(address: RedisAddress) -> Iterator[None]:
    """Raise every error of redis-py inside the block as a StoreError that names `address`.

    The block may call redis-py and nothing else: an answer that is not Redis's protocol ends it
    with whatever error its parser ran into, such as ValueError or RecursionError.
    """
    try:
        yield
    except KvtierError:
        raise
    except Exception as error:
        # The original is not chained: a server may echo what it was sent, login included.
        raise _as_store_error(error, address) from None


def _as_store_error(error: Exception, address: RedisAddress) -> StoreError:
    said = f"{type(error).__name__}: {error}"
    if not isinstance(error, (exceptions.RedisError, OSError)):
        said = f"answered what is not Redis's protocol ({said})"
    text = _shortened(without_password(said, address))
    message = f"calibration store {address}: {text}"
    if isinstance(error, _REFUSED):
        return StoreRefusedError(message)
    if isinstance(error, exceptions.ResponseError) and not isinstance(error, _PASSING):
        return StoreRefusedError(message)
    return StoreUnavailableError(message)


def _shortened(text: str) -> str:
    """A server may quote a megabyte of its own; a log line shall not."""
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]}…"


def without_password(text: str, address: RedisAddress) -> str:
    """`text` with every occurrence of the address's password hidden."""
    return text.replace(address.password, HIDDEN) if address.password else text


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
    ttl_s:      seconds a document lives after it was written

    Least ACL of its user: `~kvtier:v1:* +client|setname +get +set +del +scan +pttl`.
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
        self._client = connect(
            self._address,
            ca_certs=ca_certs,
            certificate=certificate,
            key=key,
            timeout_s=timeout_s,
        )

    def __repr__(self) -> str:
        return f"RedisStore({str(self._address)!r})"

    def get(self, key: Key) -> Document | None:
        most = max_bytes(key)
        with self._call(max_bytes=most + SPARE_BYTES):
            try:
                text = _bytes_or_none(self._client.get(str(key)))
            except ReplyTooLargeError:
                # Only this one: the store may well hold others that can be read.
                too_large = f"{key}: document: larger than {most} bytes"
                raise CalibrationDocumentError(too_large) from None
        return None if text is None else parse_document(key, text)

    def put(self, document: Document) -> Key:
        key, text = document.key, text_of(document)
        with self._call():
            self._client.set(str(key), text, ex=self._ttl_s)
        return key

    def delete(self, key: Key) -> bool:
        with self._call():
            return bool(self._client.delete(str(key)))

    def list(self) -> tuple[StoredKey, ...]:
        with self._call(LIST_TIMEOUTS, MAX_LIST_BYTES):
            names = [*self._client.scan_iter(match=f"{PREFIX}*", count=SCAN_COUNT)]
            found = sorted({key for name in names if (key := _key_of(name))}, key=str)
            ttls = self._ttls_s(found)
        return tuple(StoredKey(key, ttl) for key, ttl in zip(found, ttls, strict=True))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _call(
        self, timeouts: float = CALL_TIMEOUTS, max_bytes: int = SPARE_BYTES
    ) -> Iterator[None]:
        """One call to the server: bounded, and whatever goes wrong is a StoreError."""
        with redis_errors(self._address), limits(timeouts * self._timeout_s, max_bytes):
            yield

    def _ttls_s(self, keys: Sequence[Key]) -> Sequence[float | None]:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.pttl(str(key))
            return [None if ttl < 0 else ttl / 1000 for ttl in pipeline.execute()]


def _bytes_or_none(answer: Any) -> bytes | None:
    """Return an answer that GET may give. Raises TypeError for what no Redis answers."""
    if answer is None or isinstance(answer, bytes):
        return answer
    raise TypeError(f"GET answered {type(answer).__name__}")


def _key_of(name: bytes) -> Key | None:
    try:
        return parse_key(name.decode())
    except (UsageError, UnicodeDecodeError):
        return None  # under our prefix, and not ours


def connect(
    address: RedisAddress,
    *,
    ca_certs: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    timeout_s: float,
    retries: int = RETRIES,
) -> Any:
    """A redis-py client. Answers are bytes; RESP2, which every Redis and its forks speak."""
    where: dict[str, Any] = {"host": address.host, "port": address.port}
    connection_class: Any = TcpConnection
    if address.scheme == "unix":
        where = {"path": address.path}
        connection_class = UnixConnection
    elif address.scheme == "rediss":
        connection_class = TlsConnection
        where |= {
            "ssl_ca_certs": None if ca_certs is None else str(ca_certs),
            "ssl_certfile": None if certificate is None else str(certificate),
            "ssl_keyfile": None if key is None else str(key),
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }
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
        retry=Retry(ExponentialWithJitterBackoff(base=RETRY_BASE_S, cap=RETRY_CAP_S), retries),
    )
    return Redis.from_pool(pool)
