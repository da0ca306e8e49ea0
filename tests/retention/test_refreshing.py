"""The entries that a head that competes keeps of a range for one turn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import RefreshRule, reselect

TOKENS, GROUP, DIM = 40, 2, 8


def made(seed: int):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, TOKENS, DIM, generator=generator)
    worth = torch.randn(TOKENS, generator=generator)
    return k, v, worth, QueryWindow(torch.randn(5, 1, GROUP, DIM, generator=generator), 0.3)


@given(seed=st.integers(0, 1000), count=st.integers(0, TOKENS))
def test_half_is_kept_for_any_turn_and_half_for_this_one(seed, count):
    k, v, worth, window = made(seed)
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


@given(seed=st.integers(0, 1000), count=st.integers(0, TOKENS))
def test_what_is_merged_is_as_many_entries_as_would_be_kept(seed, count):
    """They stand where those are that would be kept; one is the compensation entry."""
    k, v, worth, window = made(seed)
    rule = RefreshRule(KeepKV(floor=0.0, pool_width=1), merges=True)
    chosen = rule.choose_by_worth(k, v, worth, count, window)
    assert chosen.k.shape == chosen.v.shape == (1, count, DIM)
    assert chosen.log_votes.shape == (1, GROUP, count)
    if count <= 1:
        assert not chosen.log_votes.any()
        return
    kept = reselect(rule.keepkv, k, v, worth, count - 1, window)
    scores = torch.zeros(1, TOKENS).index_fill_(1, kept, 1.0)
    retained = rule.keepkv.retain(k, v, count - 1, window=window, scores=scores)
    assert torch.equal(retained.kept[0], kept)
    torch.testing.assert_close(chosen.k[:, :-1], retained.entries.k)
    torch.testing.assert_close(chosen.k[:, -1:], retained.compensation.k)
    torch.testing.assert_close(chosen.log_votes[..., :-1], retained.entries.log_votes)
