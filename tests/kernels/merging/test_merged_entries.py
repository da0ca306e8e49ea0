"""The entries that a merge makes: no bit changes where nothing merges, and extremes stay finite.
That order and other heads do not matter is in tests/retention/test_keepkv.py.
"""

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
    make_problem,
    merge,
    normal,
    seeds,
    with_unmerged,
)

from kvtier_kernels.merging import (
    Assignment,
    assign,
    compensate,
    exact_entries,
    merge_bins,
)

# -- structure --


@dtypes
def test_merging_nothing_changes_no_bit(dtype: torch.dtype) -> None:
    problem = make_problem(0, 2, 3)
    entries = problem.entries._replace(k=problem.entries.k.to(dtype), v=problem.entries.v.to(dtype))
    kept = torch.arange(24).expand(2, -1)
    same = merge(problem._replace(entries=entries, assignment=Assignment(kept, kept)))
    assert torch.equal(same.k, entries.k)
    assert torch.equal(same.v, entries.v)
    assert torch.equal(same.log_votes, entries.log_votes.expand_as(same.log_votes))


@settings(max_examples=30)
@given(seed=seeds, lost=st.floats(0, 1))
def test_entries_that_take_no_other_in_change_no_bit(seed: int, lost: float) -> None:
    problem = with_unmerged(make_problem(seed, count=12), lost)
    kept, target = problem.assignment
    merged = merge(problem)
    for head, row in enumerate(target):
        for r in range(12):
            if (row == r).sum() == 1:
                i = kept[head, r]
                assert torch.equal(merged.k[head, r], problem.entries.k[head, i])
                assert torch.equal(merged.v[head, r], problem.entries.v[head, i])
                assert torch.equal(
                    merged.log_votes[head, :, r], problem.entries.log_votes[head, :, i]
                )


@pytest.mark.parametrize("group", [1, 2])
def test_equal_keys_merge_to_that_key_with_all_their_votes(group: int) -> None:
    key = normal(1, 1, 1, 8)
    entries = exact_entries(key.expand(1, 50, 8), normal(2, 1, 50, 8))
    assignment = Assignment(torch.tensor([[7]]), torch.zeros(1, 50, dtype=torch.int64))
    merged = merge(asked(normal(3, 1, group, 8), entries, assignment))
    assert_same(merged.k, key)
    assert_same(merged.v, entries.v.mean(1, keepdim=True))
    assert_same(merged.log_votes.exp(), torch.full_like(merged.log_votes, 50.0))


# -- extremes --


@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 40), count=st.integers(1, 8))
def test_logits_of_80_are_no_less_exact(seed: int, tokens: int, count: int) -> None:
    problem = make_problem(seed, 2, 1, tokens, count)
    stretch = 80 / problem.logits.abs().amax((1, 2)).clamp_min(1e-3).view(2, 1, 1)
    problem = asked(problem.q * stretch, problem.entries, problem.assignment, problem.scale)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(problem), problem.scale)
    # float32 itself knows a logit of 80 to 4e-6 only.
    assert_same(after.lse, before.lse, 2e-5)
    assert_same(after.o, before.o, 1e-4)


@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 40), count=st.integers(1, 8), group=st.integers(1, 3))
def test_query_heads_that_want_the_opposite_give_finite_entries(
    seed: int, tokens: int, count: int, group: int
) -> None:
    problem = make_problem(seed, 1, group, tokens, count)
    signs = torch.sign(normal(seed, 1, group, tokens))
    assert all(torch.isfinite(x).all() for x in merge(problem._replace(logits=80 * signs)))


@settings(max_examples=20)
@given(seed=seeds, constant=st.floats(-60, 60))
def test_scores_count_up_to_a_factor(seed: int, constant: float) -> None:
    problem = make_problem(seed, 2, 2)
    shifted = merge_bins(
        problem.entries,
        problem.logits + constant,
        problem.assignment,
        lambda keys: problem.logits_of(keys) + constant,
    )
    for got, expected in zip(shifted, merge(problem), strict=True):
        assert_same(got, expected, 5e-5)


def test_everything_can_be_merged_into_one_entry() -> None:
    problem = make_problem(8, 2, 1, tokens=5000, count=1)
    before = attention_over(problem.q, problem.entries, problem.scale)
    after = attention_over(problem.q, merge(problem), problem.scale)
    assert_same(after.lse, before.lse)
    assert_same(after.o, before.o)


def test_long_contexts_are_merged_in_blocks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, values = normal(0, 2, 600, 16), normal(1, 2, 600, 16)
    kept, q = torch.arange(0, 600, 4).expand(2, -1), normal(2, 2, 3, 16)
    entries = exact_entries(keys, values)

    def everything() -> list[torch.Tensor]:
        assignment = assign(keys, kept, floor=0.2)
        parts = (
            merge(asked(q, entries, assignment)),
            compensate(entries, assignment),
        )
        return [assignment.target, *(x for part in parts for x in part)]

    whole = everything()
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 1 << 10)
    for got, expected in zip(everything(), whole, strict=True):
        assert_same(got, expected)


# -- bad input --


def test_bad_input_is_refused_by_name() -> None:
    problem = make_problem(0, group=2, vote_rows=2)
    entries, logits, assignment = problem.entries, problem.logits, problem.assignment
    with pytest.raises(ValueError, match="logits"):
        merge(problem._replace(logits=logits[..., 1:]))
    with pytest.raises(ValueError, match=r"entries\.log_votes"):
        merge(problem._replace(logits=logits[:, :1].expand(-1, 3, -1)))
    with pytest.raises(ValueError, match=r"assignment\.target"):
        merge(problem._replace(assignment=assignment._replace(target=assignment.target[:, 1:])))
    with pytest.raises(ValueError, match="keys and kept"):
        assign(entries.k, assignment.kept[:, :0])
