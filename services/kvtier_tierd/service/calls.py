"""The frame of every call: whose it is, what its errors become, and whether any is running.

Errors of kvtier.errors become status codes (kvtier.tier.wire); anything else is a bug, which
gRPC logs and answers with UNKNOWN.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeVar

import grpc

from kvtier.errors import KvtierError, TierUnavailableError
from kvtier.tier.wire import code_of
from kvtier_tierd.limits import Budget, Progress, StalledError, namespace_of
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.monitoring.tracing import OtlpTraces
from kvtier_tierd.options import TierOptions
from kvtier_tierd.service.leases import Leases
from kvtier_tierd.stores.base import BlobStore

Write = Callable[[Any], Awaitable[None]]
Service = TypeVar("Service", bound="Calls")
Request = TypeVar("Request")
Response = TypeVar("Response")


class Calls:
    """The calls of a service, and what all of them work with.

    budget:   counts what puts have sent and the store does not have yet.
    traces:   where calls are traced; None: nowhere.
    draining: whether new calls are refused.
    """

    def __init__(
        self,
        options: TierOptions,
        store: BlobStore,
        budget: Budget,
        metrics: TierMetrics,
        traces: OtlpTraces | None,
    ) -> None:
        self.options, self.store, self.budget = options, store, budget
        self.metrics, self._traces = metrics, traces
        self.namespaces = options.served()
        self.leases = Leases(store)
        self.draining = False
        self.running: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def calling(self, method: str, context: Any) -> AsyncIterator[str]:
        """One call of the namespace that this yields; its errors become status codes."""
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        # Only then has gRPC sent the status as well.
        task.add_done_callback(self.running.discard)
        began = time.monotonic()
        try:
            with self._traces.serving(method, context) if self._traces else nullcontext():
                async with self._answering(method, context) as namespace:
                    yield namespace
        finally:
            self.metrics.called(method, time.monotonic() - began)

    @asynccontextmanager
    async def _answering(self, method: str, context: Any) -> AsyncIterator[str]:
        """See `calling`."""
        try:
            yield self._enter(context)
        except KvtierError as error:
            code = code_of(error)
            self.metrics.failed(method, code.name)
            with cancelled_with_its_client():
                if isinstance(error, StalledError) and error.writing is not None:
                    # The status goes behind that write. By now the call holds nothing but this and
                    # its transfer, until the client reads or goes, or the service ends.
                    await error.writing
                await context.abort(code, str(error))
        except grpc.aio.AbortError:
            # A request that is no message was answered and counted before (decoding.py).
            raise
        except Exception:
            self.metrics.failed(method, "UNKNOWN")
            raise

    def _enter(self, context: Any) -> str:
        if self.draining:
            raise TierUnavailableError("the tier is shutting down")
        namespace = namespace_of(context)
        self.namespaces.limits(namespace)
        return namespace

    async def idle(self, timeout_s: float) -> None:
        """Wait until no call is running, but no longer."""
        if self.running:
            await asyncio.wait(self.running, timeout=timeout_s)

    def writer(self, context: Any) -> Write:
        """Writes to a client that may be slow, but not stand still for `stall_s`."""
        progress = Progress(self.options.stall_s)

        async def write(message: Any) -> None:
            writing = asyncio.ensure_future(context.write(message))
            try:
                with cancelled_with_its_client():
                    await progress.wait(asyncio.shield(writing))
            except StalledError as error:
                error.writing = writing
                raise
            except BaseException:
                writing.cancel()
                raise
            progress.moved(len(message) if isinstance(message, bytes) else message.ByteSize())

        return write


def rpc(
    handler: Callable[[Service, str, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """A method that gRPC calls, made of one that works for a namespace."""

    @functools.wraps(handler)
    async def call(self: Service, request: Request, context: Any) -> Response:
        async with self.calling(handler.__name__, context) as namespace:
            return await handler(self, namespace, request)

    return call


@contextmanager
def cancelled_with_its_client() -> Iterator[None]:
    """gRPC cancels the call of a client that is gone, but a message on its way may fail before
    that; to the call this is the same, and no error of the service."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("its client is gone") from error
