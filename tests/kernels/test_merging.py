"""Merged entries give what the entries they are made of gave, in dense float64 attention. Where
entries go, and sums over them, are in test_selection.py; that order and other heads do not matter
is in tests/retention/test_keepkv.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier_kernels.bins import UNMERGED
from kvtier_kernels.merging import Assignment, Entries, compensate, merge_bins

seeds = st.integers(0, 10_000)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 1 << 10)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Dense(NamedTuple):
    """o `[heads, group, dim]`, lse `[heads, group]`, float64."""

    o: torch.Tensor
    lse: torch.Tensor


class Problem(NamedTuple):
    """One query, the entries it attends to, and where each of them goes."""

    q: torch.Tensor
    entries: Entries
    assignment: Assignment
    scale: float = 0.25

    def logits_of(self, keys: torch.Tensor) -> torch.Tensor:
        return (self.q.double() @ keys.double().transpose(1, 2) * self.scale).float()

    def sees(self, entries: Entries) -> Dense:
        """Dense attention over entries with a log-vote per query head, in float64."""
        k, v, log_votes = (x.double() for x in entries)
        logits = self.q.double() @ k.transpose(1, 2) * self.scale + log_votes
        lse = torch.logsumexp(logits, -1)
        return Dense(torch.exp(logits - lse.unsqueeze(-1)) @ v, lse)

    def merged(self) -> Entries:
        logits = self.logits_of(self.entries.k)
        return merge_bins(self.entries, logits, self.assignment, self.logits_of)


def make_problem(
    seed: int,
    heads: int = 2,
    group: int = 1,
    tokens: int = 24,
    count: int = 5,
    logit_std: float = 2.0,
    vote_rows: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Random entries with random votes, merged at random: exactness asks for no likeness."""
    dim, generator = 16, torch.Generator().manual_seed(seed)
    count = min(count, tokens)
    q = logit_std * normal(seed, heads, group, dim)
    k, v = (normal(seed + i, heads, tokens, dim).to(dtype) for i in (1, 2))
    votes = torch.randint(1, 9, (heads, vote_rows, tokens), generator=generator).log()
    kept = torch.rand(heads, tokens, generator=generator).argsort(1)[:, :count]
    target = torch.randint(0, count, (heads, tokens), generator=generator)
    target.scatter_(1, kept, torch.arange(count).expand(heads, -1))
    return Problem(q, Entries(k, v, votes), Assignment(kept, target))


def with_unmerged(problem: Problem, share: float) -> Problem:
    """The same, with a share of what is not kept left unmerged."""
    kept, target = problem.assignment
    dropped = torch.ones_like(target, dtype=torch.bool).scatter_(1, kept, False)
    lost = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)) < share
    return problem._replace(
        assignment=Assignment(kept, target.masked_fill(dropped & lost, UNMERGED))
    )


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@settings(max_examples=80)
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 60),
    count=st.integers(1, 20),
    logit_std=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
    most=st.sampled_from([None, 80.0]),
)
@example(seed=8, heads=2, tokens=5000, count=1, logit_std=2.0, most=None)
def test_the_query_that_gave_the_logits_sees_no_difference(
    seed: int, heads: int, tokens: int, count: int, logit_std: float, most: float | None
) -> None:
    """Logits of 80 are no less exact: float32 itself knows one to 4e-6 only."""
    problem = make_problem(seed, heads, 1, tokens, count, logit_std)
    if most is not None:
        logits = problem.logits_of(problem.entries.k)
        stretch = most / logits.abs().amax((1, 2), keepdim=True).clamp_min(1e-3)
        problem = problem._replace(q=problem.q * stretch)
    before, after = problem.sees(problem.entries), problem.sees(problem.merged())
    assert_same(after.lse, before.lse, 1e-5 if most is None else 2e-5)
    assert_same(after.o, before.o, 1e-5 if most is None else 1e-4)


@settings(max_examples=60)
@given(
    seed=seeds,
    group=st.integers(1, 6),
    logit_std=st.sampled_from([0.5, 2.0, 8.0]),
    dtype=dtypes,
    apart=st.booleans(),
)
def test_merging_keeps_the_mass_of_every_query_head_at_once(
    seed: int, group: int, logit_std: float, dtype: torch.dtype, apart: bool
) -> None:
    """Votes are those of the key as stored: it is off by 1/256 in bfloat16, and costs no mass."""
    votes = group if apart else 1
    problem = make_problem(seed, 2, group, logit_std=logit_std, vote_rows=votes, dtype=dtype)
    merged = problem.merged()
    assert merged.k.dtype == merged.v.dtype == dtype
    assert merged.log_votes.dtype == torch.float32
    assert merged.log_votes.shape == (2, group, 5)
    assert_same(problem.sees(merged).lse, problem.sees(problem.entries).lse)


def test_merging_in_any_order_gives_the_same_entry() -> None:
    """Two at a time or all at once."""
    problem = make_problem(5, 1, 1, tokens=6, count=1)
    k, v, votes = problem.entries
    kept = torch.zeros(1, 1, dtype=torch.int64)
    at_once = problem._replace(assignment=Assignment(kept, kept.expand(1, 6))).merged()
    so_far = Entries(k[:, :1], v[:, :1], votes[..., :1])
    for i in range(1, 6):
        one = slice(i, i + 1)
        both = Entries(
            torch.cat([so_far.k, k[:, one]], 1),
            torch.cat([so_far.v, v[:, one]], 1),
            torch.cat([so_far.log_votes, votes[..., one]], -1),
        )
        pair = Assignment(kept, kept.expand(1, 2))
        so_far = problem._replace(entries=both, assignment=pair).merged()
    for got, expected in zip(so_far, at_once, strict=True):
        assert_same(got, expected)


@settings(max_examples=30)
@given(seed=seeds, group=st.integers(1, 3), lost=st.floats(0, 1), dtype=dtypes)
@example(seed=0, group=3, lost=1.0, dtype=torch.bfloat16)
def test_entries_that_take_no_other_in_change_no_bit(
    seed: int, group: int, lost: float, dtype: torch.dtype
) -> None:
    problem = with_unmerged(make_problem(seed, group=group, count=12, dtype=dtype), lost)
    (kept, target), entries, merged = problem.assignment, problem.entries, problem.merged()
    for head, row in enumerate(target):
        for r in range(12):
            if (row == r).sum() == 1:
                i = kept[head, r]
                assert torch.equal(merged.k[head, r], entries.k[head, i])
                assert torch.equal(merged.v[head, r], entries.v[head, i])
                votes = entries.log_votes[head, :, i].expand(group)
                assert torch.equal(merged.log_votes[head, :, r], votes)


@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 40), count=st.integers(1, 8), group=st.integers(1, 3))
def test_query_heads_that_want_the_opposite_give_finite_entries(
    seed: int, tokens: int, count: int, group: int
) -> None:
    problem = make_problem(seed, 1, group, tokens, count)
    logits = 80 * torch.sign(normal(seed, 1, group, tokens))
    merged = merge_bins(problem.entries, logits, problem.assignment, problem.logits_of)
    assert all(torch.isfinite(x).all() for x in merged)


@settings(max_examples=30)
@given(seed=seeds, rows=st.sampled_from([1, 3]), share=st.sampled_from([0.0, 0.5]))
def test_the_compensation_entry_is_the_vote_weighted_mean(
    seed: int, rows: int, share: float
) -> None:
    """No query sees one of nothing."""
    problem = with_unmerged(make_problem(seed, 2, rows, vote_rows=rows), share)
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
