"""The tree with a tier that is late, away, or has lost something: what is there comes back,
and is not taken for more than it is.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from tiered_tree_harness import REFRESH, SHARES, turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import context
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.retention.shares import FixedShare
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.client import Presence, TierClient
from kvtier.tier.link import link as link_module
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.prefetch import Landed
from kvtier.tier.transport.landing import Landing
from kvtier_sglang.tier.state import KvWait
from kvtier_sglang.waits import Answer

# Longer than any machine takes to load anything here.
PUT_S = 3600.0


class WaitingClient(TierClient):
    """A client whose puts wait until a get waits for them."""

    link: TierLink | None = None
    clock = FakeClock()

    def put(self, *args, **kwargs):
        if self.link is not None:
            wait_for(lambda: self.link.counters["gets_settled"], "no get waits")
            self.clock.now += PUT_S
        return super().put(*args, **kwargs)


def test_a_turn_that_begins_while_the_last_one_still_spills_is_refreshed(connect, monkeypatch):
    monkeypatch.setattr(link_module, "SETTLE_S", SAFETY_S)
    s = MiniScheduler(share=FixedShare(0.5), link=connect(WaitingClient), refresh=REFRESH)
    s.tree.tier.link.client.link = s.tree.tier.link
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.counters["put"] == 0
    turn(s, [*prompt, 1, 2, 7, 7, 7], [3])
    assert s.tree.report()["tier"]["refreshed_turns"] == 1


def test_what_the_tree_has_lost_comes_back_while_it_is_still_spilled(connect, monkeypatch):
    monkeypatch.setattr(link_module, "SETTLE_S", SAFETY_S)
    s = MiniScheduler(share=FixedShare(0.5), link=connect(WaitingClient))
    s.tree.tier.link.client.link = s.tree.tier.link
    turn(s, context(90), [1, 2])
    assert s.tree.tier.link.counters["put"] == 0
    emptied = MiniScheduler(share=FixedShare(0.5), link=s.tree.tier.link)
    measured: list[float] = []
    monkeypatch.setattr(
        emptied.tree.tier.cost_model, "loaded", lambda took, *_: measured.append(took)
    )
    # The link takes this clock for the time: only puts take any.
    monkeypatch.setattr(link_module, "time", WaitingClient.clock)
    assert turn(emptied, [*context(90), 1, 2, 9, 9], [3]).restored == 92
    # Waiting for puts is not what loading takes; writing the pool is.
    assert len(measured) == 1
    assert measured[0] < PUT_S


class AwayClient(TierClient):
    """The tier is away while a test says so."""

    away = True

    def connect(self):
        if self.away:
            raise TierUnavailableError("away")
        super().connect()


@pytest.mark.parametrize("share", SHARES)
def test_a_turn_that_ends_while_the_tier_is_away_is_there_when_it_is_back(connect, share):
    a = MiniScheduler(share=share, link=connect(AwayClient))
    prompt = context(90)
    turn(a, prompt, [1, 2])
    assert not a.tree.tier.link.flush(0.05)
    assert a.tree.tier.link.held_bytes > 0
    a.tree.tier.link.client.away = False
    assert a.tree.tier.link.flush(SAFETY_S)
    assert a.tree.tier.link.held_bytes == 0
    b = MiniScheduler(share=share, link=connect())
    assert turn(b, [*prompt, 1, 2, 9, 9], [3]).restored == 92


@pytest.mark.parametrize("in_time", [True, False])
def test_spans_that_found_no_room_go_when_there_is_some_or_are_shed_at_the_end(connect, in_time):
    a = MiniScheduler(share=FixedShare(0.5), link=connect(AwayClient))
    link, spiller = a.tree.tier.link, a.tree.tier.spiller
    taken = link.room_bytes - 7 * spiller.codec.layout(6).num_bytes // 2
    assert link.claim(taken)
    request = a.admit(context(90))
    while request.filled < 90:
        assert a.extend(request, 17)
        a.checkpoint(request)
    assert spiller.counters["spans_spilled"] == 3
    if in_time:
        link.release(taken)
    a.release(request, checkpoint=True)
    a.check()
    assert spiller.counters["spans_shed"] == (0 if in_time else 12)
    link.client.away = False
    assert link.flush(SAFETY_S)
    b = MiniScheduler(share=FixedShare(0.5), link=connect())
    assert turn(b, [*context(90), 9, 9], [3]).restored == (90 if in_time else 18)


class EndsWhenLookedAt(Fetch[Landed]):
    """Comes between two looks of the scheduler at it: the first one says that it is not done."""

    landed: Landed

    @property
    def done(self) -> bool:
        was_done = super().done
        if not was_done:
            self.end(self.landed)
        return was_done


def test_what_comes_while_the_scheduler_looks_is_not_lost():
    fetch = EndsWhenLookedAt(lambda client: None)
    fetch.landed = Landed(0, 64, 64, [], host=None)
    wait = KvWait(fetch, deadline=float("inf"), scope=Scope())
    assert wait.answer is Answer.AWAITED
    assert wait.answer == (0, 64, 64, [])


class LosingClient(TierClient):
    """A client that says it has what it cannot give."""

    lost: frozenset[bytes] = frozenset()
    says_so = False

    def get(self, keys, land, num_bytes):
        outcome = super().get(keys, land, num_bytes)
        return [
            Landing.MISSING if key in self.lost else one
            for key, one in zip(keys, outcome, strict=True)
        ]

    def exists(self, keys):
        found = super().exists(keys)
        if not self.says_so:
            return found
        present = [p and k not in self.lost for k, p in zip(keys, found.present, strict=True)]
        return found._replace(leading_run=0, present=present)


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize(("lost", "comes"), [(13, 78), (4, 24), (0, 0)])
def test_of_a_context_that_the_tier_lost_a_span_of_what_is_before_it_comes_back(
    connect, lost, comes, says_so
):
    share = FixedShare(0.5)
    a = MiniScheduler(share=share, link=connect())
    tokens = two_turns(a)
    b = MiniScheduler(share=share, link=connect(LosingClient))
    chains = b.tree.tier.names.chains(Scope(), tokens)
    b.tree.tier.link.client.says_so = says_so
    b.tree.tier.link.client.lost = frozenset({chains.exact.keys[lost], chains.policy.keys[lost]})
    assert turn(b, [*tokens, 9, 9], [3]).restored == comes
    never_left = {n.stop: (n.dropped, n.exact) for n in a.tree.nodes()}
    for node in b.tree.nodes():
        if node.stop <= comes:
            assert node.exact or node.start >= 62
            assert node.stop not in never_left or never_left[node.stop] == (
                node.dropped, node.exact,
            )  # fmt: skip


@contextmanager
def nothing_there():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TierClient, "exists", lambda _, keys: Presence(0, [False] * len(keys)))
        yield


class Torn:
    """Two turns of which the tier lost the span [78, 84) of the second; the same tokens and more
    were computed in one turn, too. `first`: a request that uses the first turn on server `b`,
    so that nothing of it is dropped there."""

    def __init__(self, connect, *, says_so: bool) -> None:
        share = FixedShare(0.5)
        tokens = two_turns(MiniScheduler(share=share, link=connect()))
        self.longer = [*tokens, *context(20, seed=2)]
        with nothing_there():
            at_once = MiniScheduler(share=share, link=connect())
            turn(at_once, self.longer, [6])
            assert at_once.tree.tier.link.flush(SAFETY_S)
        self.b = b = MiniScheduler(share=share, link=connect(LosingClient))
        client = b.tree.tier.link.client
        client.says_so = says_so
        client.lost = frozenset({b.tree.tier.names.chains(Scope(), tokens).policy.keys[13]})
        with nothing_there():
            self.first = b.admit(tokens)
        assert b.extend(self.first, 62)
        b.checkpoint(self.first)

    def restored(self):
        """A request behind the first turn, and the node that was restored for it."""
        request = self.b.admit([*self.longer, 9])
        (node,) = (n for n in self.b.tree.nodes() if n.start == 62)
        assert request.restored == len(node.key)
        return request, node


def test_what_is_there_in_one_piece_is_worth_more_than_a_torn_record(connect):
    _, node = Torn(connect, says_so=True).restored()
    assert (node.stop, node.exact) == (120, True)


def test_a_gap_does_not_make_what_is_before_it_exact(connect):
    """A run that goes on exactly where the record ends says nothing of what is in it."""
    torn = Torn(connect, says_so=False)
    request, node = torn.restored()
    assert (node.stop, node.exact) == (78, False)
    torn.b.release(torn.first, checkpoint=False, aborted=True)
    assert torn.b.extend(request, 100)
    torn.b.release(request, checkpoint=True)
    torn.b.check()
    flags = sorted((n.start, n.stop, n.exact) for n in torn.b.tree.nodes())
    assert flags == [(0, 62, True), (62, 126, False)]


def test_a_request_that_computes_exactly_does_not_take_over_what_was_not(connect):
    torn = Torn(connect, says_so=False)
    b = torn.b
    other, _ = torn.restored()
    assert b.extend(torn.first, 100)
    b.checkpoint(torn.first)
    b.check()
    assert torn.first.last_node.stop == 105
    assert all(node.exact for node in torn.first.last_node.path())
    # Its copy does not give way to the other one either, nor does the other one come before it.
    b.release(other, checkpoint=False, aborted=True)
    b.check()
    b.release(torn.first, checkpoint=True)
    b.check()
    with nothing_there():
        assert b.admit([*torn.longer, 9]).prefix_len == 105
