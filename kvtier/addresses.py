"""The addresses of the services that kvtier talks to, parsed: settings need no more of them.

redis://[[user]:password@]host[:port][/db]      a calibration store, by TCP
rediss://...                                    by TLS
unix://[[user]:password@]/path[?db=N]           by a unix socket

host:port, unix:/path, `default`                a tier

The password of a URL is kept out of everything that can be printed. The default of a tier is a
socket in a directory that only its user enters, so that neither end needs to be told anything where
both are run by one user on one machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from platformdirs import user_data_path

from kvtier.errors import UsageError

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


UNIX = "unix:"
# Users write this for `default_address()`.
DEFAULT = "default"
# The length of a path in sockaddr_un, less the NUL.
MAX_SOCKET_PATH_BYTES = 107
# The directory where Linux keeps what a user's session needs, by the user's number.
RUNTIME_DIRECTORIES = Path("/run/user")


def default_address() -> str:
    """unix: and a path in this user's runtime directory; without one, in kvtier's data directory.

    Looks whether directories exist and makes none.
    """
    sessions = os.environ.get("XDG_RUNTIME_DIR", "")
    for runtime in (Path(sessions or os.devnull), RUNTIME_DIRECTORIES / str(os.getuid())):
        if runtime.is_dir():
            return f"{UNIX}{runtime / 'kvtier' / 'tier.sock'}"
    given = os.environ.get("KVTIER_DATA_DIR")
    data = Path(given) if given else user_data_path("kvtier", appauthor=False)
    return f"{UNIX}{data.absolute() / 'run' / 'tier.sock'}"


def host_of(address: str) -> str | None:
    """The host of host:port or [address]:port, without brackets; None for anything else."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        return None
    return host


def socket_path(address: str, argument: str = "address") -> Path | None:
    """The path of a unix socket; None for the address of a port.

    argument: what the address was given as. Raises UsageError, naming it, for a path that no socket
    can have.
    """
    if not address.startswith(UNIX):
        return None
    path = address.removeprefix(UNIX)
    if not 1 <= len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        expected = f"{UNIX} and a path of at most {MAX_SOCKET_PATH_BYTES} bytes"
        raise UsageError(argument, expected, address)
    return Path(path)
