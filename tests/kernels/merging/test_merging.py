"""Merged entries give what the entries they are made of gave, in dense float64 attention."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.merging import (
    UNMERGED,
    Assignment,
    Entries,
    assign,
    compensate,
    exact_entries,
    merge_beta,
    merge_paper,
)

seeds = st.integers(0, 10_000)
forms = pytest.mark.parametrize("form", ["paper", "beta"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Dense(NamedTuple):
    """o `[heads, group, dim]`, lse `[heads, group]`, float64."""

    o: torch.Tensor
    lse: torch.Tensor


def attention_over(q: torch.Tensor, entries: Entries, scale: float) -> Dense:
    """One query `[heads, group, dim]` over entries with a log-vote per query head, in float64."""
    k, v, log_votes = (x.double() for x in entries)
    logits = q.double() @ k.transpose(1, 2) * scale + log_votes
    lse = torch.logsumexp(logits, -1)
    return Dense(torch.exp(logits - lse.unsqueeze(-1)) @ v, lse)


def joined(*parts: Entries) -> Entries:
    rows = max(part.log_votes.shape[1] for part in parts)
    votes = torch.cat([part.log_votes.expand(-1, rows, -1) for part in parts], -1)
    return Entries(torch.cat([p.k for p in parts], 1), torch.cat([p.v for p in parts], 1), votes)


class Problem(NamedTuple):
    """One query, the entries it attends to, and where each of them goes."""

    q: torch.Tensor
    entries: Entries
    logits: torch.Tensor
    assignment: Assignment
    scale: float


def make_problem(
    seed: int,
    heads: int = 2,
    group: int = 1,
    tokens: int = 24,
    count: int = 5,
    logit_std: float = 2.0,
    vote_rows: int = 1,
) -> Problem:
    """Random entries with random votes, merged at random: exactness asks for no likeness."""
    dim, generator = 16, torch.Generator().manual_seed(seed)
    count = min(count, tokens)
    q = logit_std * normal(seed, heads, group, dim)
    k, v = normal(seed + 1, heads, tokens, dim), normal(seed + 2, heads, tokens, dim)
    votes = torch.randint(1, 9, (heads, vote_rows, tokens), generator=generator).log()
    kept = torch.rand(heads, tokens, generator=generator).argsort(1)[:, :count]
    target = torch.randint(0, count, (heads, tokens), generator=generator)
    target.scatter_(1, kept, torch.arange(count).expand(heads, -1))
    scale = dim**-0.5
    logits = (q.double() @ k.double().transpose(1, 2) * scale).float()
    return Problem(q, Entries(k, v, votes), logits, Assignment(kept, target), scale)


def merge(form: str, problem: Problem) -> Entries:
    args = (problem.entries, problem.logits, problem.assignment)
    return merge_paper(*args)[0] if form == "paper" else merge_beta(*args)


def at_kept(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


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


def with_unmerged(problem: Problem, share: float) -> Problem:
    """The same, with a share of what is not kept left unmerged."""
    target = problem.assignment.target.clone()
    dropped = torch.ones_like(target, dtype=torch.bool).scatter_(1, problem.assignment.kept, False)
    lost = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)) < share
    target[dropped & lost] = UNMERGED
    return problem._replace(assignment=Assignment(problem.assignment.kept, target))


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


# -- structure --


@forms
@dtypes
def test_merging_nothing_changes_no_bit(form: str, dtype: torch.dtype) -> None:
    problem = make_problem(0, 2, 3)
    entries = problem.entries._replace(k=problem.entries.k.to(dtype), v=problem.entries.v.to(dtype))
    kept = torch.arange(24).expand(2, -1)
    same = merge(form, problem._replace(entries=entries, assignment=Assignment(kept, kept)))
    assert torch.equal(same.k, entries.k)
    assert torch.equal(same.v, entries.v)
    assert torch.equal(same.log_votes, entries.log_votes.expand_as(same.log_votes))


@forms
@settings(max_examples=30)
@given(seed=seeds, lost=st.floats(0, 1))
def test_entries_that_take_no_other_in_change_no_bit(form: str, seed: int, lost: float) -> None:
    problem = with_unmerged(make_problem(seed, count=12), lost)
    kept, target = problem.assignment
    merged = merge(form, problem)
    for head, row in enumerate(target):
        for r in range(12):
            if (row == r).sum() == 1:
                i = kept[head, r]
                assert torch.equal(merged.k[head, r], problem.entries.k[head, i])
                assert torch.equal(merged.v[head, r], problem.entries.v[head, i])
                assert torch.equal(
                    merged.log_votes[head, :, r], problem.entries.log_votes[head, :, i]
                )


@forms
@settings(max_examples=30)
@given(seed=seeds, group=st.integers(1, 3))
def test_the_order_of_the_entries_does_not_matter(form: str, seed: int, group: int) -> None:
    problem = with_unmerged(make_problem(seed, 2, group), 0.3)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    entries, (kept, target) = problem.entries, problem.assignment
    moved = problem._replace(
        entries=Entries(entries.k[:, order], entries.v[:, order], entries.log_votes[..., order]),
        logits=problem.logits[..., order],
        assignment=Assignment(order.argsort()[kept], target[:, order]),
    )
    for got, expected in zip(merge(form, moved), merge(form, problem), strict=True):
        assert_same(got, expected)
    before = compensate(entries, problem.assignment)
    for got, expected in zip(compensate(moved.entries, moved.assignment), before, strict=True):
        assert_same(got, expected)


@forms
def test_heads_do_not_see_each_other(form: str) -> None:
    problem = with_unmerged(make_problem(4, heads=3, group=2), 0.3)
    together = merge(form, problem)
    rest = compensate(problem.entries, problem.assignment)
    for head in range(3):
        one = slice(head, head + 1)
        alone = Problem(
            problem.q[one],
            Entries(*(x[one] for x in problem.entries)),
            problem.logits[one],
            Assignment(*(x[one] for x in problem.assignment)),
            problem.scale,
        )
        for got, expected in zip(merge(form, alone), together, strict=True):
            assert_same(got, expected[one])
        for got, expected in zip(compensate(alone.entries, alone.assignment), rest, strict=True):
            assert_same(got, expected[one])


@forms
@pytest.mark.parametrize("group", [1, 2])
def test_equal_keys_merge_to_that_key_with_all_their_votes(form: str, group: int) -> None:
    key = normal(1, 1, 1, 8)
    entries = exact_entries(key.expand(1, 50, 8), normal(2, 1, 50, 8))
    logits = torch.full((1, group, 50), 3.0)
    assignment = Assignment(torch.tensor([[7]]), torch.zeros(1, 50, dtype=torch.int64))
    merged = merge(form, Problem(key, entries, logits, assignment, 1.0))
    assert_same(merged.k, key)
    assert_same(merged.v, entries.v.mean(1, keepdim=True))
    assert_same(merged.log_votes.exp(), torch.full_like(merged.log_votes, 50.0))


# -- extremes --


@forms
@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 40), count=st.integers(1, 8))
def test_logits_of_80_are_no_less_exact(form: str, seed: int, tokens: int, count: int) -> None:
    problem = make_problem(seed, 2, 1, tokens, count)
    stretch = 80 / problem.logits.abs().amax((1, 2)).clamp_min(1e-3).view(2, 1, 1)
    problem = problem._replace(q=problem.q * stretch)
    logits = problem.q.double() @ problem.entries.k.double().transpose(1, 2) * problem.scale
    problem = problem._replace(logits=logits.float())
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(form, problem), problem.scale)
    # float32 itself knows a logit of 80 to 4e-6 only.
    assert_same(after.lse, before.lse, 2e-5)
    assert_same(after.o, before.o, 5e-5)


@forms
@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 40), count=st.integers(1, 8), group=st.integers(1, 3))
def test_query_heads_that_want_the_opposite_give_finite_entries(
    form: str, seed: int, tokens: int, count: int, group: int
) -> None:
    problem = make_problem(seed, 1, group, tokens, count)
    signs = torch.sign(normal(seed, 1, group, tokens))
    assert all(torch.isfinite(x).all() for x in merge(form, problem._replace(logits=80 * signs)))


@settings(max_examples=20)
@given(seed=seeds, constant=st.floats(-60, 60))
def test_the_beta_form_takes_scores_up_to_a_factor(seed: int, constant: float) -> None:
    problem = make_problem(seed, 2, 2)
    shifted = problem._replace(logits=problem.logits + constant)
    for got, expected in zip(merge("beta", shifted), merge("beta", problem), strict=True):
        assert_same(got, expected, 5e-5)


@forms
def test_everything_can_be_merged_into_one_entry(form: str) -> None:
    problem = make_problem(8, 2, 1, tokens=5000, count=1)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(form, problem), problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)


def test_long_contexts_are_merged_in_blocks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, values = normal(0, 2, 600, 16), normal(1, 2, 600, 16)
    kept, logits = torch.arange(0, 600, 4).expand(2, -1), normal(2, 2, 3, 600)
    entries = exact_entries(keys, values)

    def everything() -> list[torch.Tensor]:
        assignment = assign(keys, kept, floor=0.2)
        parts = (
            merge_beta(entries, logits, assignment),
            merge_paper(entries, logits, assignment)[0],
            compensate(entries, assignment),
        )
        return [assignment.target, *(x for part in parts for x in part)]

    whole = everything()
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 1 << 10)
    for got, expected in zip(everything(), whole, strict=True):
        assert_same(got, expected)


# -- assignment --


@settings(max_examples=40)
@given(
    seed=seeds,
    tokens=st.integers(1, 50),
    count=st.integers(1, 50),
    floor=st.sampled_from([-1.0, 0.0, 0.3, 0.8]),
    shield=st.floats(0, 1),
)
def test_every_entry_goes_to_the_most_similar_open_one_above_the_floor(
    seed: int, tokens: int, count: int, floor: float, shield: float
) -> None:
    count = min(count, tokens)
    keys = normal(seed, 2, tokens, 6)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(2, tokens, generator=generator).argsort(1)[:, :count].sort(1).values
    is_kept = torch.zeros(2, tokens, dtype=torch.bool).scatter_(1, kept, True)
    protected = is_kept & (torch.rand(2, tokens, generator=generator) < shield)
    target = assign(keys, kept, protected, floor).target
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    for head in range(2):
        similarity = unit[head] @ unit[head, kept[head]].T
        similarity[:, protected[head, kept[head]]] = -2.0
        for i, home in enumerate(target[head].tolist()):
            if is_kept[head, i]:
                assert kept[head, home] == i
            elif home == UNMERGED:
                assert similarity[i].max() <= floor + 1e-6
            else:
                assert similarity[i, home] >= max(floor, float(similarity[i].max())) - 1e-6


def test_a_floor_of_one_merges_nothing_not_even_equal_keys() -> None:
    keys = normal(0, 2, 30, 7)
    keys[:, 20:] = keys[:, :10]
    entries = exact_entries(keys, normal(1, 2, 30, 7))
    kept = torch.arange(12).expand(2, -1)
    assignment = assign(keys, kept, floor=1.0)
    assert (assignment.target[:, 12:] == UNMERGED).all()
    rest = compensate(entries, assignment)
    assert_same(rest.k, keys[:, 12:].mean(1, keepdim=True))
    assert_same(rest.v, entries.v[:, 12:].mean(1, keepdim=True))
    assert_same(rest.log_votes.exp(), torch.full((2, 1, 1), 18.0))


def test_protected_entries_take_no_other_in() -> None:
    keys = normal(0, 1, 1, 8).expand(2, 20, 8).contiguous()
    kept = torch.tensor([[0, 1, 19], [0, 1, 19]])
    protected = torch.zeros(20, dtype=torch.bool)
    protected[[0, 19]] = True
    target = assign(keys, kept, protected).target
    assert (target[:, 2:19] == 1).all()
    protected[1] = True
    assert (assign(keys, kept, protected).target[:, 2:19] == UNMERGED).all()


@dtypes
def test_assignment_takes_any_float_dtype(dtype: torch.dtype) -> None:
    keys = normal(0, 1, 40, 16).to(dtype)
    keys[:, 20:] = 3 * keys[:, :20]
    kept = torch.arange(20).unsqueeze(0)
    assert assign(keys, kept).target[0, 20:].tolist() == list(range(20))


def test_keys_that_are_zero_or_not_numbers_are_like_no_other() -> None:
    keys = normal(0, 1, 6, 4)
    keys[0, 4], keys[0, 5] = 0.0, float("nan")
    target = assign(keys, torch.tensor([[0, 1]]), floor=0.0).target
    assert target[0, 4:].tolist() == [UNMERGED, UNMERGED]


# -- compensation --


@settings(max_examples=30)
@given(seed=seeds, rows=st.sampled_from([1, 3]))
def test_the_compensation_entry_is_the_vote_weighted_mean(seed: int, rows: int) -> None:
    problem = with_unmerged(make_problem(seed, 2, rows, vote_rows=rows), 0.5)
    rest = compensate(problem.entries, problem.assignment)
    lost = (problem.assignment.target == UNMERGED).double().unsqueeze(1)
    votes = problem.entries.log_votes.double().exp() * lost
    for head in range(2):
        if not lost[head].any():
            assert torch.isneginf(rest.log_votes[head]).all()
            assert not rest.k[head].any()
            continue
        weights = (votes[head] / votes[head].sum(-1, keepdim=True)).mean(0)
        assert_same(rest.k[head, 0], weights @ problem.entries.k[head].double())
        assert_same(rest.v[head, 0], weights @ problem.entries.v[head].double())
        assert_same(rest.log_votes[head, :, 0].exp(), votes[head].sum(-1))


def test_an_empty_compensation_entry_is_seen_by_no_query() -> None:
    problem = make_problem(0)
    merged, rest = merge("beta", problem), compensate(problem.entries, problem.assignment)
    without = attention_over(problem.q, merged, problem.scale)
    with_it = attention_over(problem.q, joined(merged, rest), problem.scale)
    assert torch.equal(with_it.o, without.o)
    assert torch.equal(with_it.lse, without.lse)


# -- bad input --


def test_bad_input_is_refused_by_name() -> None:
    problem = make_problem(0, group=2, vote_rows=2)
    entries, logits, assignment = problem.entries, problem.logits, problem.assignment
    with pytest.raises(ValueError, match=r"entries\.log_votes"):
        merge_paper(entries, logits, assignment)
    with pytest.raises(ValueError, match="logits"):
        merge_beta(entries, logits[..., 1:], assignment)
    with pytest.raises(ValueError, match=r"entries\.log_votes"):
        merge_beta(entries, logits[:, :1].expand(-1, 3, -1), assignment)
    with pytest.raises(ValueError, match=r"assignment\.target"):
        merge_beta(entries, logits, assignment._replace(target=assignment.target[:, 1:]))
    with pytest.raises(ValueError, match="keys and kept"):
        assign(entries.k, assignment.kept[:, :0])
    with pytest.raises(ValueError, match="protected"):
        assign(entries.k, assignment.kept, torch.ones(24, dtype=torch.bool))


def test_homes_of_many_tiles_are_found_as_one_product_would_find_them():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 6000, 16, generator=generator)
    kept = torch.stack([torch.randperm(6000, generator=generator)[:2500] for _ in range(2)])
    is_kept = torch.zeros(2, 6000, dtype=torch.bool).scatter_(1, kept, True)
    # Closed homes in one tile only, and in all.
    for share in (0.001, 0.3):
        protected = is_kept & (torch.rand(2, 6000, generator=generator) < share)
        target = assign(keys, kept, protected, floor=0.7).target
        unit = torch.nn.functional.normalize(keys.double(), dim=-1)
        homes = unit.gather(1, kept.unsqueeze(-1).expand(-1, -1, 16))
        alike = unit @ homes.transpose(1, 2)
        alike.masked_fill_(protected.gather(1, kept).unsqueeze(1), -2.0)
        best, home = alike.max(-1)
        expected = torch.where(best > 0.7, home, UNMERGED)
        dropped = ~is_kept
        assert (target[dropped] == expected[dropped]).all()
        assert (target[dropped] >= 2000).any(), "no home of the last tile was chosen"
        assert (target[dropped] == UNMERGED).any()
