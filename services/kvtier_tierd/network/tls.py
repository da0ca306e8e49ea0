"""Mutual TLS whose certificates can be renewed while the service runs.

The files are looked at for every new connection; when they changed and make sense together, the
new ones are used from then on. Connections that are open keep theirs.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from kvtier.errors import UsageError

logger = logging.getLogger(__name__)


class RotatingCredentials:
    """certificate, key, client_ca: PEM files.

    Raises UsageError where they cannot be read or do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        try:
            self._seen = self._state()
            self._configuration = self._read()
        except (OSError, ValueError) as error:
            expected = "a PEM certificate with its --key and a --client-ca"
            raise UsageError("--certificate", expected, str(error)) from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """Clients must have a certificate of the client CA."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._fetch,  # type: ignore[arg-type]  # None keeps what is in use
            require_client_authentication=True,
        )

    def _state(self) -> list[tuple[int, int]]:
        stats = [path.stat() for path in (self._certificate, self._key, self._client_ca)]
        return [(one.st_mtime_ns, one.st_ino) for one in stats]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError or ValueError; ssl.SSLError is the one, PEM garbage may be the other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A key that wants a password would be asked for on the terminal, were none given.
        context.load_cert_chain(self._certificate, self._key, password="")
        context.load_verify_locations(self._client_ca)
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self._client_ca.read_bytes())

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates for a new connection, or None to keep those in use; gRPC calls
        this in a thread of its own."""
        try:
            state = self._state()
            if state == self._seen:
                return None
            configuration = self._read()
        except (OSError, ValueError) as error:
            # The operator may be replacing them just now; the next connection looks again.
            logger.warning("new certificates are not used: %s", error)
            return None
        self._seen = state
        logger.info("certificates reloaded")
        return configuration
