"""Refreshes next to the data: the entries that CA heads shall keep, chosen from a store's blobs.

    context     spans opened (pinned) and verified        in threads
    queries     one layer's entries chosen                in the workers, which all namespaces share
    end         spans unpinned; LONGEST_SESSION_S after the context, or when a worker lets go

What is verified here is what the store holds: the client verifies what it gets. Torch is imported
by a service that refreshes, and by no other.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvtier.errors import TierExhaustedError, TierUnavailableError, UsageError
from kvtier.tier.blob import checksum, decode_span_layout, verifies
from kvtier.tier.keys import KEY_BYTES
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.metrics import TierMetrics
from kvtier_tierd.namespaces import Namespaces
from kvtier_tierd.stores.base import BlobName, BlobStore, Handle

if TYPE_CHECKING:
    from kvtier.tier.refreshing import Context

# A client that asks nothing more must not pin a context for ever, and none may pin all there is.
LONGEST_SESSION_S = 50.0
MAX_SESSIONS = 32
PINNED_SHARE = 0.25

Result = TypeVar("Result")
Write = Callable[[Any], Awaitable[None]]


class Refreshes:
    """See the module docstring. workers: threads that choose; 0: this service does not refresh."""

    def __init__(
        self,
        store: BlobStore,
        namespaces: Namespaces,
        metrics: TierMetrics,
        *,
        workers: int,
        chunk_bytes: int,
    ) -> None:
        self.store, self.namespaces, self.metrics = store, namespaces, metrics
        self.chunk_bytes = chunk_bytes
        self.enabled = workers > 0
        # Contexts that are pinned, by namespace, and the bytes of all of them.
        self._sessions: Counter[str] = Counter()
        self._pinned_bytes = 0
        self._workers: Executor | None = None
        if self.enabled:
            self._workers = ThreadPoolExecutor(workers, thread_name_prefix="kvtier-refresh")

    async def start(self) -> None:
        """Raises TierUnavailableError where the packages that choosing takes are not installed."""
        if self.enabled:
            try:
                # Takes seconds: no refresh waits that long.
                await asyncio.to_thread(importlib.import_module, "kvtier.tier.refreshing")
            except ImportError as error:
                raise TierUnavailableError(f"--refresh-workers: {error}") from error

    async def close(self) -> None:
        """Waits for what the workers are at: they read the store."""
        if self._workers is not None:
            stop = functools.partial(self._workers.shutdown, wait=True, cancel_futures=True)
            await asyncio.to_thread(stop)

    async def serve(
        self, namespace: str, requests: AsyncIterator[pb.RefreshRequest], write: Write
    ) -> None:
        """One Refresh call.

        Raises UsageError or TierProtocolError for a call that makes no sense, TierExhaustedError
        where too much is pinned already, and TierUnavailableError for a call that takes too long
        or comes to a service that does not refresh.
        """
        if not self.enabled:
            raise TierUnavailableError("this tier does not refresh: it was told not to")
        if self._sessions[namespace] >= MAX_SESSIONS:
            raise TierExhaustedError(
                f"namespace {namespace!r} has {MAX_SESSIONS} refreshes under way, its limit"
            )
        self._sessions[namespace] += 1
        handles: dict[bytes, Handle] = {}
        try:
            async with asyncio.timeout(LONGEST_SESSION_S):
                await self._serve(namespace, aiter(requests), handles, write)
        except TimeoutError:
            raise TierUnavailableError(f"a refresh of {LONGEST_SESSION_S:.0f} s is over") from None
        finally:
            self._sessions[namespace] -= 1
            for handle in handles.values():
                self._pinned_bytes -= handle.info.num_bytes
                handle.close()

    async def _serve(
        self,
        namespace: str,
        requests: AsyncIterator[pb.RefreshRequest],
        handles: dict[bytes, Handle],
        write: Write,
    ) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "context":
            raise UsageError("refresh", "a context first", "none")
        context = await asyncio.to_thread(_decode, first.context)
        # Only this is a transfer: a request may wait long before it asks for its entries.
        async with self.namespaces.transfer(namespace):
            missing = await self._pin(namespace, [span.key for span in context.spans], handles)
        await write(pb.RefreshResponse(ready=pb.RefreshReady(missing=missing)))
        if not missing:
            await self._answer(namespace, context, handles, requests, write)

    async def _pin(
        self, namespace: str, keys: Iterable[bytes], handles: dict[bytes, Handle]
    ) -> list[bytes]:
        """Open the blobs of `keys`; returns those that are not held, or not as they were."""
        missing = []
        for key in keys:
            if len(key) != KEY_BYTES:
                raise UsageError("keys", f"{KEY_BYTES} bytes each", f"{len(key)}")
            name = BlobName(namespace, key)
            if key in handles:
                raise UsageError("spans", "each span once", key.hex())
            handle = await self.store.open(name)
            if handle is None:
                self.metrics.missed(namespace)
                missing.append(key)
                continue
            handles[key] = handle
            self._pinned_bytes += handle.info.num_bytes
            if self._pinned_bytes > PINNED_SHARE * self.store.stats().capacity_bytes:
                raise TierExhaustedError("as much is pinned for refreshes as may be")
            if not await undisturbed(asyncio.to_thread(_verifies, name, handle)):
                await self.store.quarantine(name)
                self.metrics.quarantined(namespace)
                missing.append(key)
        return missing

    async def _answer(
        self,
        namespace: str,
        context: Context,
        handles: dict[bytes, Handle],
        requests: AsyncIterator[pb.RefreshRequest],
        write: Write,
    ) -> None:
        size = self.namespaces.chunk_bytes(namespace, self.chunk_bytes)
        loop = asyncio.get_running_loop()
        async for request in requests:
            if request.WhichOneof("part") != "queries":
                raise UsageError("refresh", "queries after the context", "another context")
            work = loop.run_in_executor(
                self._workers, _choose, namespace, context, handles, request.queries
            )
            header, payload = await undisturbed(work)
            await write(pb.RefreshResponse(header=header))
            for begin in range(0, payload.nbytes, size):
                chunk = payload[begin : begin + size].tobytes()
                await self.namespaces.pace(namespace, len(chunk))
                await write(pb.RefreshResponse(chunk=chunk))
            self.metrics.refreshed(namespace, payload.nbytes)


async def undisturbed(work: Awaitable[Result]) -> Result:
    """What a thread returns, even when the call is over: it reads what is unpinned afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


def _decode(message: pb.RefreshContext) -> Context:
    from kvtier.tier.refreshing import decode_context

    return decode_context(message)


def _choose(
    namespace: str, context: Context, handles: dict[bytes, Handle], queries: pb.RefreshQueries
) -> tuple[pb.BlobHeader, np.ndarray]:
    """One layer's entries, and the header they are sent under."""
    from kvtier.retention.refreshing import ExactSpan, exact_kv
    from kvtier.tier.refreshing import Entries, decode_queries

    spans = []
    for span in context.spans:
        info, pieces = handles[span.key].info, handles[span.key].pieces
        layout = decode_span_layout(info.layout)
        if layout.num_tokens != span.stop - span.begin or layout.num_bytes != info.num_bytes:
            raise UsageError("span", f"{layout.num_tokens} tokens", span.stop - span.begin)
        views = [np.frombuffer(piece, np.uint8) for piece in pieces]
        payload = views[0] if len(views) == 1 else np.concatenate(views)
        spans.append(ExactSpan(span.begin, span.stop, payload, layout))
    kinds = {replace(span.layout, num_tokens=1, score_bytes=0) for span in spans}
    if len(kinds) != 1:
        raise UsageError("spans", "one layout", f"{len(kinds)}")
    (layout,) = kinds
    if len(queries.key) != KEY_BYTES:
        raise UsageError("key", f"{KEY_BYTES} bytes", len(queries.key))
    if max(queries.heads, default=0) >= layout.num_kv_heads:
        raise UsageError("heads", f"below {layout.num_kv_heads}", list(queries.heads))
    window = decode_queries(queries, layout.head_dim)
    chosen = []
    for hole in context.holes:
        k, v = exact_kv(spans, queries.layer, queries.heads, hole)
        chosen.append(context.rule.choose(k, v, hole.kept, window))
    entries = Entries(
        dtype=layout.dtype,
        num_entries=tuple(context.rule.entries(hole) for hole in context.holes),
        num_heads=len(queries.heads),
        group=queries.group,
        head_dim=layout.head_dim,
        voted=context.rule.merges,
    )
    payload, meaning = entries.encode(chosen), entries.layout()
    header = pb.BlobHeader(
        key=queries.key,
        num_bytes=payload.nbytes,
        layout=meaning,
        checksum=checksum(queries.key, namespace, meaning, payload.data),
    )
    return header, payload


def _verifies(name: BlobName, handle: Handle) -> bool:
    info = handle.info
    return verifies(info.checksum, name.key, name.namespace, info.layout, handle.pieces)


__all__ = ["Refreshes"]
