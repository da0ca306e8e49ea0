"""Redis URLs, taken apart once, with the password kept out of everything that can be printed.

redis://[[user]:password@]host[:port][/db]      plain TCP
rediss://...                                    TLS
unix://[[user]:password@]/path[?db=N]           unix socket
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

EXPECTED = "a redis://, rediss:// or unix:// URL"
DEFAULT_PORT = 6379
HIDDEN = "***"


@dataclass(frozen=True)
class RedisAddress:
    """The address of a Redis server, and the user who asks it.

    scheme: redis and rediss have host and port, unix has the path of a socket

    `str` shows HIDDEN in place of the password and `repr` leaves it out.
    """

    scheme: str
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        secret = "" if self.password is None else f":{HIDDEN}"
        login = f"{self.username or ''}{secret}@" if self.username or secret else ""
        if self.scheme == "unix":
            return f"unix://{login}{self.path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{login}{host}:{self.port}/{self.db}"


def parse_address(url: str) -> RedisAddress:
    """Take a URL apart. Raises ValueError that says what was expected and shows none of the URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis", "rediss"):
            return _tcp(parts)
        if parts.scheme == "unix":
            return _unix(parts)
    except ValueError:
        # The message would quote what it could not read, and that may be part of a password.
        raise ValueError(
            f"{EXPECTED}, with a host or path, no parameters but db, and everything special in "
            "the password percent-encoded"
        ) from None
    raise ValueError(EXPECTED)


def _tcp(parts: SplitResult) -> RedisAddress:
    if not parts.hostname or parts.query or parts.fragment:
        raise ValueError
    db = int(parts.path.strip("/") or 0)
    return RedisAddress(
        parts.scheme, parts.hostname, parts.port or DEFAULT_PORT, "", db, *_login(parts)
    )


def _unix(parts: SplitResult) -> RedisAddress:
    options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    if parts.hostname or not parts.path.strip("/") or set(options) - {"db"} or parts.fragment:
        raise ValueError
    db = int(options.get("db", 0))
    return RedisAddress("unix", "", 0, unquote(parts.path), db, *_login(parts))


def _login(parts: SplitResult) -> tuple[str | None, str | None]:
    username = unquote(parts.username) if parts.username else None
    return username, None if parts.password is None else unquote(parts.password)
