"""A refresh next to the data, seen by the engine: queries go, entries come, exact KV stays.

One session is one context's, for one turn. It is opened in the background while the request waits,
which takes as long as the service needs to check the context's spans; then the forward pass asks
layer by layer, and waits for each answer no longer than it is told to.

    opener      ── context ─>    <─ ready ──
    scheduler   ── queries of layer 0 ─>    <─ entries ──        once per layer, in any order
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence

import grpc
import numpy as np

from kvtier.errors import (
    TierError,
    TierExhaustedError,
    TierIntegrityError,
    TierProtocolError,
    TierUnavailableError,
)
from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen
from kvtier.tier.blobs.keys import KEY_BYTES
from kvtier.tier.client import TierClient
from kvtier.tier.near_data.messages import Context, Entries, encode_queries
from kvtier.tier.transport.connection import Deadline
from kvtier.tier.transport.landing import Arriving, Landing, Offer
from kvtier.tier.wire import error_of
from kvtier.v1 import tier_pb2 as pb

# A request that waits longer for its forward pass keeps what it had: the service pins its spans.
LONGEST_SESSION_S = 60.0
# The service ends a session earlier than that, by its own clock.
EARLY_S = 15.0


class NearData:
    """One session. Open it in one thread, use it in another, close it in any.

    moved_bytes: of queries and entries, so far.
    Methods raise TierError; a session that raised is of no use any more. What was not answered
    because this side would not wait is a TierExhaustedError: the tier may be well.
    """

    def __init__(self, client: TierClient, context: Context) -> None:
        self.address, self.namespace = client.address, client.namespace
        self.context = context
        self.moved_bytes = 0
        self._opened = time.monotonic()
        # The error if nothing comes in time: a tier that does not open a session in time is not
        # well.
        self._late: type[TierError] = TierUnavailableError
        self._requests: queue.SimpleQueue[pb.RefreshRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.RefreshResponse | TierError] = queue.SimpleQueue()
        self._requests.put(pb.RefreshRequest(context=context.encode()))
        # A thread of gRPC's own takes them from there; None ends them.
        self._call = client.refresh(iter(self._requests.get, None), LONGEST_SESSION_S)
        self._reader = threading.Thread(target=self._read, name="kvtier-near-data", daemon=True)
        self._reader.start()

    @classmethod
    def open(cls, client: TierClient, context: Context, deadline: Deadline) -> NearData | None:
        """A session whose spans are at hand; None where the tier lacks any of them."""
        session = cls(client, context)
        try:
            answer = session._answer(deadline)
            if answer.WhichOneof("part") != "ready":
                raise TierProtocolError(f"tier {client.address}: no answer to a context")
            if not answer.ready.missing:
                session._late = TierExhaustedError
                return session
        except BaseException:
            session.close()
            raise
        session.close()
        return None

    def choose(
        self, layer: int, heads: Sequence[int], window: QueryWindow, dtype: str, deadline: Deadline
    ) -> list[Chosen]:
        """Ask what the KV heads `heads` of a layer keep of each pruned range, and return it.

        window: their newest queries, see QueryWindow; dtype: of the exact KV, without `torch.`
        """
        rule = self.context.rule
        q = window.q[-rule.keepkv.window_queries :]
        entries = Entries(
            dtype=dtype,
            num_entries=tuple(rule.entries(pruned) for pruned in self.context.ranges),
            num_heads=len(heads),
            group=q.shape[2],
            head_dim=q.shape[3],
            voted=rule.merges,
        )
        # Random: no answer can be taken for that to another question.
        key = os.urandom(KEY_BYTES)
        queries = encode_queries(key, layer, heads, QueryWindow(q, window.scale))
        self._requests.put(pb.RefreshRequest(queries=queries))
        payload = self._entries(key, entries, deadline)
        self.moved_bytes += len(queries.queries) + payload.nbytes
        return entries.decode(payload)

    def close(self) -> None:
        """The service may forget the context. Calling it again does nothing."""
        self._requests.put(None)
        self._call.cancel()

    def _entries(self, key: bytes, entries: Entries, deadline: Deadline) -> np.ndarray:
        header = self._answer(deadline).header
        if header.key != key or header.layout != entries.layout():
            raise TierProtocolError(f"tier {self.address}: entries that were not asked for")
        payload = np.empty(entries.num_bytes, np.uint8)

        def land(offer: Offer) -> memoryview | None:
            return payload.data if offer.num_bytes == payload.nbytes else None

        arriving = Arriving(0, header, self.namespace, land)
        landed = 0
        while landed < payload.nbytes:
            chunk = self._answer(deadline).chunk
            if not chunk:
                raise TierProtocolError(f"tier {self.address}: entries that end too soon")
            arriving.add(memoryview(chunk))
            landed += len(chunk)
        if arriving.finish() is not Landing.LANDED:
            raise TierIntegrityError(f"tier {self.address}: entries that do not verify")
        return payload

    def _answer(self, deadline: Deadline) -> pb.RefreshResponse:
        try:
            answer = self._answers.get(timeout=deadline.left())
        except queue.Empty:
            raise self._late(f"tier {self.address}: no answer in time") from None
        if isinstance(answer, TierError):
            # No other answer follows: a caller that asks again gets this one again.
            self._answers.put(answer)
            raise answer
        return answer

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            error: TierError = TierUnavailableError(f"tier {self.address}: the refresh is over")
        except grpc.RpcError as failure:
            error = error_of(failure, self.address)
            if time.monotonic() - self._opened > LONGEST_SESSION_S - EARLY_S:
                error = TierExhaustedError(f"tier {self.address}: the refresh waited too long")
        self._answers.put(error)
