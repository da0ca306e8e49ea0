"""KeepKV keeps what the newest queries look for, and for them the rest is not missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.retention.keepkv import KeepKV, QueryWindow, best, expected_output
from kvtier.retention.refreshing import RefreshRule, reselect
from kvtier_kernels.merging import Entries, exact_entries
from kvtier_kernels.prediction import predicted_logits, window_lse

DIM = 16
SCALE = DIM**-0.5
seeds = st.integers(0, 10_000)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_span(seed: int, heads: int = 2, tokens: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(seed, heads, tokens, DIM), normal(seed + 1, heads, tokens, DIM)


def make_window(seed: int, queries: int = 4, heads: int = 2, group: int = 1) -> QueryWindow:
    return QueryWindow(2 * normal(seed + 2, queries, heads, group, DIM), SCALE)


def attention_over(q: torch.Tensor, *parts: Entries) -> tuple[torch.Tensor, torch.Tensor]:
    """o, lse of one query `[heads, group, dim]` over all parts, in float64."""
    q, group = q.double(), q.shape[1]
    k, v = (torch.cat([part[i] for part in parts], 1).double() for i in (0, 1))
    votes = torch.cat([part.log_votes.expand(-1, group, -1) for part in parts], -1).double()
    logits = q @ k.transpose(1, 2) * SCALE + votes
    return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


# -- for the predicted query nothing changes --


@settings(max_examples=40)
@given(seed=seeds, tokens=st.integers(1, 80), share=st.floats(0.02, 1))
def test_the_newest_query_sees_no_difference(seed: int, tokens: int, share: float) -> None:
    """Alone in its window, and with nothing left to the compensation entry."""
    keys, values = make_span(seed, tokens=tokens)
    window = make_window(seed)
    rule = KeepKV(floor=-1.0, window_queries=1)
    left = rule.retain(keys, values, max(1, int(share * tokens)), window=window)
    assert torch.isneginf(left.compensation.log_votes).all()
    o, lse = attention_over(window.q[-1], exact_entries(keys, values))
    got_o, got_lse = attention_over(window.q[-1], left.entries, left.compensation)
    assert_same(got_lse, lse)
    assert_same(got_o, o)


@settings(max_examples=30)
@given(seed=seeds, group=st.integers(1, 4), queries=st.integers(1, 10))
def test_the_predicted_attention_of_every_query_head_stays_whole(
    seed: int, group: int, queries: int
) -> None:
    """The window's mean attention to what is left is what it was to everything: 1."""
    keys, values = make_span(seed)
    window = make_window(seed, queries, group=group)
    left = KeepKV(floor=-1.0).retain(keys, values, 9, window=window)
    assert left.entries.log_votes.shape == (2, group, 9)
    lse = window_lse(window.q, keys, SCALE)
    predicted = predicted_logits(window.q, left.entries.k, SCALE, 0.9, lse)
    total = (predicted + left.entries.log_votes).exp().sum(-1)
    assert_same(total, torch.ones(2, group))


# -- what is kept --


def test_what_the_queries_look_at_stays_with_its_neighbours() -> None:
    keys, values = make_span(0, tokens=200)
    window = QueryWindow(keys[:, 120].view(1, 2, 1, DIM) * 40, SCALE)
    kept = KeepKV(pool_width=5).retain(keys, values, 5, window=window).kept
    assert kept.tolist() == [[118, 119, 120, 121, 122]] * 2


def test_a_score_that_is_not_a_number_is_the_worst() -> None:
    scores = torch.tensor([[1.0, float("nan"), 0.0, float("inf"), float("-inf")]])
    assert best(scores, 3).tolist() == [[0, 2, 3]]


def test_without_queries_entries_become_plain_means() -> None:
    keys, values = make_span(4)
    values = torch.cat([keys, values], -1)
    scores = torch.arange(50.0).expand(2, -1)
    left = KeepKV(floor=-1.0).retain(keys, values, 7, scores=scores)
    assert left.entries.log_votes.shape == (2, 1, 7)
    # Values that repeat the keys are averaged with the same weights.
    assert_same(left.entries.v[..., :DIM], left.entries.k)
    sums = (left.entries.log_votes.exp().transpose(1, 2) * left.entries.k).sum(1)
    assert_same(sums, keys.sum(1), 1e-4)


# -- what is merged --


def test_a_floor_of_one_only_drops_and_counts() -> None:
    keys, values = make_span(6)
    left = KeepKV(floor=1.0).retain(keys, values, 9, window=make_window(6))
    for head in range(2):
        kept = left.kept[head]
        rest = [t for t in range(50) if t not in kept.tolist()]
        assert torch.equal(left.entries.k[head], keys[head, kept])
        assert torch.equal(left.entries.v[head], values[head, kept])
        assert_same(left.compensation.k[head, 0], keys[head, rest].mean(0))
        assert_same(left.compensation.v[head, 0], values[head, rest].mean(0))
    assert not left.entries.log_votes.any()
    assert_same(left.compensation.log_votes.exp(), torch.full((2, 1, 1), 41.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_everything_changes_nothing(dtype: torch.dtype) -> None:
    keys, values = (x.to(dtype) for x in make_span(8))
    left = KeepKV().retain(keys, values, 50, window=make_window(8))
    assert torch.equal(left.entries.k, keys)
    assert torch.equal(left.entries.v, values)
    assert not left.entries.log_votes.any()
    assert torch.isneginf(left.compensation.log_votes).all()
    assert left.compensation.k.dtype == left.compensation.v.dtype == dtype


def test_heads_do_not_see_each_other() -> None:
    """Keys of a head that are not numbers raise nothing: a server must survive them."""
    keys, values = make_span(10, heads=3)
    window = make_window(10, heads=3, group=2)
    rule = KeepKV(floor=0.3)
    keys[0, 3] = float("nan")
    together = rule.retain(keys, values, 11, window=window)
    for head in (1, 2):
        one = slice(head, head + 1)
        own = window._replace(q=window.q[:, one])
        alone = rule.retain(keys[one], values[one], 11, window=own)
        assert torch.equal(alone.kept, together.kept[one])
        pairs = zip(
            (*alone.entries, *alone.compensation),
            (*together.entries, *together.compensation),
            strict=True,
        )
        for got, expected in pairs:
            assert_same(got, expected[one])


# -- later queries --


def clustered(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[2, tokens, DIM]`, each like seven others: their cosine is about 0.9."""
    member = torch.arange(tokens) % (tokens // 8)
    centres, values = make_span(seed, tokens=tokens // 8)
    noise, own = make_span(seed + 2, tokens=tokens)
    return 0.95 * centres[:, member] + 0.31 * noise, values[:, member] + own


def drifting(seed: int, queries: int, group: int, spread: float) -> torch.Tensor:
    """Queries `[queries, 2, group, DIM]`, each 0.98 of the one before, about a mean of their
    head's."""
    q = normal(seed, queries, 2, group, DIM)
    for now in range(1, queries):
        q[now] = 0.98 * q[now - 1] + (1 - 0.98**2) ** 0.5 * q[now]
    return spread * (0.5 * normal(seed + 1, 2, 1, DIM) + 0.75**0.5 * q)


@pytest.mark.parametrize(("group", "share"), [(1, 0.5), (4, 0.25)])
@pytest.mark.parametrize(("spread", "margin"), [(1.0, 0.5), (4.0, 0.95)])
def test_for_later_queries_of_clustered_keys_merging_errs_least(
    group: int, share: float, spread: float, margin: float
) -> None:
    """The error of attention, beside dropping and beside means that no query weighs."""
    merged, dropped, means = 0.0, 0.0, 0.0
    for seed in range(2):
        keys, values = clustered(100 * seed, 512)
        q = drifting(100 * seed + 50, 64, group, spread)
        rule = KeepKV(window_queries=32, floor=0.8, pool_width=1)
        window, count = QueryWindow(q[:32], SCALE), int(share * 512)
        exact = exact_entries(keys, values)
        scores = expected_output(exact, rule.prediction(exact, window)(keys))
        ways = (
            rule.retain(keys, values, count, window=window, scores=scores),
            rule.retain(keys, values, count, scores=scores),
        )
        kept = ways[0].kept[..., None].expand(-1, -1, DIM)
        alone = exact_entries(keys.gather(1, kept), values.gather(1, kept))
        parts = [*((way.entries, way.compensation) for way in ways), (alone,)]
        for query in q[32:]:
            o, _ = attention_over(query, exact)
            errors = [
                float(((attention_over(query, *part)[0] - o).norm(dim=-1) / o.norm(dim=-1)).mean())
                for part in parts
            ]
            merged, means, dropped = merged + errors[0], means + errors[1], dropped + errors[2]
    assert merged < margin * dropped
    assert merged < 1.01 * means


# -- the entries that a head that competes keeps of a range for one turn --

RANGE = 40


def made_range(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, QueryWindow]:
    k, v = normal(seed, 2, 1, RANGE, DIM)
    return k, v, normal(seed + 1, RANGE), QueryWindow(normal(seed + 2, 5, 1, 2, DIM), 0.3)


@given(seed=st.integers(0, 1000), count=st.integers(0, RANGE))
def test_half_is_kept_for_any_turn_and_half_for_this_one(seed, count):
    k, v, worth, window = made_range(seed)
    keepkv = KeepKV(pool_width=1)
    kept = reselect(keepkv, k, v, worth, count, window)
    assert kept.unique().numel() == kept.numel() == count
    assert torch.equal(kept, kept.sort().values)
    always = worth.topk(count - count // 2).indices
    assert torch.isin(always, kept).all()
    chosen = RefreshRule(keepkv, merges=False).choose_by_worth(k, v, worth, count, window)
    assert torch.equal(chosen.k, k[:, kept])
    assert torch.equal(chosen.v, v[:, kept])
    assert chosen.log_votes is None


@given(seed=st.integers(0, 1000), count=st.integers(0, RANGE))
def test_what_is_merged_is_as_many_entries_as_would_be_kept(seed, count):
    """They stand where those are that would be kept; one is the compensation entry."""
    k, v, worth, window = made_range(seed)
    rule = RefreshRule(KeepKV(floor=0.0, pool_width=1), merges=True)
    chosen = rule.choose_by_worth(k, v, worth, count, window)
    assert chosen.k.shape == chosen.v.shape == (1, count, DIM)
    assert chosen.log_votes.shape == (1, 2, count)
    if count <= 1:
        assert not chosen.log_votes.any()
        return
    kept = reselect(rule.keepkv, k, v, worth, count - 1, window)
    scores = torch.zeros(1, RANGE).index_fill_(1, kept, 1.0)
    retained = rule.keepkv.retain(k, v, count - 1, window=window, scores=scores)
    assert torch.equal(retained.kept[0], kept)
    torch.testing.assert_close(chosen.k[:, :-1], retained.entries.k)
    torch.testing.assert_close(chosen.k[:, -1:], retained.compensation.k)
    torch.testing.assert_close(chosen.log_votes[..., :-1], retained.entries.log_votes)


# -- bad input --


@pytest.mark.parametrize(
    ("argument", "value"),
    [("floor", 1.1), ("window_queries", 0), ("alpha", 1.0), ("pool_width", 4)],
)
def test_a_rule_that_makes_no_sense_is_refused(argument: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        KeepKV(**{argument: value})  # type: ignore[arg-type]
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("window", {"window": QueryWindow(torch.zeros(4, 2, 1, DIM - 1), SCALE)}),
        ("window", {"window": QueryWindow(torch.zeros(0, 2, 1, DIM), SCALE)}),
        ("count", {"count": 0}),
        ("count", {"count": 51}),
    ],
)
def test_spans_that_do_not_fit_are_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    keys, values = make_span(0)
    good = {"keys": keys, "values": values, "count": 9, "window": make_window(0)}
    with pytest.raises(UsageError) as caught:
        KeepKV().retain(**(good | change))
    assert caught.value.argument == argument
