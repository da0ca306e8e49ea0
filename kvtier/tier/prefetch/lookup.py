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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.names import (
    ContextNames,
    NamedChains,
    SpanName,
    spans_by_presence,
    spans_of_record,
)
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.blobs.turns import MAX_BYTES, Place, TurnRecord, decode_record, places, tail_digest
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.prefetch.host import HostSpans, Layouts, fetch_spans
from kvtier.tier.transport.landing import Landing, Offer

logger = logging.getLogger(__name__)

RECORDS_TRIED = 3


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


__all__ = ["Landed", "Lookup"]
