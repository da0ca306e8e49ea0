"""The errors of redis-py, mapped into kvtier's tree, without a password in any message.

StoreRefusedError      the server answered no: wrong or missing login, ACL, read-only replica,
                       out of memory, failing snapshots, a protocol that is not Redis
StoreUnavailableError  no connection, no answer in time, TLS that does not verify, a server that
                       is still loading its data or has lost its master, an answer that no Redis
                       gives or that is far too long
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from kvtier.addresses.redis import HIDDEN, RedisAddress
from kvtier.errors import KvtierError, StoreError, StoreRefusedError, StoreUnavailableError

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
