"""Evicted tokens that did not come from the tier are told with what kept them from that."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams
from tiered_tree_harness import turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import Request, context

from kvtier.tier.blobs.keys import Scope
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink


def told(request: Request) -> dict:
    account = request.kvtier_account
    assert account.hit + account.restored + account.computed == account.tokens
    return account.summary()


def evicted(s: MiniScheduler) -> list[int]:
    """A context of two turns that was evicted once the tier had it."""
    tokens = two_turns(s)
    s.tree.evict(EvictParams(num_tokens=s.allocator.size))
    return tokens


def test_what_comes_back_is_restored_and_no_miss(connect):
    s = MiniScheduler(link=connect())
    tokens = evicted(s)
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request) == {
        "hit": 0, "restored": len(tokens), "computed": 2, "recomputed": {},
    }  # fmt: skip


def test_a_session_that_another_server_had_is_restored_and_unknown_without_that(connect):
    """This server never computed it, so without the tier it is new here."""
    tokens = two_turns(MiniScheduler(link=connect()))
    request = turn(MiniScheduler(link=connect()), [*tokens, 9, 9], [3])
    assert (told(request)["restored"], told(request)["computed"]) == (len(tokens), 2)
    request = turn(MiniScheduler(), [*tokens, 9, 9], [3])
    assert told(request) | {"computed": 0} == {
        "hit": 0, "restored": 0, "computed": 0, "recomputed": {},
    }  # fmt: skip


class Listing(TierClient):
    """It knows what it has put."""

    keys: list[bytes]

    def put(self, blob, **kwargs):
        self.keys = [*getattr(self, "keys", ()), blob.key]
        return super().put(blob, **kwargs)


def test_what_the_tier_has_no_more_is_lost(connect):
    s = MiniScheduler(link=connect(Listing))
    tokens = evicted(s)
    client = s.tree.tier.link.client
    assert client.delete(client.keys) > 0
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {"lost": len(tokens)}


def test_what_would_be_loaded_more_slowly_than_computed_is_refused(connect):
    s = MiniScheduler(link=connect())
    tokens = evicted(s)
    costs = s.tree.tier.cost_model
    costs.computed(1.0, 1_000_000)
    costs.loaded(1000.0, 128, 128)
    assert not s.tree.tier.loading_pays
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {"refused": len(tokens)}


def test_what_was_not_waited_for_is_refused(connect, monkeypatch):
    s = MiniScheduler(link=connect())
    tokens = evicted(s)
    monkeypatch.setattr(s.tree.tier, "patience_s", lambda tokens: 0.0)
    monkeypatch.setattr(s.tree.tier.fetches.link, "submit", lambda *_, **__: Unending())
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {"refused": len(tokens)}


class Unending:
    """A fetch of a tier that never answers."""

    done, result, took_s = False, None, 0.0

    def cancel(self, unwanted=None) -> None:
        pass


def test_what_a_tier_that_is_away_has_failed(connect, monkeypatch):
    s = MiniScheduler(link=connect())
    tokens = evicted(s)
    monkeypatch.setattr(TierLink, "healthy", False)
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {"failed": len(tokens)}


def test_what_came_and_could_not_be_written_failed(connect, monkeypatch):
    s = MiniScheduler(link=connect())
    tokens = evicted(s)
    monkeypatch.setattr(s.tree.restorer, "restore", lambda *_: None)
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {"failed": len(tokens)}


@pytest.mark.parametrize("asked", ["ask", "decline"])
def test_nothing_is_known_of_a_request_that_ended(connect, asked):
    s = MiniScheduler(link=connect())
    if asked == "ask":
        turn(s, context(60), [1])
    else:
        s.tree.tier.fetches.decline(s.tree.requests.of("r"), Scope("", "", ""))
        s.tree.release_aborted_request(CacheRequestHandle("r", 0))
    assert s.tree.requests == {}
