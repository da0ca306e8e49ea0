"""The service's HTTP server, in threads of its own.

    GET /metrics   Prometheus metrics
    GET /livez     200 while the service's event loop answers, 503 when it stands still
    GET /readyz    200 from the end of the start to the beginning of the drain, 503 otherwise

Every client that reaches the port may ask, and learns how much is stored and the namespaces' names.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler

from kvtier.errors import TierUnavailableError

# A probe says what is wrong, or nothing where all is well. It is called in a thread of the HTTP
# server.
Probe = Callable[[], str | None]


class WebServer(ThreadingHTTPServer):
    """Listening from the start; `close` ends it.

    host: a name or an address; port: 0 for a free one, which `url` then names. probes: by their
    paths.
    Raises TierUnavailableError, naming the flags, where it cannot listen there.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, probes: Mapping[str, Probe]
    ) -> None:
        self.registry, self.probes = registry, probes
        try:
            (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        except OSError as error:
            flags = f"--metrics-host {host} --metrics-port {port}"
            raise TierUnavailableError(f"{flags}: {error}") from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"
        Thread(target=self.serve_forever, daemon=True, name="kvtier-web").start()

    def server_bind(self) -> None:
        # The parent's method is left out: it looks up the address's name, which can take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def close(self) -> None:
        """Blocks until the port is closed."""
        self.shutdown()
        self.server_close()


class _Handler(MetricsHandler):
    server: WebServer
    # Seconds: a connection that asks nothing would keep its thread for ever.
    timeout = 10

    def do_GET(self) -> None:  # noqa: N802  # what http.server calls
        path = urlsplit(self.path).path
        if path == "/metrics":
            self.registry = self.server.registry
            super().do_GET()
        elif path in self.server.probes:
            wrong = self.server.probes[path]()
            status = HTTPStatus.OK if wrong is None else HTTPStatus.SERVICE_UNAVAILABLE
            self._say(status, wrong or "ok")
        else:
            self._say(HTTPStatus.NOT_FOUND, "/metrics, /livez or /readyz")

    def _say(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
