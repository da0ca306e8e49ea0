"""A running tier service: store, RPCs, health, reflection, metrics, and an orderly end.

start    store opened, then listening, then SERVING
drain    NOT_SERVING, new calls UNAVAILABLE, running ones get `drain_s`, then store closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtier.errors import TierUnavailableError
from kvtier.tier.wire import (
    MAX_NAMES_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    SERVICE_NAME,
    framed_handlers,
)
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.decoding import DecodingGuard
from kvtier_tierd.limits import Budget
from kvtier_tierd.listening import check_free, prepare_directory, renewed_credentials
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.monitoring.tracing import OtlpTraces
from kvtier_tierd.monitoring.web import WebServer
from kvtier_tierd.options import TierOptions
from kvtier_tierd.service.service import TierService
from kvtier_tierd.stores.base import StoreResources, StoreStats
from kvtier_tierd.stores.registry import make_store

logger = logging.getLogger(__name__)

LEASE_CHECK_S = 0.25
MAX_STREAMS = 256
# Half of what our own clients keep to: pings that were delayed come closer together.
MIN_PING_INTERVAL_MS = 5_000
# For calls that were cut off to give back what they hold, and for what is left to be sent.
LAST_S = 1.0


class TierServer:
    """One service; `start`, then `stop` exactly once. Belongs to one event loop."""

    def __init__(self, options: TierOptions) -> None:
        self.options = options
        self.budget = Budget(options.transfer_bytes)
        resources = StoreResources(options.served().quotas(), options.shared_directory, self.budget)
        self.store = make_store(options.store, resources)
        self.metrics = TierMetrics(options.namespaces)
        self.traces: OtlpTraces | None = None
        if options.otlp_traces_endpoint is not None:
            self.traces = OtlpTraces(options.otlp_traces_endpoint)
        self.service = TierService(options, self.store, self.budget, self.metrics, self.traces)
        self.address = options.listen
        self.web: WebServer | None = None
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[DecodingGuard(self.metrics.failed)], options=_channel_options(options)
        )
        self._background: asyncio.Task[None] | None = None
        self._serving = False

    async def start(self) -> None:
        """Raises KvtierError where the store, an address or a certificate is of no use."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        # First, because a probe shall hear that the store is still being recovered.
        self._serve_web()
        await self.store.start()
        tier_pb2_grpc.add_TierServiceServicer_to_server(self.service, self._server)
        self._server.add_registered_method_handlers(SERVICE_NAME, framed_handlers(self.service))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = self._listen()
        await self._server.start()
        self._background = asyncio.create_task(self._expire_leases())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._serving = True

    def _listen(self) -> str:
        listen, path = self.options.listen, self.options.socket_path
        if path is not None:
            prepare_directory(path.parent, for_all_users=self.options.for_all_users)
            check_free(path)
        tls = self.options.tls
        credentials = None if tls is None else renewed_credentials(tls)
        try:
            if credentials is not None:
                port = self._server.add_secure_port(listen, credentials)
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise TierUnavailableError(f"--listen {listen}: {error}") from error
        if path is not None:
            return listen
        return f"{listen.rpartition(':')[0]}:{port}"

    def _serve_web(self) -> None:
        options, loop = self.options, asyncio.get_running_loop()
        if options.metrics_port is None:
            return

        async def state() -> tuple[StoreStats, int, int]:
            leases = self.service.leases
            return self.store.stats(), len(leases), leases.expired

        def from_loop() -> tuple[StoreStats, int, int]:
            # The store belongs to the loop, and metrics are asked for in a thread.
            return asyncio.run_coroutine_threadsafe(state(), loop).result(LAST_S)

        def alive() -> str | None:
            turned = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            try:
                turned.result(LAST_S)
            except TimeoutError:
                return "the event loop does not answer"
            return None

        self.metrics.watch(from_loop)
        probes = {"/livez": alive, "/readyz": lambda: None if self._serving else "not ready"}
        self.web = WebServer(
            options.metrics_host, options.metrics_port, self.metrics.registry, probes
        )

    async def _set_health(self, status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            over = await self.service.leases.expire()
            if over:
                logger.warning("%d leases were not given back in time", over)

    async def stop(self) -> None:
        """Drain and close. Clients see UNAVAILABLE and go on without the tier."""
        self.service.draining, self._serving = True, False
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        # Only our own calls are waited for: who watches the health would do so for ever.
        await self.service.idle(self.options.drain_s)
        await self._server.stop(0)
        await self.service.idle(LAST_S)
        if self._background is not None:
            self._background.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._background
        if self.web is not None:
            await asyncio.to_thread(self.web.close)
        await self.service.leases.close()
        await self.store.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)


def _channel_options(options: TierOptions) -> list[tuple[str, int]]:
    """A message is a chunk, or names of blobs, and little more; gRPC refuses a longer one."""
    longest = max(options.chunk_bytes, MAX_NAMES_BYTES) + MESSAGE_OVERHEAD_BYTES
    return [
        ("grpc.max_receive_message_length", longest),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        # The limit of one connection's streams; more of them wait at their client, and cost the
        # service nothing.
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # A client that vanished without a word is noticed, and its streams end.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without this gRPC allows an idle client a ping in five minutes, and ends the connections
        # of those that look more often, as ours do (kvtier.tier.transport.connection).
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
