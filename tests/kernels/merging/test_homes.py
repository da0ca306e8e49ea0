"""The homes of entries: the most similar kept one, and for what has none the compensation entry."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_problems import (
    assert_same,
    attention_over,
    dtypes,
    joined,
    make_problem,
    merge,
    normal,
    seeds,
    with_unmerged,
)

from kvtier_kernels.merging import (
    UNMERGED,
    assign,
    compensate,
    exact_entries,
)

# -- assignment --


@settings(max_examples=40)
@given(
    seed=seeds,
    tokens=st.integers(1, 50),
    count=st.integers(1, 50),
    floor=st.sampled_from([-1.0, 0.0, 0.3, 0.8]),
)
def test_every_entry_goes_to_the_most_similar_one_above_the_floor(
    seed: int, tokens: int, count: int, floor: float
) -> None:
    count = min(count, tokens)
    keys = normal(seed, 2, tokens, 6)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(2, tokens, generator=generator).argsort(1)[:, :count].sort(1).values
    is_kept = torch.zeros(2, tokens, dtype=torch.bool).scatter_(1, kept, True)
    target = assign(keys, kept, floor).target
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    for head in range(2):
        similarity = unit[head] @ unit[head, kept[head]].T
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


def test_homes_of_many_tiles_are_found_as_one_product_would_find_them():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 6000, 16, generator=generator)
    kept = torch.stack([torch.randperm(6000, generator=generator)[:2500] for _ in range(2)])
    is_kept = torch.zeros(2, 6000, dtype=torch.bool).scatter_(1, kept, True)
    # Homes that are not of numbers in one tile only, and in all.
    for share in (0.001, 0.3):
        broken = is_kept & (torch.rand(2, 6000, generator=generator) < share)
        some = keys.masked_fill(broken.unsqueeze(-1), float("nan"))
        target = assign(some, kept, floor=0.7).target
        unit = torch.nn.functional.normalize(some.double(), dim=-1)
        homes = unit.gather(1, kept.unsqueeze(-1).expand(-1, -1, 16))
        alike = unit @ homes.transpose(1, 2)
        alike.masked_fill_(broken.gather(1, kept).unsqueeze(1), -2.0)
        best, home = alike.max(-1)
        expected = torch.where(best > 0.7, home, UNMERGED)
        dropped = ~is_kept
        assert (target[dropped] == expected[dropped]).all()
        assert (target[dropped] >= 2000).any(), "no home of the last tile was chosen"
        assert (target[dropped] == UNMERGED).any()


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
    merged, rest = merge(problem), compensate(problem.entries, problem.assignment)
    without = attention_over(problem.q, merged, problem.scale)
    with_it = attention_over(problem.q, joined(merged, rest), problem.scale)
    assert torch.equal(with_it.o, without.o)
    assert torch.equal(with_it.lse, without.lse)
