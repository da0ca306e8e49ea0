"""What the tier has of a prompt, fetched in the background into host memory.

Two things may be there, and the longer one wins:

    a record    every turn up to some point, with how each was compressed: restored, the session
                goes on as if it had never left
    a run       whole spans from where the device's own prefix ends: restored, they are exact KV, as
                if they had been computed again

A run may continue where a record ends: the session was left in the middle of its next turn.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.errors import TierProtocolError
from kvtier.tier.blob import SpanLayout
from kvtier.tier.client import Landing, Offer, TierClient
from kvtier.tier.link import TierLink
from kvtier.tier.names import (
    ContextNames,
    NamedChains,
    SpanName,
    spans_by_presence,
    spans_of_record,
)
from kvtier.tier.turns import MAX_BYTES, Place, TurnRecord, decode_record, places, tail_digest

# Longer calls outlive their leases and deadlines; shorter ones cost more calls.
BLOBS_PER_GET = 32
RECORDS_TRIED = 3


@dataclass
class Landed:
    """Exact KV of tokens [begin, stop), verified, in host memory.

    places:     the recorded nodes in it, first to last; what is behind them is one plain run.
    exact_stop: up to which token it was computed with nothing dropped.
    spans:      in order; payloads[i] belongs to spans[i], uint8 `[bytes]`.
    host_bytes: claimed of the link's memory, until `release`.
    """

    begin: int
    stop: int
    exact_stop: int
    places: list[Place]
    spans: list[SpanName]
    payloads: list[np.ndarray]
    host_bytes: int
    link: TierLink = field(repr=False)

    def release(self) -> None:
        """Give the host memory back."""
        self.link.release(self.host_bytes)
        self.host_bytes = 0
        self.payloads = []


@dataclass(frozen=True)
class Lookup:
    """One prompt's question to the tier; `__call__` runs in the link's thread.

    token_ids: of the prompt that may be matched; begin: tokens that the device has.
    layout_of: the layout of a span of so many tokens, as this server reads it.
    least:     fewer tokens than that are computed faster than they are fetched.
    """

    names: ContextNames
    link: TierLink
    token_ids: Sequence[int]
    begin: int
    extra_key: str
    layouts: dict[int, SpanLayout]
    least: int

    def __call__(self, client: TierClient) -> Landed | None:
        chains = self.names.chains(self.extra_key, self.token_ids)
        record, spans, exact_stop = self._plan(client, chains)
        stop = spans[-1].stop if spans else self.begin
        if stop - self.begin < self.least:
            return None
        return self._fetch(client, record, spans, exact_stop)

    def _plan(
        self, client: TierClient, chains: NamedChains
    ) -> tuple[TurnRecord | None, list[SpanName], int]:
        """Which spans to fetch, and up to where they are exact."""
        whole = len(chains.exact.keys)
        first = self.begin // self.names.span_tokens
        asked = [
            *chains.exact.keys,
            *chains.policy.keys,
            *(chains.policy.turns_key(spans) for spans in range(first, whole + 1)),
        ]
        present = client.exists(asked).present
        exact, policy = present[:whole], present[whole : 2 * whole]
        recorded = [first + i for i, held in enumerate(present[2 * whole :]) if held]
        record = self._record(client, chains, recorded)
        run, run_exact = spans_by_presence(chains, exact, policy, self.begin)
        if record is None:
            return None, run, run_exact
        spans = spans_of_record(chains, record, self.token_ids, self.begin)
        exact_stop = min(record.exact_stop, record.stop)
        tail, tail_exact = spans_by_presence(chains, exact, policy, record.stop)
        if tail and tail[-1].stop > record.stop:
            # The span in which the record ends is fetched whole instead of the record's tail.
            spans = [span for span in spans if span.stop <= tail[0].begin] + tail
            exact_stop = max(exact_stop, tail_exact if tail_exact > record.stop else 0)
        return record, spans, exact_stop

    def _record(
        self, client: TierClient, chains: NamedChains, recorded: list[int]
    ) -> TurnRecord | None:
        """The longest record that is of this very context and continues the device's prefix."""
        for spans in reversed(recorded[-RECORDS_TRIED:]):
            payload = _small_blob(client, chains.policy.turns_key(spans))
            if payload is None:
                continue
            try:
                record = decode_record(payload)
            except TierProtocolError:
                # Another version's, or a stranger's: no reason to give up on the tier.
                continue
            tail = self.token_ids[spans * self.names.span_tokens : record.stop]
            fits = record.stop // self.names.span_tokens == spans
            if not fits or record.stop > len(self.token_ids) or record.stop <= self.begin:
                continue
            starts = {place.start for place in places(record)}
            if tail_digest(tail) == record.tail and self.begin in starts:
                return record
        return None

    def _fetch(
        self,
        client: TierClient,
        record: TurnRecord | None,
        spans: list[SpanName],
        exact_stop: int,
    ) -> Landed | None:
        sizes = [self._layout(span).num_bytes for span in spans]
        total = sum(sizes)
        if not self.link.claim(total):
            return None
        landed = None
        try:
            payloads = _host_buffers(sizes)
            count = self._land(client, spans, payloads)
            landed = self._landed(record, spans[:count], payloads[:count], exact_stop, total)
        finally:
            if landed is None:
                self.link.release(total)
        return landed

    def _layout(self, span: SpanName) -> SpanLayout:
        tokens = span.stop - span.begin
        if tokens not in self.layouts:
            known = self.layouts[self.names.span_tokens]
            score = known.score_bytes // known.num_tokens * tokens
            self.layouts[tokens] = SpanLayout(
                known.dtype, known.num_layers, tokens, known.num_kv_heads, known.head_dim, score
            )
        return self.layouts[tokens]

    def _land(self, client: TierClient, spans: list[SpanName], payloads: list[np.ndarray]) -> int:
        """How many of the spans landed, from the first on."""
        count = 0
        for first in range(0, len(spans), BLOBS_PER_GET):
            part = spans[first : first + BLOBS_PER_GET]
            encoded = [self._layout(span).encode() for span in part]

            def land(
                offer: Offer, first: int = first, encoded: list[bytes] = encoded
            ) -> memoryview | None:
                payload = payloads[first + offer.position]
                fits = offer.layout == encoded[offer.position]
                return payload.data if fits and offer.num_bytes == payload.nbytes else None

            expected = sum(payload.nbytes for payload in payloads[first : first + len(part)])
            outcome = client.get([span.key for span in part], land, expected)
            for one in outcome:
                if one is not Landing.LANDED:
                    return count
                count += 1
        return count

    def _landed(
        self,
        record: TurnRecord | None,
        spans: list[SpanName],
        payloads: list[np.ndarray],
        exact_stop: int,
        host_bytes: int,
    ) -> Landed | None:
        """What can be made of the spans that landed: recorded nodes as far as they are whole."""
        stop = spans[-1].stop if spans else self.begin
        if stop - self.begin < self.least:
            return None
        whole: list[Place] = []
        if record is not None:
            mine = [place for place in places(record) if place.start >= self.begin]
            whole = [place for place in mine if place.node.stop <= stop]
            if len(whole) < len(mine):
                # Half a recorded node is no node: as plain KV it would be compressed another way.
                stop = whole[-1].node.stop if whole else self.begin
                if stop - self.begin < self.least:
                    return None
        return Landed(
            self.begin, stop, min(exact_stop, stop), whole, spans, payloads, host_bytes, self.link
        )


def _host_buffers(sizes: Sequence[int]) -> list[np.ndarray]:
    """Uninitialised host memory, in one allocation."""
    total = sum(sizes)
    memory = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
    bounds = np.cumsum([0, *sizes])
    return [memory[a:b] for a, b in itertools.pairwise(bounds)]


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


__all__ = ["Landed", "Lookup"]
