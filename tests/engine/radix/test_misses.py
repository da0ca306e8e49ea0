"""Every token of a prompt was there, came from a tier, or was computed; and of the last it is said
why, if it had been computed before. A served log is in tests/engine/serving/test_served_log.py.
"""

from __future__ import annotations

import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams
from thorough import THOROUGH
from tree_harness import MiniScheduler, run_turn
from tree_requests import Request, context, random_tokens

from kvtier.retention.shares import FixedShare
from kvtier_sglang.radix import gone as gone_module
from kvtier_sglang.radix import misses as misses_module
from kvtier_sglang.radix.gone import Gone
from kvtier_sglang.radix.index import TokenIndex
from kvtier_sglang.radix.misses import REASONS, Account

EXACTLY = {"custom_params": {"kvtier": {"exact": True}}}
FORGET = {"custom_params": {"kvtier": {"forget": True}}}


def scheduler(**settings) -> MiniScheduler:
    """Heads compete, and nothing is taken from behind edits, but looked for."""
    share = FixedShare(0.4)
    s = MiniScheduler(**{"size": 2000, "share": share, "adaptive": True} | settings)
    if s.tree.index is None:
        s.tree.index = TokenIndex()
    return s


def of(request: Request) -> dict:
    account: Account = request.kvtier_account
    assert account.hit + account.restored + account.computed == (
        account.tokens + account.recomputed["retracted"]
    )
    return account.summary()


def evict_all(s: MiniScheduler) -> None:
    s.tree.evict(EvictParams(num_tokens=s.allocator.size))


def test_where_a_prompt_leaves_what_was_evicted_it_is_known_by_borders():
    s = scheduler()
    run_turn(s, context(200), [1])
    evict_all(s)
    request = run_turn(s, [*context(200)[:150], 77, 78, *context(20, seed=2)], [1])
    assert of(request)["recomputed"] == {"evicted": 128}


def test_what_another_tenant_had_is_new():
    s = scheduler()
    run_turn(s, context(200), [1], extra_key="ada", cache_salt="x")
    evict_all(s)
    for asked in ({"extra_key": "ada"}, {"cache_salt": "x"}, {}):
        assert of(run_turn(s, context(200), [1], **asked))["recomputed"] == {}
    asked = {"extra_key": "ada", "cache_salt": "x"}
    assert of(run_turn(s, context(200), [1], **asked))["recomputed"] == {"evicted": 199}


@pytest.mark.parametrize(("reuse", "hit", "edited"), [(None, 96, 180), (24, 96 + 177, 3)])
def test_what_stands_behind_an_edit_is_told_and_where_it_begins(small, reuse, hit, edited):
    s = scheduler(reuse=reuse)
    old = context(300)
    run_turn(s, old, [1, 2])
    request = run_turn(s, [*old[:100], 77, 78, 79, *old[120:], *context(20, seed=5)], [3])
    # The answer before is not in the prompt; three tokens are new before the text, as many are
    # computed again behind them.
    assert of(request)["recomputed"] == {"cut": 4, "edited": edited}
    assert of(request)["hit"] == hit
    assert of(request)["changed_at"] == 100


def test_a_context_that_was_forgotten_was_dropped(small):
    s = scheduler(reuse=24)
    old = context(300)
    run_turn(s, old, [1])
    asked = SamplingParams(**FORGET)
    run_turn(s, [*old[:100], 77, *old[120:], 1, 9], [2], sampling_params=asked)
    request = run_turn(s, [*old, 1, 5], [3])
    # The text from 120 on stands in the new context, and is copied from there.
    assert of(request)["recomputed"] == {"cut": 4, "dropped": 40}


@pytest.mark.parametrize("reason", ["flushed", "weights"])
def test_what_a_flush_took_is_told_from_what_new_weights_did(reason):
    s = scheduler()
    run_turn(s, context(200), [1, 2])
    if reason == "weights":
        s.tree.weights_change()
    s.tree.reset()
    s.allocator.clear()
    request = run_turn(s, [*context(200), 1, 2, 9], [3])
    assert of(request)["recomputed"] == {reason: 202}
    s.tree.reset()
    s.allocator.clear()
    request = run_turn(s, [*context(200), 1, 2, 9, 3, 4], [3])
    assert of(request)["recomputed"] == {"flushed": 204}


# -- sessions --


def session(request: Request) -> str:
    return request.kvtier_account.session


def test_a_session_goes_on_whether_its_context_is_there_or_was_evicted():
    s = scheduler()
    first = run_turn(s, context(200), [1, 2])
    second = run_turn(s, [*context(200), 1, 2, *context(30, seed=1)], [3])
    evict_all(s)
    third = run_turn(s, [*context(200), 1, 2, *context(30, seed=1), 3, 9], [4])
    assert session(first) == session(second) == session(third)


OLD = context(200)


@pytest.mark.parametrize(
    ("prompt", "answer", "next_prompt", "goes_on"),
    [
        (OLD, [40, 41, 42, 43, 44], [*OLD, 44, 7, 7], True),
        (OLD, [1, 2], [77, *OLD[9:], 1, 2, 9, 9], True),
        (OLD, [1, 2], [*OLD[:100], *context(100, seed=7)], False),
        (OLD[:40], [1], [*OLD[:20], *context(40, seed=9)], False),
    ],
    ids=["a template leaves out an answer", "edited", "another half", "short"],
)
def test_a_session_is_known_by_most_of_its_last_prompt(small, prompt, answer, next_prompt, goes_on):
    s = scheduler(reuse=24)
    first, second = run_turn(s, prompt, answer), run_turn(s, next_prompt, [3])
    assert (session(first) == session(second)) == goes_on
    third = run_turn(s, [*next_prompt, 3, 8], [4])
    assert session(second) == session(third)


def test_a_name_that_the_client_gives_counts():
    s = scheduler()
    first = run_turn(s, context(60), [1], session_id="a")
    second = run_turn(s, context(60, seed=9), [1], session_id="a")
    other = run_turn(s, [*context(60), 1, 2], [1], session_id="b")
    assert session(first) == session(second) != session(other)


# -- whatever happens --


class Life:
    """A server's random life, and what has been held of which prefixes, by brute force."""

    def __init__(self, s: MiniScheduler, seed: int) -> None:
        self.s, self.rng = s, random.Random(seed)
        self.held: set[tuple] = set()
        self.texts: list[list[int]] = [[]]
        self.begun: list[Request] = []
        self.ended: list[Request] = []

    def admit(self) -> None:
        base = list(self.rng.choice(self.texts[-12:]))
        if self.rng.random() < 0.3:
            base = base[: self.rng.randrange(len(base) + 1)]
        elif self.rng.random() < 0.3 and len(base) > 60:
            at = self.rng.randrange(20)
            base = [*base[:at], *random_tokens(self.rng, 9), *base[at + self.rng.randrange(9) :]]
        prompt = [*base, *random_tokens(self.rng, self.rng.randrange(1, 60))][:200]
        asked = {}
        if self.rng.random() < 0.1:
            asked["sampling_params"] = SamplingParams(**EXACTLY)
        asked["extra_key"] = self.rng.choice([None, None, None, "tenant"])
        self.begin(Request(prompt, **asked))

    def begin(self, request: Request) -> None:
        before = {
            at
            for at in range(len(request.prompt) - 1)
            if (request.extra_key, *request.prompt[: at + 1]) in self.held
        }
        if self.s.admit_again(request) is None:
            return
        if not hasattr(request, "before"):
            request.spans, request.again, request.reached = [], 0, 0
            self.begun.append(request)
        request.before = before
        self.compute(request)

    def compute(self, request: Request) -> None:
        begin = request.filled
        if not self.s.extend(request, self.rng.randrange(20, 90)):
            self.retract(request)
            return
        stop = min(request.filled, len(request.prompt))
        # Its cached tokens are accounted with the first chunk.
        request.reached = max(request.reached, min(begin, stop))
        request.again += max(0, min(stop, request.reached) - begin)
        new = range(max(begin, request.reached), stop)
        request.spans.append([at in request.before for at in new])
        request.reached = max(request.reached, stop)
        self.s.checkpoint(request)
        request.reached = max(request.reached, min(request.filled, len(request.prompt)))
        self.hold(request)

    def hold(self, request: Request) -> None:
        ids = request.full_untruncated_fill_ids[: request.filled].tolist()
        for stop in range(len(ids), 0, -1):
            if (request.extra_key, *ids[:stop]) in self.held:
                break
            self.held.add((request.extra_key, *ids[:stop]))

    def retract(self, request: Request) -> None:
        self.s.release(request, checkpoint=False)
        self.begin(request)

    def step(self) -> None:
        s, rng = self.s, self.rng
        waiting = [one for one in s.running if one.filled < len(one.prompt)]
        if len(s.running) < 4 and rng.random() < 0.5:
            self.admit()
        elif waiting:
            self.compute(rng.choice(waiting))
        elif s.running:
            request = rng.choice(s.running)
            if rng.random() < 0.05:
                self.retract(request)
            elif rng.random() < 0.5:
                s.decode(request, rng.randrange(3))
            else:
                s.release(request, checkpoint=True)
                self.hold(request)
                self.ended.append(request)
                self.texts.append(request.full_untruncated_fill_ids.tolist())
        elif rng.random() < 0.4:
            if rng.random() < 0.5:
                s.tree.weights_change()
            s.tree.reset()
            s.allocator.clear()


@pytest.mark.parametrize("reuse", [None, 24] if THOROUGH else [24])
def test_of_a_thousand_random_requests_every_token_is_accounted_and_known_by_its_reason(
    small, monkeypatch, reuse
):
    """A brute-force record of all that was computed, to the token, agrees with the accounts of
    every request."""
    monkeypatch.setattr(gone_module, "GRAIN", 1)
    life = Life(scheduler(size=700, reuse=reuse), seed=5)
    checks = 0
    while len(life.ended) < 1000:
        life.step()
        if len(life.ended) // 50 > checks:
            checks += 1
            life.s.check()
    seen = dict.fromkeys(REASONS, 0)
    for request in life.ended:
        told = of(request)
        again = sum(map(sum, request.spans))
        apart = {"retracted", "edited"}
        assert again == sum(n for why, n in told["recomputed"].items() if why not in apart)
        assert told["recomputed"].get("retracted", 0) == request.again
        assert sum(map(len, request.spans)) + request.again == told["computed"]
    for request in life.begun:
        for why, tokens in request.kvtier_account.recomputed.items():
            seen[why] += tokens
    counted = life.s.tree.misses.report()
    assert counted["recomputed"] == seen
    assert counted["computed"] == counted["new"] + sum(seen.values())
    wanted = set(REASONS) - {"lost", "refused", "failed"}
    assert {why for why, tokens in seen.items() if tokens} == wanted


def test_the_oldest_that_is_gone_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(misses_module, "Gone", lambda: Gone(most_borders=8))
    s = scheduler()
    for seed in range(6):
        run_turn(s, context(200, seed=seed), [1])
        evict_all(s)
        assert len(s.tree.misses.gone) <= 8
    found = [of(run_turn(s, context(200, seed=seed), [1]))["recomputed"] for seed in (5, 0)]
    assert found == [{"evicted": 199}, {}]
