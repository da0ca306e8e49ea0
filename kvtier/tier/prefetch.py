"""The part of a prompt that the tier has, fetched in the background into host memory.

Two things may be there, and the one of which more is there wins:

    a record    every turn up to some point, with how each was compressed: restored, the session
                goes on as if it had never left
    a run       whole spans from where the device's own prefix ends: restored, they are exact KV, as
                if they had been computed again

A run may continue where a record ends: the session was left in the middle of its next turn.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.names import (
    ContextNames,
    NamedChains,
    SpanName,
    spans_by_presence,
    spans_of_record,
)
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.blobs.turns import MAX_BYTES, Place, TurnRecord, decode_record, places, tail_digest
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.transport.landing import Landing, Offer

# Longer calls outlive their leases and deadlines; shorter ones cost more calls.
BLOBS_PER_GET = 32
RECORDS_TRIED = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layouts:
    """The layouts in which this server reads spans. whole: of a span of `whole.num_tokens`
    tokens."""

    whole: SpanLayout

    def of(self, span: SpanName) -> SpanLayout:
        """The layout of a span of any length."""
        whole, tokens = self.whole, span.stop - span.begin
        scores = whole.score_bytes // whole.num_tokens * tokens
        return SpanLayout(
            whole.dtype, whole.num_layers, tokens, whole.num_kv_heads, whole.head_dim, scores
        )


@dataclass
class HostSpans:
    """Spans that follow each other, all landed. payloads[i]: uint8 `[bytes]` of spans[i].

    Holds host memory of the link until `release`; may be passed between threads, not shared.
    """

    spans: list[SpanName]
    payloads: list[np.ndarray]
    link: TierLink = field(repr=False)
    host_bytes: int

    def release(self) -> None:
        """Give the memory back; the payloads are gone. Calling it again does nothing."""
        self.link.release(self.host_bytes)
        self.host_bytes = 0
        self.spans, self.payloads = [], []


def fetch_spans(
    client: TierClient, link: TierLink, spans: Sequence[SpanName], layouts: Layouts
) -> HostSpans | None:
    """Fetch as many of the spans as land, from the first on; None where there is no host memory.

    Blocks; raises TierError like the client.
    """
    sizes = [layouts.of(span).num_bytes for span in spans]
    total = sum(sizes)
    if not total or not link.claim(total):
        return None
    host = HostSpans(list(spans), [], link, total)
    try:
        host.payloads = _buffers(sizes)
        count = _land(client, host, layouts)
    except BaseException:
        host.release()
        raise
    del host.spans[count:], host.payloads[count:]
    return host


def _land(client: TierClient, host: HostSpans, layouts: Layouts) -> int:
    """Fetch the spans into their buffers and return how many landed, from the first on."""
    count = 0
    for first in range(0, len(host.spans), BLOBS_PER_GET):
        part = host.spans[first : first + BLOBS_PER_GET]
        payloads = host.payloads[first : first + BLOBS_PER_GET]
        encoded = [layouts.of(span).encode() for span in part]

        def land(
            offer: Offer, payloads: list[np.ndarray] = payloads, encoded: list[bytes] = encoded
        ) -> memoryview | None:
            payload = payloads[offer.position]
            fits = offer.layout == encoded[offer.position] and offer.num_bytes == payload.nbytes
            return payload.data if fits else None

        expected = sum(payload.nbytes for payload in payloads)
        for outcome in client.get([span.key for span in part], land, expected):
            if outcome is not Landing.LANDED:
                return count
            count += 1
    return count


def _buffers(sizes: Sequence[int]) -> list[np.ndarray]:
    """Uninitialised host memory, in one allocation."""
    memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=np.uint8)
    ends = np.cumsum(sizes)
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@dataclass
class Landed:
    """Exact KV of tokens [begin, stop), verified, in host memory.

    places:     the recorded nodes that are whole in it, first to last; what is behind them is one
                plain run.
    exact_stop: up to which token it was computed with nothing dropped.
    host:       the spans that hold it.
    """

    begin: int
    stop: int
    exact_stop: int
    places: list[Place]
    host: HostSpans


@dataclass(frozen=True)
class Lookup:
    """One prompt's question to the tier; `needs` and `__call__` run in the link's thread.

    token_ids: of the prompt that may be matched; begin: tokens that the device has.
    least:     fewer tokens than that are computed faster than they are fetched.
    rules:     of this server: a record that they do not make is as good as none.
    """

    names: ContextNames
    link: TierLink
    rules: TurnRules
    token_ids: Sequence[int]
    begin: int
    scope: Scope
    layouts: Layouts
    least: int

    def __call__(self, client: TierClient) -> Landed | None:
        record, spans, exact_stop = self._plan(client)
        stop = spans[-1].stop if spans else self.begin
        if stop - self.begin < self.least:
            return None
        host = fetch_spans(client, self.link, spans, self.layouts)
        if host is None:
            return None
        landed = self._landed(record, host, exact_stop)
        if landed is None:
            host.release()
        return landed

    @property
    def _first(self) -> int:
        """The span in which the device's prefix ends."""
        return self.begin // self.names.span_tokens

    @cached_property
    def _chains(self) -> NamedChains:
        return self.names.chains(self.scope, self.token_ids)

    @cached_property
    def _turns(self) -> list[bytes]:
        """Names of records that end behind what the device has."""
        behind = range(self._first, len(self._chains.exact.keys) + 1)
        return [self._chains.policy.turns_key(spans) for spans in behind]

    def needs(self) -> list[bytes]:
        """The names of all that may be fetched."""
        chains, first = self._chains, self._first
        return [*chains.exact.keys[first:], *chains.policy.keys[first:], *self._turns]

    def _plan(self, client: TierClient) -> tuple[TurnRecord | None, list[SpanName], int]:
        """Return the record, if any, the spans to fetch, and up to where they are exact."""
        chains, turns = self._chains, self._turns
        asked = [*chains.exact.keys, *chains.policy.keys, *turns]
        present = client.exists(asked).present
        whole = len(chains.exact.keys)
        exact, policy = present[:whole], present[whole : 2 * whole]
        record = self._record(client, chains, present[2 * whole :])
        run, run_exact = spans_by_presence(chains, exact, policy, self.begin)
        if record is None:
            return None, run, run_exact
        spans = spans_of_record(chains, record, self.token_ids, self.begin)
        held = {key for key, here in zip(asked, present, strict=True) if here}
        width = self.names.span_tokens
        torn = [s.begin for s in spans if s.stop - s.begin == width and s.key not in held]
        if torn:
            if run and run[-1].stop > torn[0]:
                return None, run, run_exact
            return record, [s for s in spans if s.stop <= torn[0]], record.exact_stop
        exact_stop = record.exact_stop
        tail, tail_exact = spans_by_presence(chains, exact, policy, record.stop)
        if tail and tail[-1].stop > record.stop:
            # The span in which the record ends is fetched whole instead of the record's tail.
            spans = [span for span in spans if span.stop <= tail[0].begin] + tail
            exact_stop = max(exact_stop, tail_exact if tail_exact > record.stop else 0)
        return record, spans, exact_stop

    def _record(
        self, client: TierClient, chains: NamedChains, present: Sequence[bool]
    ) -> TurnRecord | None:
        """The longest record that is of this very context and continues the device's prefix.

        present: whether there is one that ends in the span where the prefix ends, and in each
        behind it.
        """
        recorded = [self._first + i for i, held in enumerate(present) if held]
        for spans in reversed(recorded[-RECORDS_TRIED:]):
            payload = _small_blob(client, chains.policy.turns_key(spans))
            if payload is None:
                continue
            try:
                record = decode_record(payload)
                self.rules.check(record, self.scope.share)
            except TierProtocolError as error:
                # Another version's, or a stranger's: no reason to give up on the tier.
                self.link.count("records_refused")
                logger.warning("%s; it is not used", error)
                continue
            tail = self.token_ids[spans * self.names.span_tokens : record.stop]
            fits = record.stop // self.names.span_tokens == spans
            if not fits or record.stop > len(self.token_ids) or record.stop <= self.begin:
                continue
            if record.start != self.scope.memory_tokens:
                continue
            starts = {place.start for place in places(record)}
            if tail_digest(tail) == record.tail and self.begin in starts:
                return record
        return None

    def _landed(self, record: TurnRecord | None, host: HostSpans, exact_stop: int) -> Landed | None:
        """Return what can be made of the spans that landed. A recorded node of which some are
        missing is as lost as its record: the rest of it is a run, as for a fork in the middle of
        it."""
        stop = host.spans[-1].stop if host.spans else self.begin
        if stop - self.begin < self.least:
            return None
        recorded = [] if record is None else places(record)
        whole = [place for place in recorded if self.begin <= place.start < place.node.stop <= stop]
        if record is not None and stop < record.stop:
            # The spans that would have followed the record say nothing of what is in it.
            exact_stop = record.exact_stop
        return Landed(self.begin, stop, min(exact_stop, stop), whole, host)


def _small_blob(client: TierClient, key: bytes) -> bytearray | None:
    """A record's bytes, or None where it does not land."""
    landed = bytearray()

    def land(offer: Offer) -> memoryview | None:
        nonlocal landed
        if offer.num_bytes > MAX_BYTES:
            return None
        landed = bytearray(offer.num_bytes)
        return memoryview(landed)

    (outcome,) = client.get([key], land, MAX_BYTES)
    return landed if outcome is Landing.LANDED else None
