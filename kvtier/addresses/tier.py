"""Addresses of a tier service: host:port, unix:/path, and the one that both ends take by default.

The default is a socket in a directory that only its user enters, so that neither end needs to be
told anything where both are run by one user on one machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_data_path

from kvtier.errors import UsageError

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


__all__ = ["DEFAULT", "default_address", "socket_path"]
