"""Attention states form a commutative monoid, and merging is exact attention over the union."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import AttentionState, empty_state, merge_states, with_sinks


def dense(q, k, v, log_votes):
    """float64 attention of q [rows, heads, group, dim] over k, v [entries, heads, dim]."""
    logits = torch.einsum("rhgd,ehd->rhge", q, k) * q.shape[-1] ** -0.5 + log_votes
    lse = torch.logsumexp(logits, dim=-1)
    o = torch.einsum("rhge,ehd->rhgd", torch.exp(logits - lse[..., None]), v)
    return AttentionState(o, lse)


def random_block(entries):
    k, v = torch.randn(2, entries, 2, 8, dtype=torch.float64)
    return k, v, torch.rand(entries, dtype=torch.float64) * 20 - 10


def assert_states_equal(a, b):
    torch.testing.assert_close(a.lse.double(), b.lse.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.o.double(), b.o.double(), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=3, max_size=3), st.integers(0, 10_000))
def test_merging_states_of_blocks_is_attention_over_their_union(entries, seed):
    """The empty state is the identity, and two of it merge to one without NaN."""
    torch.manual_seed(seed)
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    blocks = [random_block(n) for n in entries]
    a, b, c = (dense(q, *block) if len(block[0]) else empty_state(q) for block in blocks)
    union = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
    whole = dense(q, *union) if sum(entries) else empty_state(q)
    assert_states_equal(merge_states(merge_states(a, b), c), whole)
    assert_states_equal(merge_states(a, merge_states(b, c)), whole)
    assert_states_equal(merge_states(merge_states(c, b), a), whole)


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(0, 10_000))
def test_what_heads_give_to_nothing_is_an_entry_whose_value_is_zero(n, seed):
    torch.manual_seed(seed)
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    k, v, votes = random_block(n)
    sinks = torch.randn(2, 4) * 3
    logits = torch.einsum("rhgd,ehd->rhge", q, k) * q.shape[-1] ** -0.5 + votes
    beside = torch.cat([logits, sinks[None, :, :, None].expand(3, -1, -1, -1)], dim=-1)
    o = torch.einsum("rhge,ehd->rhgd", beside.softmax(-1)[..., :-1], v)
    found = with_sinks(dense(q, k, v, votes), sinks)
    assert_states_equal(found, AttentionState(o, torch.logsumexp(beside, dim=-1)))
    assert (with_sinks(empty_state(q), sinks).o == 0).all()
