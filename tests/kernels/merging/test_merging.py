"""Merged entries give what the entries they are made of gave, in dense float64 attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_problems import (
    Problem,
    assert_same,
    attention_over,
    dtypes,
    forms,
    joined,
    make_problem,
    merge,
    normal,
    seeds,
    with_unmerged,
)

from kvtier_kernels.merging import (
    Assignment,
    Entries,
    compensate,
    exact_entries,
    merge_beta,
    merge_paper,
)

# -- Theorem 3 --


@forms
@settings(max_examples=60)
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 60),
    count=st.integers(1, 20),
    logit_std=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
)
def test_the_query_that_gave_the_logits_sees_no_difference(
    form: str, seed: int, heads: int, tokens: int, count: int, logit_std: float
) -> None:
    problem = make_problem(seed, heads, 1, tokens, count, logit_std)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(form, problem), problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)


@settings(max_examples=40)
@given(seed=seeds, group=st.integers(2, 6), logit_std=st.sampled_from([0.5, 2.0]))
def test_the_beta_form_keeps_the_mass_of_every_query_head_at_once(
    seed: int, group: int, logit_std: float
) -> None:
    for vote_rows in (1, group):
        problem = make_problem(seed, 2, group, logit_std=logit_std, vote_rows=vote_rows)
        merged = merge("beta", problem)
        assert merged.log_votes.shape == (2, group, 5)
        before = attention_over(problem.q, problem.entries, problem.scale)
        after = attention_over(problem.q, merged, problem.scale)
        assert_same(after.lse, before.lse)


@settings(max_examples=40)
@given(seed=seeds, group=st.integers(2, 6))
def test_the_paper_form_is_exact_for_the_mean_query_of_a_group(seed: int, group: int) -> None:
    problem = make_problem(seed, 2, group)
    mean = problem.q.mean(1, keepdim=True)
    before = attention_over(mean, problem.entries, problem.scale)
    after = attention_over(mean, merge("paper", problem), problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)


@pytest.mark.parametrize("group", [2, 4, 8])
def test_a_shared_value_errs_less_the_more_those_who_look_may_say(group: int) -> None:
    """Summed over a group: voices that weigh by attention beat equal ones, for sharp heads most."""
    errors = {}
    for power in (0.0, 1.0, 2.0):
        total = 0.0
        for seed in range(20):
            problem = make_problem(seed, 2, group, tokens=64, count=16, logit_std=3.0)
            args = (problem.entries, problem.logits, problem.assignment)
            merged = merge_beta(*args, attention_power=power)
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
    several = one._replace(logits=one.logits.expand(-1, 3, -1))
    for form in ("paper", "beta"):
        alone, together = merge(form, one), merge(form, several)
        assert_same(together.k, alone.k)
        assert_same(together.v, alone.v)
        assert_same(together.log_votes, alone.log_votes.expand_as(together.log_votes))


@dtypes
@pytest.mark.parametrize("group", [1, 4])
def test_votes_can_be_those_of_the_key_as_stored(dtype: torch.dtype, group: int) -> None:
    """bfloat16 keys are off by 1/256; with `logits_of` that costs the mass nothing."""
    problem = make_problem(3, 2, group, logit_std=8.0)
    k, v = problem.entries.k.to(dtype), problem.entries.v.to(dtype)
    entries = problem.entries._replace(k=k, v=v)

    def logits_of(keys: torch.Tensor) -> torch.Tensor:
        return problem.q @ keys.float().transpose(1, 2) * problem.scale

    merged = merge_beta(entries, logits_of(k), problem.assignment, logits_of)
    assert merged.k.dtype == merged.v.dtype == dtype
    assert merged.log_votes.dtype == torch.float32
    before = attention_over(problem.q, entries, problem.scale)
    after = attention_over(problem.q, merged, problem.scale)
    assert_same(after.lse, before.lse)


# -- votes --


@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 60), count=st.integers(1, 20), lost=st.floats(0, 1))
def test_the_paper_form_and_the_compensation_entry_conserve_votes(
    seed: int, tokens: int, count: int, lost: float
) -> None:
    problem = with_unmerged(make_problem(seed, 2, 1, tokens, count), lost)
    rest = compensate(problem.entries, problem.assignment)
    after = joined(merge("paper", problem), rest)
    votes = problem.entries.log_votes.double().exp().sum(-1)
    torch.testing.assert_close(after.log_votes.double().exp().sum(-1), votes, rtol=1e-5, atol=0)


@settings(max_examples=40)
@given(seed=seeds)
def test_a_beta_vote_is_the_perplexity_of_its_weights_and_never_above_the_papers(
    seed: int,
) -> None:
    problem = make_problem(seed, 1, 1, tokens=12, count=1)
    entries = problem.entries._replace(log_votes=torch.zeros(1, 1, 12))
    problem = problem._replace(entries=entries)
    weights = torch.softmax(problem.logits.double(), -1)
    entropy = -(weights * weights.log()).sum(-1, keepdim=True)
    assert_same(merge("beta", problem).log_votes, entropy)
    assert (merge("beta", problem).log_votes <= merge("paper", problem).log_votes + 1e-6).all()


def test_the_beta_form_is_the_same_in_any_order() -> None:
    """Two at a time or all at once; the paper's keys depend on the order."""
    problem = make_problem(5, 1, 1, tokens=6, count=1)
    kept = torch.zeros(1, 1, dtype=torch.int64)
    into_one = Assignment(kept, torch.zeros(1, 6, dtype=torch.int64))
    at_once = merge_beta(problem.entries, problem.logits, into_one)
    so_far = Entries(*(x.narrow(d, 0, 1) for x, d in zip(problem.entries, (1, 1, 2), strict=True)))
    pair = Assignment(kept, torch.zeros(1, 2, dtype=torch.int64))
    for i in range(1, 6):
        following = Entries(
            *(x.narrow(d, i, 1) for x, d in zip(problem.entries, (1, 1, 2), strict=True))
        )
        both = joined(so_far, following)
        so_far = merge_beta(both, problem.q @ both.k.transpose(1, 2) * problem.scale, pair)
    for got, expected in zip(so_far, at_once, strict=True):
        assert_same(got, expected)


# -- the paper's scale --


def colliding(logit: float) -> Problem:
    """Two unlike keys of votes 1 whose weighted logits cancel: the paper's scale has no bounds."""
    logits = torch.tensor([[[logit, -logit]]])
    k = torch.tensor([[[logit, 1.0], [-logit, 1.0]]])
    q = torch.tensor([[[1.0, 0.0]]])
    entries = Entries(k, normal(0, 1, 2, 2), torch.zeros(1, 1, 2))
    assignment = Assignment(torch.tensor([[0]]), torch.tensor([[0, 0]]))
    return Problem(q, entries, logits, assignment, 1.0)


@pytest.mark.parametrize("logit", [1e-6, 1e-3, 0.1, 0.5, 2.0, 40.0, -0.3])
def test_where_the_papers_scale_explodes_the_fallback_is_exact_too(logit: float) -> None:
    problem = colliding(logit)
    merged, fallbacks = merge_paper(problem.entries, problem.logits, problem.assignment)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merged, problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)
    if abs(logit) <= 0.5:
        assert fallbacks.tolist() == [1]


@settings(max_examples=60)
@given(seed=seeds, logit_std=st.sampled_from([0.01, 0.3, 1.0, 5.0]))
def test_a_papers_key_is_never_far_longer_than_those_it_is_made_of(
    seed: int, logit_std: float
) -> None:
    problem = make_problem(seed, 2, 1, 40, 6, logit_std)
    merged, fallbacks = merge_paper(problem.entries, problem.logits, problem.assignment)
    longest = problem.entries.k.norm(dim=-1).amax(1, keepdim=True)
    assert (merged.k.norm(dim=-1) <= 1.5 * longest + 1e-4).all()
    assert fallbacks.dtype == torch.int64
    assert ((fallbacks >= 0) & (fallbacks <= 6)).all()


@pytest.mark.parametrize("group", [1, 3])
def test_without_logits_both_forms_are_the_plain_mean_with_all_votes(group: int) -> None:
    problem = make_problem(2, 2, group)
    entries = exact_entries(problem.entries.k, problem.entries.v)
    nothing = torch.zeros(2, group, 24)
    paper, fallbacks = merge_paper(entries, nothing, problem.assignment)
    beta = merge_beta(entries, nothing, problem.assignment)
    assert not fallbacks.any()
    for got, expected in zip(paper[:2], beta[:2], strict=True):
        assert_same(got, expected)
    members = torch.nn.functional.one_hot(problem.assignment.target, 5).double()
    sizes = members.sum(1)
    means = members.transpose(1, 2) @ entries.k.double() / sizes.unsqueeze(-1)
    assert_same(paper.k, means)
    for merged in (paper, beta):
        assert_same(merged.log_votes, sizes.log().unsqueeze(1).expand_as(merged.log_votes))
