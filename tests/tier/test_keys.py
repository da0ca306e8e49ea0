"""Names of exact KV: equal for equal prefixes of equal models, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.tier.blobs.keys import KEY_BYTES, KvIdentity, Scope, SpanChain

IDENTITY = KvIdentity("llama", "abc", "bfloat16", num_layers=4, num_kv_heads=2, head_dim=64)
TOKENS = st.lists(st.integers(0, 200_000), max_size=40)
NO_SCOPE = Scope()


def span_keys(identity, token_ids, span_tokens=4, scope=NO_SCOPE):
    """The names of a whole context's spans."""
    chain = SpanChain(identity, span_tokens, scope)
    chain.extend(token_ids)
    return chain.keys


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 6))
def test_names_agree_exactly_as_far_as_the_tokens_do(shared, one, other, span):
    a, b = span_keys(IDENTITY, shared + one, span), span_keys(IDENTITY, shared + other, span)
    common = 0
    while common < min(len(shared + one), len(shared + other)):
        if (shared + one)[common] != (shared + other)[common]:
            break
        common += 1
    equal = [x == y for x, y in zip(a, b, strict=False)]
    assert equal == [(i + 1) * span <= common for i in range(len(equal))]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "qwen"}, {"revision": "abd"}, {"dtype": "float16"}, {"num_layers": 5},
        {"num_kv_heads": 4}, {"head_dim": 128}, {"tp_size": 2}, {"tp_rank": 1, "tp_size": 2},
        {"policy": "quarter"}, {"scores": "nll"},
    ],
)  # fmt: skip
def test_another_identity_scope_or_length_of_spans_shares_no_name(change):
    tokens = list(range(32))
    mine = set(span_keys(IDENTITY, tokens))
    assert mine.isdisjoint(span_keys(replace(IDENTITY, **change), tokens))
    assert mine.isdisjoint(span_keys(IDENTITY, tokens, scope=Scope(extra_key="lora-7")))
    assert mine.isdisjoint(span_keys(IDENTITY, tokens, 8))


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 6))
def test_a_context_that_grows_has_the_names_of_one_that_was_whole(first, second, tail, span):
    """Every whole span has one, and tails and records have names of their own."""
    chain = SpanChain(IDENTITY, span)
    chain.extend(first)
    chain.extend(second)
    assert chain.num_tokens == len(first + second)
    assert chain.keys == span_keys(IDENTITY, first + second, span)
    whole = len(chain.keys)
    assert whole == len(first + second) // span
    names = {chain.tail_key(whole, tail), chain.tail_key(whole, [*tail, 1]), *chain.keys}
    names |= {chain.turns_key(spans) for spans in range(whole + 1)}
    assert len(names) == 2 + whole + whole + 1
    assert {len(name) for name in names} == {KEY_BYTES}


PARTS = st.text(alphabet="a\0\1\ud800", max_size=4)
SCOPES = st.builds(Scope, PARTS, PARTS, PARTS, PARTS)


@given(SCOPES, SCOPES)
def test_scopes_that_differ_have_different_names(scope, other):
    assert (scope.encode() == other.encode()) == (scope == other)


def test_the_names_of_today_are_the_names_of_tomorrow():
    """A change here orphans every blob of every tier: it needs another protocol version."""
    (key,) = span_keys(IDENTITY, [1, 2, 3, 4])
    assert key.hex() == "28a501386f8fbec5ecc7de6ce5350fc5a0f8bee82cb783c78a43d5dc8d1c04d4"


def test_what_cannot_be_is_refused_by_name():
    for span_tokens in (0, 1 << 31):
        with pytest.raises(UsageError, match="span_tokens"):
            span_keys(IDENTITY, [1, 2], span_tokens)
    for tokens in ([1.2, 2.7], ["a", "b"], [1, 1 << 63], [[1, 2], [3, 4]]):
        with pytest.raises(UsageError, match="token_ids"):
            span_keys(IDENTITY, tokens)
