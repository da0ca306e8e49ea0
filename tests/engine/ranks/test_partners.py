"""One rank's tree beside a partner that has its part of what the tier sends, or has lost it."""

from __future__ import annotations

from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import pytest
from tiered_tree_harness import REFRESH, turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import context

from kvtier.config import Settings
from kvtier.errors import StartupError
from kvtier.retention.shares import FixedShare
from kvtier.tier.link.link import TierLink
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.runtime import Runtime
from kvtier_sglang.waits import Answer


class Partner(Ranks):
    """The first of two ranks; the other says the same, or `fails` to restore. heard: what it was
    told in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.fails = 2, False
        self.heard: list[Any] = []

    def every(self, found: Any) -> list[Any]:
        self.heard.append(found)
        if isinstance(found, bool):
            return [found, self.fails]
        return [found, found]


@pytest.fixture
def spilled(connect) -> list[int]:
    """A context of two turns that the tier has."""
    return two_turns(MiniScheduler(link=connect(), share=FixedShare(0.5)))


def server(link, partner: Partner) -> MiniScheduler:
    s = MiniScheduler(link=link, share=FixedShare(0.5), refresh=REFRESH)
    s.tree.ranks = s.tree.restorer.ranks = partner
    return s


@pytest.mark.parametrize("away", [False, True], ids=["computing is faster here", "no tier here"])
def test_a_rank_that_does_not_ask_says_so(connect, spilled, monkeypatch, away):
    """Its partner asks and waits for a word from here."""
    partner = Partner()
    s = server(connect(), partner)
    if away:
        monkeypatch.setattr(TierLink, "healthy", False)
    else:
        s.tree.tier.cost_model.computed(1.0, 10**9)
        s.tree.tier.cost_model.loaded(1.0, 1000, 1)
    assert turn(s, [*spilled, 7], [2]).restored == 0
    assert partner.heard[0] == [Answer.LOST]
    assert s.tree.uses_tier


def full_of_others(connect) -> MiniScheduler:
    """Make a server where something must be evicted before a context can be restored; the tier has
    nothing of what it is full of."""
    s = server(connect(), Partner())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TierLink, "healthy", False)
        for seed in range(20, 30):
            turn(s, context(60, seed=seed), [1])
    return s


def test_what_one_rank_cannot_write_is_computed_by_both_who_stay_alike(connect, spilled):
    """Nodes, slots and what was evicted are the same on the rank that fails and on its partner."""
    left, evicted = {}, {}
    for name in ("this rank", "its partner", "neither"):
        s = full_of_others(connect)
        partner = s.tree.ranks
        partner.fails = name == "its partner"
        before = s.tree.total_size()
        with pytest.MonkeyPatch.context() as patch:
            if name == "this rank":
                patch.setattr(s.tree.tier.codec, "scatter", raise_broken)
            request = s.admit([*spilled, 7])
        assert (request.restored > 60) == (name == "neither")
        s.check()
        report = s.tree.report()["tier"]
        assert report.get("restore_failed", 0) == (name == "this rank")
        assert report.get("restore_failed_on_another_rank", 0) == (name == "its partner")
        assert partner.heard[-1] is (name == "this rank")
        evicted[name] = before - s.tree.total_size()
        left[name] = s.allocator.alloc(20).tolist(), s.tree.total_size()
    assert evicted["this rank"] > 0
    assert left["this rank"] == left["its partner"] != left["neither"]


def raise_broken(*args: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("its", ["the same", "another", None])
def test_ranks_with_other_calibrations_do_not_start(tmp_path, monkeypatch, its):
    file = tmp_path / "worth.npz"
    file.write_text("the same")
    partner, runtime = Partner(), Runtime()
    theirs = None if its is None else sha256(its.encode()).hexdigest()
    monkeypatch.setattr(partner, "every", lambda found: [found, theirs])
    scorer = {"name": "reconstruction", "file": file}
    runtime.settings = Settings(head_budgets="adaptive", retention=0.25, scorer=scorer)
    runtime.ranks = partner
    with nullcontext() if its == "the same" else pytest.raises(StartupError, match="different cal"):
        runtime._check_ranks_agree()
