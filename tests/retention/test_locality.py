"""The locality rule: what is dropped, and where a compressed node may be cut."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.retention.locality import DroppedSpan, LocalityRule

lengths = st.integers(0, 500)
rules = st.builds(
    LocalityRule,
    sink_tokens=st.integers(0, 60),
    recent_tokens=st.integers(1, 80),
    branch_recent_tokens=st.integers(0, 80),
    recent_of=st.integers(1, 20),
)


@given(rules, lengths, lengths, lengths)
def test_sink_recent_and_generated_tokens_stay_and_the_rest_is_dropped(
    rule, start, prompt, generated
):
    """A single token is not dropped. A prompt that goes on beyond the node is all of it."""
    stop = start + prompt + generated
    span = rule.dropped(start, stop, start + prompt)
    droppable = [
        p
        for p in range(start, start + prompt)
        if p >= rule.sink_tokens and p < start + prompt - rule.recent(prompt)
    ]
    dropped = [*range(start + span.begin, start + span.end)]
    assert dropped == (droppable if len(droppable) > 1 else [])
    assert rule.dropped(start, stop, stop + 300) == rule.dropped(start, stop, stop)


@given(rules, lengths, st.integers(1, 500))
def test_a_cut_never_tears_the_dropped_span(rule, start, prompt):
    span = rule.dropped(start, start + prompt, start + prompt)
    for offset in range(prompt + 1):
        if rule.can_split(span, offset):
            assert not span.begin < offset < span.end


def test_a_cut_behind_the_span_keeps_enough_recent_tokens():
    rule = LocalityRule(sink_tokens=4, recent_tokens=10, branch_recent_tokens=6)
    span = rule.dropped(0, 100, 100)
    assert span == DroppedSpan(4, 90)
    assert not rule.can_split(span, 95)
    assert rule.can_split(span, 96)
    assert rule.can_split(span, 4)


def test_a_short_prompt_keeps_fewer_recent_tokens():
    rule = LocalityRule(sink_tokens=4, recent_tokens=16, branch_recent_tokens=0, recent_of=128)
    recent = {tokens: rule.recent(tokens) for tokens in (1, 255, 256, 2047, 2048, 100_000)}
    assert recent == {1: 1, 255: 1, 256: 2, 2047: 15, 2048: 16, 100_000: 16}


@given(rules)
def test_a_context_of_the_least_tokens_is_the_shortest_that_drops_any(rule):
    least = rule.least_tokens
    shorter = (rule.dropped(0, tokens, tokens).num_tokens for tokens in range(least))
    assert not any(shorter)
    assert rule.dropped(0, least, least).num_tokens
