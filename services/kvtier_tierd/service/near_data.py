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
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtier.errors import TierExhaustedError, TierUnavailableError, UsageError
from kvtier.tier.blobs.payload import checksum, decode_span_layout
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits import Namespaces
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.options import TierOptions
from kvtier_tierd.service.calls import Write
from kvtier_tierd.service.requests import await_uncancelled, header_of, is_intact, names_of
from kvtier_tierd.stores.base import BlobInfo, BlobStore, Handle

if TYPE_CHECKING:
    from kvtier.tier.near_data.exact_kv import ExactSpan
    from kvtier.tier.near_data.messages import Context

# A client that asks nothing more must not pin a context for ever, and none may pin all there is.
LONGEST_SESSION_S = 50.0
MAX_SESSIONS = 32
PINNED_SHARE = 0.25


class Refreshes:
    """The Refresh calls of a service, whose `enabled` says whether it does any."""

    def __init__(
        self, options: TierOptions, store: BlobStore, namespaces: Namespaces, metrics: TierMetrics
    ) -> None:
        self.store, self.namespaces, self.metrics = store, namespaces, metrics
        self.chunk_bytes = options.chunk_bytes
        self.enabled = options.refresh_workers > 0
        # Contexts that are pinned, by namespace, and the bytes of all of them.
        self._sessions: Counter[str] = Counter()
        self._pinned_bytes = 0
        self._workers: Executor | None = None
        if self.enabled:
            self._workers = ThreadPoolExecutor(options.refresh_workers, "kvtier-refresh")

    async def start(self) -> None:
        """Raises TierUnavailableError where the packages that choosing takes are not installed."""
        if self.enabled:
            try:
                # Takes seconds: no refresh waits that long.
                await asyncio.to_thread(importlib.import_module, "kvtier.tier.near_data.messages")
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
        from kvtier.tier.near_data.messages import decode_context

        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "context":
            raise UsageError("refresh", "a context first", "none")
        context = await asyncio.to_thread(decode_context, first.context)
        # Only this is a transfer: a request may wait long before it asks for its entries.
        async with self.namespaces.transfer(namespace):
            missing = await self._pin(namespace, [span.key for span in context.spans], handles)
        await write(pb.RefreshResponse(ready=pb.RefreshReady(missing=missing)))
        if not missing:
            await self._answer(namespace, context, handles, requests, write)

    async def _pin(
        self, namespace: str, keys: Sequence[bytes], handles: dict[bytes, Handle]
    ) -> list[bytes]:
        """Open the blobs of `keys`; returns those that are not held, or not as they were: as soon
        as there is one, nothing is asked of the others."""
        names = names_of(namespace, keys)
        if len(set(keys)) < len(keys):
            raise UsageError("spans", "each span once", f"{len(keys)} keys")
        held = await self.store.exists(names)
        missing = [name.key for name, one in zip(names, held, strict=True) if not one]
        for name in [] if missing else names:
            handle = await self.store.open(name)
            if handle is None:
                missing.append(name.key)
                break
            handles[name.key] = handle
            self._pinned_bytes += handle.info.num_bytes
            if self._pinned_bytes > PINNED_SHARE * self.store.stats().capacity_bytes:
                raise TierExhaustedError("as much is pinned for refreshes as may be")
            if not await is_intact(name, handle):
                await self.store.quarantine(name)
                self.metrics.quarantined(namespace)
                missing.append(name.key)
                break
        for _ in missing:
            self.metrics.missed(namespace)
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
        # Once for all layers: a store whose blobs are in pieces copies them here.
        spans = await await_uncancelled(asyncio.to_thread(_exact_spans, context, handles))
        async for request in requests:
            if request.WhichOneof("part") != "queries":
                raise UsageError("refresh", "queries after the context", "another context")
            work = loop.run_in_executor(
                self._workers, _choose, namespace, context, spans, request.queries
            )
            header, payload = await await_uncancelled(work)
            await write(pb.RefreshResponse(header=header))
            for begin in range(0, payload.nbytes, size):
                chunk = payload[begin : begin + size].tobytes()
                await self.namespaces.pace(namespace, len(chunk))
                await write(pb.RefreshResponse(chunk=chunk))
            self.metrics.refreshed(namespace, payload.nbytes)


def _exact_spans(context: Context, handles: dict[bytes, Handle]) -> list[ExactSpan]:
    """The context's exact KV. Raises UsageError for spans that are not what it says."""
    from kvtier.tier.near_data.exact_kv import ExactSpan

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
    return spans


def _choose(
    namespace: str, context: Context, spans: list[ExactSpan], queries: pb.RefreshQueries
) -> tuple[pb.BlobHeader, np.ndarray]:
    """One layer's entries, and the header they are sent under."""
    from kvtier.tier.near_data.exact_kv import choose_ranges
    from kvtier.tier.near_data.messages import Entries, decode_queries

    layout = spans[0].layout
    names_of(namespace, [queries.key])
    if max(queries.heads, default=0) >= layout.num_kv_heads:
        raise UsageError("heads", f"below {layout.num_kv_heads}", list(queries.heads))
    window = decode_queries(queries, layout.head_dim)
    chosen = choose_ranges(
        context.rule, spans, queries.layer, queries.heads, context.ranges, window
    )
    entries = Entries(
        dtype=layout.dtype,
        num_entries=tuple(context.rule.entries(pruned) for pruned in context.ranges),
        num_heads=len(queries.heads),
        group=queries.group,
        head_dim=layout.head_dim,
        voted=context.rule.merges,
    )
    payload, meaning = entries.encode(chosen), entries.layout()
    digest = checksum(queries.key, namespace, meaning, payload.data)
    return header_of(queries.key, BlobInfo(payload.nbytes, meaning, digest)), payload
