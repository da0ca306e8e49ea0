"""Evicted tokens that did not come from the tier are told with what kept them from that."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiered_tree_harness import turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import Request

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

    keys: tuple[bytes, ...] = ()

    def put(self, blob, **kwargs):
        self.keys += (blob.key,)
        return super().put(blob, **kwargs)


class Unending:
    """A fetch of a tier that never answers."""

    done, result, took_s = False, None, 0.0

    def cancel(self, unwanted=None) -> None:
        pass


def lose(s: MiniScheduler, patch: pytest.MonkeyPatch) -> None:
    client = s.tree.tier.link.client
    assert client.delete(list(client.keys)) > 0


def compute_faster(s: MiniScheduler, patch: pytest.MonkeyPatch) -> None:
    s.tree.tier.cost_model.computed(1.0, 1_000_000)
    s.tree.tier.cost_model.loaded(1000.0, 128, 128)
    assert not s.tree.tier.loading_pays


def be_impatient(s: MiniScheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(s.tree.tier, "patience_s", lambda tokens: 0.0)
    patch.setattr(s.tree.tier.link, "submit", lambda *_, **__: Unending())


def be_away(s: MiniScheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierLink, "healthy", False)


def fail_to_write(s: MiniScheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(s.tree.restorer, "restore", lambda *_: None)


@pytest.mark.parametrize(
    ("happen", "why"),
    [
        (lose, "lost"),
        (compute_faster, "refused"),
        (be_impatient, "refused"),
        (be_away, "failed"),
        (fail_to_write, "failed"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_evicted_tokens_that_did_not_come_say_why(connect, monkeypatch, happen, why):
    s = MiniScheduler(link=connect(Listing))
    tokens = evicted(s)
    happen(s, monkeypatch)
    request = turn(s, [*tokens, 9, 9], [3])
    assert told(request)["recomputed"] == {why: len(tokens)}
