"""Entries to merge, and dense float64 attention over what came of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from kvtier_kernels.merging import (
    UNMERGED,
    Assignment,
    Entries,
    merge_bins,
)

seeds = st.integers(0, 10_000)
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

    def logits_of(self, keys: torch.Tensor) -> torch.Tensor:
        return (self.q.double() @ keys.double().transpose(1, 2) * self.scale).float()


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
    return asked(q, Entries(k, v, votes), Assignment(kept, target), dim**-0.5)


def asked(q: torch.Tensor, entries: Entries, assignment: Assignment, scale: float = 1.0) -> Problem:
    """Return the problem with the logits that the query has."""
    problem = Problem(q, entries, torch.empty(0), assignment, scale)
    return problem._replace(logits=problem.logits_of(entries.k))


def merge(problem: Problem, *, attention_power: float = 1.0) -> Entries:
    return merge_bins(
        problem.entries,
        problem.logits,
        problem.assignment,
        problem.logits_of,
        attention_power=attention_power,
    )


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def with_unmerged(problem: Problem, share: float) -> Problem:
    """The same, with a share of what is not kept left unmerged."""
    target = problem.assignment.target.clone()
    dropped = torch.ones_like(target, dtype=torch.bool).scatter_(1, problem.assignment.kept, False)
    lost = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)) < share
    target[dropped & lost] = UNMERGED
    return problem._replace(assignment=Assignment(problem.assignment.kept, target))
