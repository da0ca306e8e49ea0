"""Names of whole contexts: which spans hold what, and who may use them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.blobs.keys import KvIdentity, Scope
from kvtier.tier.blobs.names import ContextNames, spans_by_presence, spans_of_record
from kvtier.tier.blobs.turns import NodeRecord, TurnRecord, tail_digest

IDENTITY = KvIdentity("llama", "abc", "bfloat16", 4, 2, 64, policy="quarter")
SPAN = 4
NAMES = ContextNames(IDENTITY, SPAN)
TOKENS = st.lists(st.integers(0, 1000), min_size=1, max_size=60)


def record_of(stops: list[int], exact: int = 1) -> TurnRecord:
    """Nodes that end at `stops`, the first `exact` of them exact."""
    nodes = tuple(
        NodeRecord(
            stop=stop, prompt_stop=stop, compressed=True, dropped=(0, 0), kept=0, exact=i < exact
        )
        for i, stop in enumerate(stops)
    )
    return TurnRecord(nodes=nodes, tail="")


@given(TOKENS, st.data())
def test_the_spans_of_a_record_hold_every_token_once(tokens, data):
    stop = data.draw(st.integers(1, len(tokens)))
    begin = data.draw(st.integers(0, stop - 1))
    chains = NAMES.chains(Scope(), tokens)
    spans = spans_of_record(chains, record_of([stop]), tokens, begin)
    assert spans[0].begin <= begin < spans[0].stop
    assert spans[-1].stop == stop
    assert all(a.stop == b.begin for a, b in itertools.pairwise(spans))
    assert all(span.begin % SPAN == 0 for span in spans)
    assert len({span.key for span in spans}) == len(spans)


def test_what_was_computed_over_a_compressed_turn_goes_under_the_policys_name():
    tokens = list(range(22))
    chains = NAMES.chains(Scope(), tokens)
    spans = spans_of_record(chains, record_of([10, 22]), tokens, 0)
    exact, policy = chains.exact, chains.policy
    # The third span begins in the exact turn and ends in the other.
    assert [span.key for span in spans[:3]] == [exact.keys[0], exact.keys[1], policy.keys[2]]
    assert spans[-1].key == policy.tail_key(5, tokens[20:])
    alone = spans_of_record(chains, record_of([10]), tokens, 0)
    assert alone[-1].key == exact.tail_key(2, tokens[8:10])


@given(TOKENS, TOKENS)
def test_another_policy_finds_exact_kv_and_nothing_else_and_tails_are_told_apart(tokens, other):
    mine = NAMES.chains(Scope(), tokens)
    theirs = ContextNames(replace(IDENTITY, policy="half"), SPAN).chains(Scope(), tokens)
    assert mine.exact.keys == theirs.exact.keys
    assert set(mine.policy.keys).isdisjoint(theirs.policy.keys)
    assert set(mine.exact.keys).isdisjoint(mine.policy.keys)
    assert (tail_digest(tokens) == tail_digest(other)) == (tokens == other)


@given(st.lists(st.booleans(), max_size=12), st.data())
def test_a_run_stops_at_the_first_span_that_is_missing(exact, data):
    policy = data.draw(st.lists(st.booleans(), min_size=len(exact), max_size=len(exact)))
    begin = data.draw(st.integers(0, SPAN * len(exact)))
    chains = NAMES.chains(Scope(), list(range(SPAN * len(exact))))
    spans, exact_stop = spans_by_presence(chains, exact, policy, begin)
    first = begin // SPAN
    for span in spans:
        index = span.begin // SPAN
        held = exact if span.key == chains.exact.keys[index] else policy
        assert held[index]
    end = first + len(spans)
    assert [span.begin // SPAN for span in spans] == list(range(first, end))
    if end < len(exact):
        # Nothing exact follows what is not, so an exact span behind a policy's is of no use.
        assert not policy[end]
    assert exact_stop <= max(begin, end * SPAN)
