"""One rank's tree beside a partner that has its part of what the tier sends, or has lost it."""

from __future__ import annotations

from typing import Any

import pytest
from tiered_tree_harness import REFRESH, turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import context

from kvtier.retention.shares import FixedShare
from kvtier.tier.link.link import TierLink
from kvtier_sglang.ranks import Answer, Ranks


class Partner(Ranks):
    """The first of two ranks; the other says the same, or always `says`. heard: what it was told
    in each round."""

    def __init__(self, says: Answer | None = None) -> None:
        super().__init__()
        self.size, self.says = 2, says
        self.heard: list[list[Any]] = []

    def every(self, found: Any) -> list[Any]:
        self.heard.append(found)
        return [found, found if self.says is None else [self.says for _ in found]]


@pytest.fixture
def spilled(connect) -> list[int]:
    """A context of two turns that the tier has."""
    return two_turns(MiniScheduler(link=connect(), share=FixedShare(0.5)))


def server(link, partner: Partner) -> MiniScheduler:
    s = MiniScheduler(link=link, share=FixedShare(0.5), refresh=REFRESH)
    s.tree.ranks = partner
    return s


def holds_nothing(s: MiniScheduler) -> bool:
    assert s.tree.tier.link.flush(10)
    return not s.tree.has_pending_cache_operations() and s.tree.tier.link.held_bytes == 0


def test_what_came_to_both_is_restored_and_refreshed(connect, spilled):
    s = server(connect(), Partner())
    assert turn(s, [*spilled, 7], [2]).restored > 60
    assert turn(s, [*spilled, 7, 2, 9], [2]).filled > 0
    assert s.tree.report()["tier"]["refreshed_turns"] >= 1
    assert holds_nothing(s)


def test_what_the_partner_has_lost_is_computed_by_both(connect, spilled):
    s = server(connect(), Partner(Answer.LOST))
    assert turn(s, [*spilled, 7], [2]).restored == 0
    turn(s, [*spilled, 7, 2, 9], [2])
    assert s.tree.report()["tier"].get("refreshed_turns", 0) == 0
    assert holds_nothing(s)


@pytest.mark.parametrize("away", [False, True], ids=["computing is faster here", "no tier here"])
def test_a_rank_that_does_not_ask_says_so(connect, spilled, monkeypatch, away):
    """Its partner asks and waits for a word from here."""
    partner = Partner()
    s = server(connect(), partner)
    if away:
        monkeypatch.setattr(TierLink, "healthy", False)
    else:
        s.tree.tier.cost_model.computed(1.0, 10**9)
        s.tree.tier.cost_model.loaded(1.0, 1)
    assert turn(s, [*spilled, 7], [2]).restored == 0
    assert partner.heard[0] == [Answer.LOST]
    assert s.tree.uses_tier


def test_a_prompt_shorter_than_a_span_is_asked_for_by_no_rank(connect):
    partner = Partner()
    s = server(connect(), partner)
    turn(s, context(3), [1])
    assert partner.heard == []
