"""The names of one server's contexts in the tier: two chains of names per context.

KV that was computed with nothing dropped before it is the same under every retention policy, and
goes under names that every server of the model finds. What was computed over a compressed context
depends on how it was compressed, and goes under names of that policy.

    turn 1, exact prefill   [ span ][ span ][ span ][ ta|                 exact chain
    turn 2, over turn 1                              |il ][ span ][ sp..  policy chain
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvtier.tier.blobs.keys import SPAN_TOKENS, KvIdentity, Scope, SpanChain
from kvtier.tier.blobs.turns import TurnRecord


@dataclass
class NamedChains:
    """The two chains of one context."""

    exact: SpanChain
    policy: SpanChain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Make both chains those of `token_ids`, which begin with the tokens they have."""
        new = token_ids[self.exact.num_tokens :]
        self.exact.extend(new)
        self.policy.extend(new)


@dataclass(frozen=True)
class ContextNames:
    """identity: of this server's KV, with its policy's digest."""

    identity: KvIdentity
    span_tokens: int = SPAN_TOKENS

    @cached_property
    def _exact(self) -> KvIdentity:
        """The identity of KV that was computed with nothing dropped."""
        return replace(self.identity, policy="")

    def chains(self, scope: Scope, token_ids: Sequence[int] = ()) -> NamedChains:
        """The chains of a context. scope: of its request."""
        chains = NamedChains(
            SpanChain(self._exact, self.span_tokens, scope),
            SpanChain(self.identity, self.span_tokens, scope),
        )
        chains.extend(token_ids)
        return chains


@dataclass(frozen=True)
class SpanName:
    """One span of a context in the tier: tokens [begin, stop) under `key`."""

    key: bytes
    begin: int
    stop: int


def _whole(chain: SpanChain, index: int) -> SpanName:
    width = chain.span_tokens
    return SpanName(chain.keys[index], index * width, (index + 1) * width)


def _whole_spans(chains: NamedChains, indices: Iterable[int], exact_stop: int) -> list[SpanName]:
    """Whole spans of a context that is exact up to a token."""
    exact = exact_stop // chains.exact.span_tokens
    return [_whole(chains.exact if i < exact else chains.policy, i) for i in indices]


def spans_of_record(
    chains: NamedChains, record: TurnRecord, token_ids: Sequence[int], begin: int
) -> list[SpanName]:
    """The spans that hold tokens [begin, record.stop) of a recorded context, the tail included.

    chains must have all of the record's whole spans.
    """
    width, exact_stop = chains.exact.span_tokens, record.exact_stop
    whole = record.stop // width
    spans = _whole_spans(chains, range(begin // width, whole), exact_stop)
    if record.stop > max(whole * width, begin):
        chain = chains.exact if record.stop <= exact_stop else chains.policy
        tail = token_ids[whole * width : record.stop]
        spans.append(SpanName(chain.tail_key(whole, tail), whole * width, record.stop))
    return spans


def spans_by_presence(
    chains: NamedChains, exact: Sequence[bool], policy: Sequence[bool], begin: int
) -> tuple[list[SpanName], int]:
    """The longest run of whole spans from token `begin` on that the tier has, exact ones first.

    Returns the spans and up to which token they are exact.
    """
    width = chains.exact.span_tokens
    spans: list[SpanName] = []
    index, exact_stop = begin // width, begin
    for chain, present in ((chains.exact, exact), (chains.policy, policy)):
        while index < len(present) and present[index]:
            spans.append(_whole(chain, index))
            index += 1
        if chain is chains.exact:
            exact_stop = index * width
    return spans, exact_stop


def spans_of_ranges(
    chains: NamedChains, ranges: Sequence[tuple[int, int]], exact_stop: int
) -> list[SpanName] | None:
    """The whole spans that hold some ranges [begin, end) of tokens, in order, each once.

    exact_stop: up to which token the context was computed with nothing dropped.
    None where a range goes beyond the last whole span.
    """
    width = chains.exact.span_tokens
    numbers = sorted({i for a, b in ranges for i in range(a // width, (b - 1) // width + 1)})
    if numbers and numbers[-1] >= len(chains.exact.keys):
        return None
    return _whole_spans(chains, numbers, exact_stop)
