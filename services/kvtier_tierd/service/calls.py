"""The frame of every call: whose it is, what its errors become, and whether any is running.

Errors of kvtier.errors become status codes (kvtier.tier.wire); anything else is a bug, which
gRPC logs and answers with UNKNOWN.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from kvtier.errors import KvtierError, TierUnavailableError
from kvtier.tier.wire import code_of
from kvtier_tierd.limits import Namespaces, Progress, StalledError, namespace_of
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.monitoring.tracing import Traces

Write = Callable[[Any], Awaitable[None]]


class Calls:
    """The calls of a service. draining: whether new ones are refused."""

    def __init__(self, namespaces: Namespaces, metrics: TierMetrics, traces: Traces) -> None:
        self._namespaces, self._metrics, self._traces = namespaces, metrics, traces
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
            with self._traces.serving(method, context):
                async with self._answering(method, context) as namespace:
                    yield namespace
        finally:
            self._metrics.called(method, time.monotonic() - began)

    @asynccontextmanager
    async def _answering(self, method: str, context: Any) -> AsyncIterator[str]:
        """See `calling`."""
        try:
            yield self._enter(context)
        except KvtierError as error:
            code = code_of(error)
            self._metrics.failed(method, code.name)
            with cancelled_with_its_client():
                if isinstance(error, StalledError) and error.writing is not None:
                    # The status goes behind that write. By now the call holds nothing but this.
                    await error.writing
                await context.abort(code, str(error))
        except grpc.aio.AbortError:
            # A request that is no message was answered and counted before (decoding.py).
            raise
        except Exception:
            self._metrics.failed(method, "UNKNOWN")
            raise

    def _enter(self, context: Any) -> str:
        if self.draining:
            raise TierUnavailableError("the tier is shutting down")
        namespace = namespace_of(context)
        self._namespaces.limits(namespace)
        return namespace

    async def idle(self, timeout_s: float) -> None:
        """Wait until no call is running, but no longer."""
        if self.running:
            await asyncio.wait(self.running, timeout=timeout_s)


def writer(context: Any, stall_s: float) -> Write:
    """Writes to a client that may be slow, but not stand still for `stall_s`."""
    progress = Progress(stall_s)

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


@contextmanager
def cancelled_with_its_client() -> Iterator[None]:
    """gRPC cancels the call of a client that is gone, but a message on its way may fail before
    that; to the call this is the same, and no error of the service."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("its client is gone") from error


__all__ = ["Calls", "Write", "cancelled_with_its_client", "writer"]
