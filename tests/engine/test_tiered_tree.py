"""The tree with a tier behind it, driven by a miniature scheduler: whatever comes back is the KV of
its own prefix, compressed as it was, and nothing leaks, whatever the tier does.
"""

from __future__ import annotations

import functools
import random
import time
from contextlib import contextmanager

import pytest
import torch
from tierd.live_tier import in_process
from tree_harness import MiniScheduler, context, random_tokens, run_turn

from kvtier.errors import TierUnavailableError
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.share import FixedShare
from kvtier.tier import link as link_module
from kvtier.tier.breaker import Breaker
from kvtier.tier.client import Presence, TierClient
from kvtier.tier.landing import Landing
from kvtier.tier.link import TierLink
from kvtier_sglang.refresh_again import AgainRule

REFRESH = RefreshRule(KeepKV(pool_width=1), merges=False)
SHARES = [None, FixedShare(0.5)]
# Several chunks, none of them a whole number of spans.
turn = functools.partial(run_turn, chunk=17)


@pytest.fixture(scope="module")
def tier():
    with in_process(memory_bytes=1 << 24, refresh_workers=1) as live:
        yield live


@pytest.fixture
def connect(tier, request):
    """Links to the tier in a namespace of the test's own, closed at its end."""
    links = []

    def make(client_class: type[TierClient] = TierClient, **options) -> TierLink:
        namespace = f"{request.node.name[:150]}"
        client = client_class(tier.address, namespace, **options)
        links.append(TierLink(client, buffer_bytes=1 << 22, breaker=Breaker(first_s=0.01)))
        return links[-1]

    yield make
    for link in links:
        link.close()


def shape(s: MiniScheduler):
    return sorted(
        (n.start, n.stop, n.prompt_stop, n.dropped, n.compressed, n.locality_size, n.ca_size)
        for n in s.tree.nodes()
    )


def entries(s: MiniScheduler, tokens: list[int]):
    """What both classes hold of a context, in order, with votes."""
    node, _ = s.tree._walk(s.tree.root_node, _key(tokens), 0)
    row = s.tree.path_device_indices(node)
    images = s.allocator.locality_of[row]
    ca = s.pool.ca[1].k[row[row > 0]]
    held = images[images > 0]
    return ca, s.pool.locality[0].v[held], s.pool.log_votes[held]


def _key(tokens):
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens))


@pytest.mark.parametrize("share", SHARES)
def test_turns_come_back_to_another_server_compressed_as_they_were(connect, share):
    a, never_left = MiniScheduler(share=share, link=connect()), MiniScheduler(share=share)
    history = context(80)
    for number, answer in enumerate([[1, 2, 3], [4, 5], [6]]):
        for s in (a, never_left):
            turn(s, history, answer)
        history = [*history, *answer, *context(25, seed=number + 1)]
    assert a.tree.link.flush(10)
    b = MiniScheduler(share=share, link=connect())
    came = turn(b, history, [7])
    stayed = turn(never_left, history, [7])
    assert came.restored == stayed.prefix_len == len(history) - 25
    assert shape(b) == shape(never_left)
    for ours, theirs in zip(entries(b, history), entries(never_left, history), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("share", SHARES)
def test_a_fork_inside_a_compressed_context_gets_its_exact_prefix_back(connect, share):
    s = MiniScheduler(share=share, link=connect())
    shared = context(90)
    turn(s, shared, [1, 2])
    assert s.tree.link.flush(10)
    fork = turn(s, [*shared[:61], 7, 7, 7], [3])
    # Spans are 6 tokens long: 60 of the 61 shared ones came whole.
    assert fork.prefix_len == 60


def test_a_tail_shorter_than_a_span_comes_back_too(connect):
    a = MiniScheduler(link=connect())
    prompt = context(23)
    turn(a, prompt, [1, 2])
    assert a.tree.link.flush(10)
    b = MiniScheduler(link=connect())
    assert turn(b, [*prompt, 1, 2, 9, 9], [3]).restored == 25


class WaitingClient(TierClient):
    """Whose puts wait until a get waits for them."""

    link: TierLink | None = None

    def put(self, *args, **kwargs):
        deadline = time.monotonic() + 10
        while self.link is not None and not self.link.counters["gets_settled"]:
            assert time.monotonic() < deadline, "nobody waits"
            time.sleep(0.001)
        if self.link is not None:
            time.sleep(0.02)
        return super().put(*args, **kwargs)


@pytest.mark.parametrize("near_data", [False, True])
def test_a_turn_that_begins_while_the_last_one_still_spills_is_refreshed(
    connect, near_data, monkeypatch
):
    monkeypatch.setattr(link_module.TierLink.settle, "__defaults__", (10.0,))
    s = MiniScheduler(
        share=FixedShare(0.5), link=connect(WaitingClient), refresh=REFRESH, near_data=near_data
    )
    s.tree.link.client.link = s.tree.link
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.link.counters["put"] == 0
    turn(s, [*prompt, 1, 2, 7, 7, 7], [3])
    assert s.tree.tier_report()["refreshed_turns"] == 1


def test_what_the_tree_has_lost_comes_back_while_it_is_still_spilled(connect, monkeypatch):
    monkeypatch.setattr(link_module.TierLink.settle, "__defaults__", (10.0,))
    s = MiniScheduler(share=FixedShare(0.5), link=connect(WaitingClient))
    s.tree.link.client.link = s.tree.link
    turn(s, context(90), [1, 2])
    assert s.tree.link.counters["put"] == 0
    emptied = MiniScheduler(share=FixedShare(0.5), link=s.tree.link)
    measured: list[float] = []
    monkeypatch.setattr(emptied.tree.rates, "loaded", lambda took, _: measured.append(took))
    began = time.monotonic()
    assert turn(emptied, [*context(90), 1, 2, 9, 9], [3]).restored == 92
    # Sixteen puts or so, which are not what loading takes.
    assert sum(measured) < time.monotonic() - began - 0.25


class AwayClient(TierClient):
    """Nobody is there while a test says so."""

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
    assert not a.tree.link.flush(0.05)
    assert a.tree.link.held_bytes > 0
    a.tree.link.client.away = False
    assert a.tree.link.flush(10)
    assert a.tree.link.held_bytes == 0
    b = MiniScheduler(share=share, link=connect())
    assert turn(b, [*prompt, 1, 2, 9, 9], [3]).restored == 92


class LosingClient(TierClient):
    """Says it has what it cannot give."""

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


def two_turns(s: MiniScheduler) -> list[int]:
    """The tokens of two turns, [0, 62) exact and [62, 105) computed behind what was dropped."""
    turn(s, context(60), [1, 2])
    turn(s, [*context(60), 1, 2, *context(40, seed=1)], [3, 4, 5])
    assert s.tree.link.flush(10)
    return [*context(60), 1, 2, *context(40, seed=1), 3, 4, 5]


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize(("lost", "comes"), [(13, 78), (4, 24), (0, 0)])
def test_of_a_context_that_the_tier_lost_a_span_of_what_is_before_it_comes_back(
    connect, lost, comes, says_so
):
    share = FixedShare(0.5)
    a = MiniScheduler(share=share, link=connect())
    tokens = two_turns(a)
    b = MiniScheduler(share=share, link=connect(LosingClient))
    chains = b.tree.names.chains("\0", tokens)
    b.tree.link.client.says_so = says_so
    b.tree.link.client.lost = frozenset({chains.exact.keys[lost], chains.policy.keys[lost]})
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
            assert at_once.tree.link.flush(10)
        self.b = b = MiniScheduler(share=share, link=connect(LosingClient))
        client = b.tree.link.client
        client.says_so = says_so
        client.lost = frozenset({b.tree.names.chains("\0", tokens).policy.keys[13]})
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
    """What goes on exactly where the record ends says nothing of what is in it."""
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
    assert all(node.exact for node in b.tree._path(torn.first.last_node))
    # Nor does its copy give way to the other one, or the other one come before it.
    b.release(other, checkpoint=False, aborted=True)
    b.check()
    b.release(torn.first, checkpoint=True)
    b.check()
    with nothing_there():
        assert b.admit([*torn.longer, 9]).prefix_len == 105


def test_a_streaming_session_comes_back_to_another_server(connect):
    a = MiniScheduler(share=FixedShare(0.5), link=connect(), streaming=True)
    tokens = two_turns(a)
    assert not any(node.exact for node in a.tree.nodes())
    b = MiniScheduler(share=FixedShare(0.5), link=connect(), streaming=True)
    assert turn(b, [*tokens, 9, 9], [3]).restored == len(tokens)


@pytest.mark.parametrize("in_time", [True, False])
def test_spans_that_found_no_room_go_when_there_is_some_or_are_shed_at_the_end(connect, in_time):
    a = MiniScheduler(share=FixedShare(0.5), link=connect(AwayClient))
    link, spiller = a.tree.link, a.tree.spiller
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
    assert link.flush(10)
    b = MiniScheduler(share=FixedShare(0.5), link=connect())
    assert turn(b, [*context(90), 9, 9], [3]).restored == (90 if in_time else 18)


def test_another_policy_shares_exact_kv_and_nothing_else(connect):
    a = MiniScheduler(share=FixedShare(0.5), link=connect())
    first = context(60)
    turn(a, first, [1, 2])
    second = [*first, 1, 2, *context(40, seed=1)]
    turn(a, second, [3])
    assert a.tree.link.flush(10)
    b = MiniScheduler(share=FixedShare(0.25), link=connect())
    # Other scores stand beside the KV in this test, so not even the exact part is shared.
    assert turn(b, [*second, 3, 9], [4]).restored == 0


def test_requests_that_end_without_finishing_leave_nothing_in_flight(connect):
    s = MiniScheduler(link=connect())
    turn(s, context(60), [1])
    assert s.tree.link.flush(10)
    request = s.admit([*context(40), 7, 7])
    s.extend(request, 1)
    s.release(request, checkpoint=False, aborted=True)
    s.check()
    assert not s.tree.has_pending_cache_operations()
    assert s.tree.link.flush(10)
    assert s.tree.link.held_bytes == 0


def test_a_turn_reads_entries_of_its_own_and_leaves_the_tree_as_it_was(connect):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.link.flush(10)
    before = [node.value.clone() for node in s.tree.nodes()]
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    assert s.tree.refresher.counters["refreshed_turns"] == 1
    assert s.tree.private_ca > 0
    (hole,) = s.tree.holes_of_request(request.rid)
    row = s.rows.req_to_token[request.kv.req_pool_idx, hole.begin : hole.begin + hole.kept]
    held = torch.cat(before)
    assert not torch.isin(row.long(), held).any()
    s.check()
    s.checkpoint(request)
    s.check()
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_ca == 0
    assert all(any(n.value.equal(v) for n in s.tree.nodes()) for v in before)


def test_a_tier_that_chooses_by_itself_chooses_the_same(connect):
    prompt = context(90)
    held = []
    for near_data in (False, True):
        s = MiniScheduler(
            share=FixedShare(0.5), link=connect(), refresh=REFRESH, near_data=near_data
        )
        turn(s, prompt, [1, 2])
        assert s.tree.link.flush(10)
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
        assert s.extend(request, 100)
        report = s.tree.tier_report()
        assert report["refreshed_turns"] == 1
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
        entries = s.pool.ca[1].k[row[row > 0]]
        held.append((entries, report["refresh_moved_bytes"]))
        s.check()
        s.release(request, checkpoint=True)
        s.check()
        assert s.tree.link.flush(10)
        assert s.tree.link.held_bytes == 0
    (fetched, all_bytes), (near, some_bytes) = held
    assert fetched.equal(near)
    # Half of the tokens of one of three heads in one of two layers, and what was asked.
    assert some_bytes < all_bytes / 4


def chosen_by_now(s: MiniScheduler) -> None:
    """What is chosen in the background is."""
    for ahead in s.tree.refreshes._ahead.values():
        if ahead.choosing is not None:
            ahead.choosing.result(10)


def generated(s: MiniScheduler, request, count: int) -> list[int]:
    """After which tokens the request's entries were others than before."""
    changed = []
    for number in range(count):
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
        before = s.pool.ca[1].k[row[row > 0]]
        assert s.decode(request, number)
        assert s.tree.link.flush(10)
        chosen_by_now(s)
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled - 1].long()
        if not s.pool.ca[1].k[row[row > 0]].equal(before):
            changed.append(number)
        s.check()
    return changed


@pytest.mark.parametrize("near_data", [False, True])
def test_every_so_many_tokens_the_newest_queries_choose_again(connect, near_data):
    s = MiniScheduler(
        share=FixedShare(0.3),
        link=connect(),
        refresh=REFRESH,
        near_data=near_data,
        again=AgainRule(every_tokens=4),
    )
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.link.flush(10)
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    # Asked with the 4th token, come and being chosen from with the 5th, written with the 6th.
    assert generated(s, request, 16) == [5, 11]
    assert s.tree.refresher.counters["refreshed_again"] == 2
    watched = s.tree.refresher.again._watched[request.rid]
    assert len(watched.windows[1]) == 16 + 3
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_ca == 0
    assert not s.tree.refresher.again._watched
    assert s.tree.link.flush(10)
    assert s.tree.link.held_bytes == 0


def test_attention_that_has_moved_on_chooses_again_and_attention_that_has_not_does_not(connect):
    for moved, again in ((0.01, 1), (0.99, 0)):
        s = MiniScheduler(
            share=FixedShare(0.3),
            link=connect(),
            refresh=RefreshRule(KeepKV(pool_width=1, window_queries=2), merges=False),
            again=AgainRule(moved=moved),
        )
        prompt = context(90, seed=int(100 * moved))
        turn(s, prompt, [1, 2])
        assert s.tree.link.flush(10)
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
        assert s.extend(request, 100)
        # Looked at with the 8th token for the first time, and with the 16th.
        generated(s, request, 19)
        assert s.tree.refresher.counters["refreshed_again"] == again
        s.release(request, checkpoint=True)
        s.check()


def test_a_turn_that_began_without_the_tier_is_refreshed_when_it_is_back(connect, monkeypatch):
    s = MiniScheduler(
        share=FixedShare(0.3), link=connect(), refresh=REFRESH, again=AgainRule(every_tokens=2)
    )
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.link.flush(10)
    with monkeypatch.context() as patch:
        patch.setattr(TierClient, "get", lambda *args: [Landing.MISSING] * len(args[1]))
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    assert s.tree.refresher.counters["refreshed_turns"] == 0
    assert s.tree.private_ca == 0
    assert generated(s, request, 4) == [3]
    assert s.tree.private_ca > 0
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_ca == 0


def test_a_restored_context_is_refreshed_from_what_it_was_restored_from(connect):
    a = MiniScheduler(share=FixedShare(0.5), link=connect())
    prompt = context(90)
    turn(a, prompt, [1, 2])
    assert a.tree.link.flush(10)
    b = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    assert turn(b, [*prompt, 1, 2, 7, 7, 7], [3]).restored == 92
    assert b.tree.refresher.counters["refreshed_turns"] == 1
    assert b.tree.link.flush(10)
    assert b.tree.link.held_bytes == 0


def test_what_is_computed_faster_than_it_is_loaded_is_computed(connect):
    a = MiniScheduler(link=connect())
    turn(a, context(60), [1])
    assert a.tree.link.flush(10)
    b = MiniScheduler(link=connect())
    b.tree.rates.computed(1.0, 10**9)
    b.tree.rates.loaded(1.0, 1)
    assert turn(b, [*context(60), 1, 7], [2]).restored == 0
    assert b.tree.tier_counters["asked"] == 0


def test_a_refresh_without_room_leaves_no_host_memory_held(connect, monkeypatch):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    turn(s, context(90), [1, 2])
    assert s.tree.link.flush(10)
    monkeypatch.setattr(s.tree.refresher, "_allocate", lambda tree, refreshing: False)
    request = s.admit([*context(90), 1, 2, 7, 7])
    assert s.tree.link.held_bytes > 0
    assert s.extend(request, 100)
    assert s.tree.refresher.counters["refresh_no_room"] == 1
    assert s.tree.link.held_bytes == 0
    s.check()
    s.release(request, checkpoint=True)
    s.check()


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

    def refresh(self, requests, longest_s):
        self._perhaps()
        return super().refresh(requests, longest_s)

    def exists(self, keys):
        self._perhaps()
        found = super().exists(keys)
        # Says it has what it lost since.
        return found._replace(present=[p or self.rng.random() < 0.05 for p in found.present])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("client", [TierClient, FlakyClient])
def test_random_turns_forks_and_aborts_on_two_servers_and_one_tier(connect, client, seed):
    rng = random.Random(seed)
    share = SHARES[seed % 2]
    refresh = None if share is None else REFRESH
    servers = [
        MiniScheduler(
            220,
            180,
            share=share,
            link=connect(client),
            streaming=seed == 4,
            refresh=refresh,
            near_data=seed > 5,
            again=AgainRule(every_tokens=2) if seed % 4 == 3 else None,
        )
        for _ in range(2)
    ]
    histories = [random_tokens(rng, 40)]
    restored = 0
    for _ in range(60):
        s = rng.choice(servers)
        history = rng.choice(histories)
        if rng.random() < 0.4:
            history = history[: rng.randrange(1, len(history) + 1)]
        prompt = [*history, *random_tokens(rng, rng.randrange(1, 30))][:150]
        request = s.admit(prompt)
        if request is None:
            continue
        restored += request.restored
        s.check()
        going = True
        while going and request.filled < len(prompt):
            going = s.extend(request, rng.randrange(5, 40))
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
            s.tree.link.flush(10)
    for s in servers:
        assert s.tree.link.flush(10)
        assert s.tree.link.held_bytes == 0
        assert not s.tree.has_pending_cache_operations()
        assert s.tree.private_ca == 0
    if client is TierClient and share is not None:
        assert sum(s.tree.refresher.counters["refreshed_turns"] for s in servers) > 0
    if client is TierClient:
        assert restored > 0
