"""Merged entries give what the entries they are made of gave, in dense float64 attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_problems import (
    asked,
    assert_same,
    attention_over,
    dtypes,
    joined,
    make_problem,
    merge,
    seeds,
)

from kvtier_kernels.merging import (
    Assignment,
    Entries,
    exact_entries,
)

# -- Theorem 3 --


@settings(max_examples=60)
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 60),
    count=st.integers(1, 20),
    logit_std=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
)
def test_the_query_that_gave_the_logits_sees_no_difference(
    seed: int, heads: int, tokens: int, count: int, logit_std: float
) -> None:
    problem = make_problem(seed, heads, 1, tokens, count, logit_std)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(problem), problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)


@settings(max_examples=40)
@given(seed=seeds, group=st.integers(2, 6), logit_std=st.sampled_from([0.5, 2.0]))
def test_merging_keeps_the_mass_of_every_query_head_at_once(
    seed: int, group: int, logit_std: float
) -> None:
    for vote_rows in (1, group):
        problem = make_problem(seed, 2, group, logit_std=logit_std, vote_rows=vote_rows)
        merged = merge(problem)
        assert merged.log_votes.shape == (2, group, 5)
        before = attention_over(problem.q, problem.entries, problem.scale)
        after = attention_over(problem.q, merged, problem.scale)
        assert_same(after.lse, before.lse)


@pytest.mark.parametrize("group", [2, 4, 8])
def test_a_shared_value_errs_less_the_more_those_who_look_may_say(group: int) -> None:
    """Summed over a group: voices that weigh by attention beat equal ones, for sharp heads most."""
    errors = {}
    for power in (0.0, 1.0, 2.0):
        total = 0.0
        for seed in range(20):
            problem = make_problem(seed, 2, group, tokens=64, count=16, logit_std=3.0)
            merged = merge(problem, attention_power=power)
            before = attention_over(problem.q, problem.entries, problem.scale)
            after = attention_over(problem.q, merged, problem.scale)
            total += float((after.o - before.o).square().sum() / before.o.square().sum()) / 20
        errors[power] = total
    assert errors[1.0] < 0.8 * errors[0.0]
    assert errors[2.0] < 1.1 * errors[1.0]
    assert errors[1.0] < 1


@settings(max_examples=30)
@given(seed=seeds)
def test_a_group_that_asks_the_same_is_a_group_of_one(seed: int) -> None:
    one = make_problem(seed, 2, 1)
    several = one._replace(q=one.q.expand(-1, 3, -1), logits=one.logits.expand(-1, 3, -1))
    alone, together = merge(one), merge(several)
    assert_same(together.k, alone.k)
    assert_same(together.v, alone.v)
    assert_same(together.log_votes, alone.log_votes.expand_as(together.log_votes))


@dtypes
@pytest.mark.parametrize("group", [1, 4])
def test_votes_are_those_of_the_key_as_stored(dtype: torch.dtype, group: int) -> None:
    """bfloat16 keys are off by 1/256; that costs the mass nothing."""
    problem = make_problem(3, 2, group, logit_std=8.0)
    k, v = problem.entries.k.to(dtype), problem.entries.v.to(dtype)
    entries = problem.entries._replace(k=k, v=v)
    merged = merge(problem._replace(entries=entries, logits=problem.logits_of(k)))
    assert merged.k.dtype == merged.v.dtype == dtype
    assert merged.log_votes.dtype == torch.float32
    before = attention_over(problem.q, entries, problem.scale)
    after = attention_over(problem.q, merged, problem.scale)
    assert_same(after.lse, before.lse)


# -- votes --


@settings(max_examples=40)
@given(seed=seeds)
def test_a_vote_is_the_perplexity_of_its_weights(seed: int) -> None:
    problem = make_problem(seed, 1, 1, tokens=12, count=1)
    entries = problem.entries._replace(log_votes=torch.zeros(1, 1, 12))
    problem = problem._replace(entries=entries)
    weights = torch.softmax(problem.logits.double(), -1)
    entropy = -(weights * weights.log()).sum(-1, keepdim=True)
    assert_same(merge(problem).log_votes, entropy)


def test_merging_in_any_order_gives_the_same_entry() -> None:
    """Two at a time or all at once."""
    problem = make_problem(5, 1, 1, tokens=6, count=1)
    kept = torch.zeros(1, 1, dtype=torch.int64)
    into_one = Assignment(kept, torch.zeros(1, 6, dtype=torch.int64))
    at_once = merge(problem._replace(assignment=into_one))
    so_far = Entries(*(x.narrow(d, 0, 1) for x, d in zip(problem.entries, (1, 1, 2), strict=True)))
    pair = Assignment(kept, torch.zeros(1, 2, dtype=torch.int64))
    for i in range(1, 6):
        following = Entries(
            *(x.narrow(d, i, 1) for x, d in zip(problem.entries, (1, 1, 2), strict=True))
        )
        both = joined(so_far, following)
        so_far = merge(asked(problem.q, both, pair, problem.scale))
    for got, expected in zip(so_far, at_once, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("group", [1, 3])
def test_without_logits_entries_are_plain_means_with_all_votes(group: int) -> None:
    problem = make_problem(2, 2, group)
    entries = exact_entries(problem.entries.k, problem.entries.v)
    merged = merge(asked(torch.zeros_like(problem.q), entries, problem.assignment))
    members = torch.nn.functional.one_hot(problem.assignment.target, 5).double()
    sizes = members.sum(1)
    means = members.transpose(1, 2) @ entries.k.double() / sizes.unsqueeze(-1)
    assert_same(merged.k, means)
    assert_same(merged.log_votes, sizes.log().unsqueeze(1).expand_as(merged.log_votes))
