"""Attention states form a commutative monoid, and merging is exact attention over the union."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import AttentionState, empty_state, merge_states, with_sinks


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_votes: torch.Tensor):
    """float64 attention of q [rows, heads, group, dim] over k, v [entries, heads, dim]."""
    logits = torch.einsum("rhgd,ehd->rhge", q, k) * q.shape[-1] ** -0.5 + log_votes
    lse = torch.logsumexp(logits, dim=-1)
    o = torch.einsum("rhge,ehd->rhgd", torch.exp(logits - lse[..., None]), v)
    return AttentionState(o, lse)


def random_block(entries: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(entries, 2, 8, generator=g, dtype=torch.float64)
    v = torch.randn(entries, 2, 8, generator=g, dtype=torch.float64)
    votes = torch.rand(entries, generator=g, dtype=torch.float64) * 20 - 10
    return k, v, votes


def assert_states_equal(a: AttentionState, b: AttentionState, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.lse.double(), b.lse.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.o.double(), b.o.double(), rtol=tolerance, atol=tolerance)


sizes = st.integers(1, 40)
seeds = st.integers(0, 10_000)


@settings(max_examples=60)
@given(sizes, sizes, sizes, seeds)
def test_merging_states_of_blocks_is_attention_over_their_union(n1, n2, n3, seed):
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    blocks = [random_block(n, seed + i) for i, n in enumerate((n1, n2, n3))]
    a, b, c = (dense(q, *block) for block in blocks)
    whole = dense(q, *(torch.cat(parts) for parts in zip(*blocks, strict=True)))
    assert_states_equal(merge_states(merge_states(a, b), c), whole)
    assert_states_equal(merge_states(a, merge_states(b, c)), whole)
    assert_states_equal(merge_states(merge_states(c, b), a), whole)


@settings(max_examples=20)
@given(sizes, seeds)
def test_the_empty_state_is_the_identity(n, seed):
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    state = dense(q, *random_block(n, seed))
    assert_states_equal(merge_states(state, empty_state(q)), state)
    assert_states_equal(merge_states(empty_state(q), state), state)


@settings(max_examples=20)
@given(sizes, seeds)
def test_what_heads_give_to_nothing_is_an_entry_whose_value_is_zero(n, seed):
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    k, v, votes = random_block(n, seed)
    sinks = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) * 3
    logits = torch.einsum("rhgd,ehd->rhge", q, k) * q.shape[-1] ** -0.5 + votes
    beside = torch.cat([logits, sinks[None, :, :, None].expand(3, -1, -1, -1)], dim=-1)
    o = torch.einsum("rhge,ehd->rhgd", beside.softmax(-1)[..., :-1], v)
    found = with_sinks(dense(q, k, v, votes), sinks)
    assert_states_equal(found, AttentionState(o, torch.logsumexp(beside, dim=-1)))
    assert (with_sinks(empty_state(q), sinks).o == 0).all()


def test_two_empty_states_merge_to_an_empty_state_without_nan():
    q = torch.randn(3, 2, 4, 8)
    merged = merge_states(empty_state(q), empty_state(q))
    assert torch.isinf(merged.lse).all()
    assert (merged.o == 0).all()
