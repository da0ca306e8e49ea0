"""The access to the service: unix sockets that only this user opens, and mutual TLS whose
certificates can be renewed while it runs.

A socket is as private as its directory: gRPC makes the socket itself, with whatever the umask
allows, and a client that may connect is taken at its word about the namespace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import grpc

from kvtier.errors import TierUnavailableError, UsageError
from kvtier.tier.transport.connection import RenewedTls, TlsPaths

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def prepare_directory(directory: Path, *, for_all_users: bool) -> None:
    """Make the directory of a socket, or see to it that the one that is there is this user's alone.

    for_all_users: others may enter one that is there.
    Raises UsageError, naming --listen, where they may and must not, and TierUnavailableError where
    it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not for_all_users:
            _check_private(directory)
    except OSError as error:
        raise TierUnavailableError(f"--listen unix:{directory}: {error}") from error


def _check_private(directory: Path) -> None:
    # The directory itself is checked, not what a link points at: the link's owner chooses that.
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & OTHERS
    if not private or found.st_uid != os.geteuid():
        expected = "a socket in a directory of this user's with mode 0700, or --insecure-local"
        got = f"{directory} ({stat.filemode(found.st_mode)}, user {found.st_uid})"
        raise UsageError("--listen", expected, got)


def check_free(path: Path) -> None:
    """gRPC replaces a socket file even where a process still listens. Raises TierUnavailableError
    where one does."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(os.fspath(path))
        raise TierUnavailableError(f"--listen unix:{path}: another process is listening there")


def renewed_credentials(paths: TlsPaths) -> grpc.ServerCredentials:
    """Return credentials for mutual TLS: clients must have a certificate of the authority.

    The files are looked at for every new connection; when they changed and make sense together,
    the new ones are used from then on.

    Raises UsageError where they cannot be read or do not belong together.
    """
    expected = "a PEM certificate with its --key and a --client-ca"
    renewed = RenewedTls(paths, "--certificate", expected)

    def configuration() -> grpc.ServerCertificateConfiguration:
        files = renewed.files
        pair = (files.key, files.certificate)
        return grpc.ssl_server_certificate_configuration([pair], files.ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this in a thread of its own; None keeps what is in use."""
        return configuration() if renewed.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]  # None is allowed
        require_client_authentication=True,
    )
