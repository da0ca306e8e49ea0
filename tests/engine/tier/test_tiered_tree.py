"""The tree with a tier behind it, driven by a miniature scheduler: whatever comes back is the KV of
its own prefix, compressed as it was, and nothing leaks, whatever the tier does.
"""

from __future__ import annotations

import random

import pytest
from thorough import THOROUGH
from tiered_tree_harness import REFRESH, SHARES, entries, shape, turn
from tree_harness import MiniScheduler
from tree_requests import context, random_tokens
from waiting import SAFETY_S

from kvtier.errors import TierUnavailableError
from kvtier.retention.shares import FixedShare
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.client import TierClient
from kvtier_sglang.radix import matching


@pytest.mark.parametrize("span_tokens", [6, 32])
@pytest.mark.parametrize("share", SHARES)
def test_turns_come_back_to_another_server_compressed_as_they_were(connect, share, span_tokens):
    """A turn's recent tokens may fill the span in which the next one begins, or the beginning of
    that comes from the tier."""
    asked = {"share": share, "span_tokens": span_tokens}
    a, never_left = MiniScheduler(**asked, link=connect()), MiniScheduler(**asked)
    history = context(80)
    for number, answer in enumerate([[1, 2, 3], [4, 5], [6]]):
        for s in (a, never_left):
            turn(s, history, answer)
        history = [*history, *answer, *context(25, seed=number + 1)]
    assert a.tree.tier.link.flush(SAFETY_S)
    assert not a.tree.tier.link.counters["puts_incomplete"]
    b = MiniScheduler(**asked, link=connect())
    came = turn(b, history, [7])
    stayed = turn(never_left, history, [7])
    assert came.restored == stayed.prefix_len == len(history) - 25
    assert shape(b) == shape(never_left)
    for ours, theirs in zip(entries(b, history), entries(never_left, history), strict=True):
        assert ours.equal(theirs)


def test_a_branch_of_a_turn_comes_back_whose_first_span_began_in_that_turn(connect, monkeypatch):
    """The tokens before the branch are in a span of the turn that it left."""
    monkeypatch.setattr(matching, "CUT_WINDOW", 8)
    monkeypatch.setattr(matching, "LEAST_CUT", 16)
    asked = {"size": 1200, "share": FixedShare(0.5), "adaptive": True, "span_tokens": 25}
    a = MiniScheduler(**asked, link=connect())
    shared = context(200)
    turn(a, [*shared, *context(60, seed=1)], [1])
    branch = [*shared, *context(60, seed=2)]
    assert turn(a, branch, [1, 2]).prefix_len == 192
    assert a.tree.tier.link.flush(SAFETY_S)
    assert not a.tree.tier.link.counters["puts_incomplete"]
    b = MiniScheduler(**asked, link=connect())
    reader = b.admit([*branch, 1, 2, 3])
    assert reader is not None
    assert reader.restored == 262
    b.check()


def test_without_the_beginning_of_its_first_span_a_turn_stays_without_it(connect):
    """The tier has lost the earlier turn: what was computed for the later one is not stored under
    a name that promises all of it."""
    a = MiniScheduler(span_tokens=32, link=connect())
    turn(a, context(80), [1])
    assert a.tree.tier.link.flush(SAFETY_S)
    ended = [*context(80), 1]
    tail = a.tree.tier.names.chains(Scope(), ended).exact.tail_key(2, ended[64:])
    assert a.tree.tier.link.client.delete([tail]) == 1
    turn(a, [*context(80), 1, *context(60, seed=1)], [2])
    assert a.tree.tier.link.flush(SAFETY_S)
    assert a.tree.tier.link.counters["puts_incomplete"] == 1
    b = MiniScheduler(span_tokens=32, link=connect())
    assert turn(b, [*context(80), 1, *context(60, seed=1), 2, 3], [4]).restored == 64


def test_another_policy_shares_exact_kv_and_nothing_else(connect):
    a = MiniScheduler(share=FixedShare(0.5), link=connect())
    first = context(60)
    turn(a, first, [1, 2])
    second = [*first, 1, 2, *context(40, seed=1)]
    turn(a, second, [3])
    assert a.tree.tier.link.flush(SAFETY_S)
    b = MiniScheduler(share=FixedShare(0.25), link=connect())
    # Other scores stand beside the KV in this test, so not even the exact part is shared.
    assert turn(b, [*second, 3, 9], [4]).restored == 0


@pytest.mark.parametrize("patience_s", [None, SAFETY_S])
def test_what_is_computed_faster_than_it_is_loaded_is_computed_unless_it_is_waited_for(
    connect, patience_s
):
    """A server with a patience of its own asks the tier whatever was measured."""
    a = MiniScheduler(link=connect())
    turn(a, context(60), [1])
    assert a.tree.tier.link.flush(SAFETY_S)
    b = MiniScheduler(link=connect(), patience_s=patience_s)
    b.tree.tier.cost_model.computed(1.0, 10**9)
    b.tree.tier.cost_model.loaded(1.0, 1000, 1)
    asks = patience_s is not None
    assert b.tree.report()["tier"]["loading_pays"] is asks
    assert turn(b, [*context(60), 1, 7], [2]).restored == (61 if asks else 0)
    assert b.tree.tier.counters["asked"] == asks


class FlakyClient(TierClient):
    """Fails every now and then, in every way a call can."""

    rng = random.Random(0)

    def _perhaps(self) -> None:
        if self.rng.random() < 0.2:
            raise TierUnavailableError("flaky")

    def put(self, *args, **kwargs):
        self._perhaps()
        return super().put(*args, **kwargs)

    def get(self, keys, land, num_bytes):
        self._perhaps()
        outcome = super().get(keys, land, num_bytes)
        self._perhaps()
        return outcome

    def exists(self, keys):
        self._perhaps()
        found = super().exists(keys)
        # The client says it has what it lost since.
        return found._replace(present=[p or self.rng.random() < 0.05 for p in found.present])


@pytest.mark.parametrize("seed", range(8 if THOROUGH else 2))
@pytest.mark.parametrize("client", [TierClient, FlakyClient])
@pytest.mark.parametrize("bits", [None, 8])
def test_random_turns_forks_and_aborts_on_two_servers_and_one_tier(connect, client, seed, bits):
    """The heads compete, coded, or are of a head profile."""
    rng = random.Random(seed)
    share = SHARES[seed % 2] if bits is None else FixedShare(0.4)
    refresh = None if share is None else REFRESH
    # Short ranges would take more room as entries.
    longer = 1 if bits is None else 3
    servers = [
        # There are 25 bundles: of fewer hardly any is whole, and then nothing is refreshed.
        MiniScheduler(
            400 * longer,
            share=share,
            link=connect(client),
            refresh=refresh,
            adaptive=bits is not None,
            bits=bits,
        )
        for _ in range(2)
    ]
    histories = [random_tokens(rng, 40 * longer)]
    restored = 0
    for _ in range(60):
        s = rng.choice(servers)
        history = rng.choice(histories)
        if rng.random() < 0.4:
            history = history[: rng.randrange(1, len(history) + 1)]
        prompt = [*history, *random_tokens(rng, rng.randrange(1, 30 * longer))][: 150 * longer]
        request = s.admit(prompt)
        if request is None:
            continue
        restored += request.restored
        s.check()
        going = True
        while going and request.filled < len(prompt):
            going = s.extend(request, rng.randrange(5, 40 * longer))
            if going:
                s.checkpoint(request)
                s.check()
        answer = random_tokens(rng, rng.randrange(0, 6))
        answered = [token for token in answer if going and s.decode(request, token)]
        ending = rng.random()
        s.release(request, checkpoint=going and ending < 0.8, aborted=ending < 0.9)
        s.check()
        if going:
            histories.append([*prompt, *answered])
        if rng.random() < 0.5:
            s.tree.tier.link.flush(SAFETY_S)
    for s in servers:
        assert s.tree.tier.link.flush(SAFETY_S)
        assert s.tree.tier.link.held_bytes == 0
        assert not s.tree.has_pending_cache_operations()
        assert s.tree.private_slots == 0
        assert not s.tree.requests
    if client is TierClient and share is not None:
        assert sum(s.tree.refresh.refresher.counters["refreshed_turns"] for s in servers) > 0
    if client is TierClient:
        assert restored > 0
