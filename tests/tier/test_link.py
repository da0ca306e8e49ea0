"""The link: whatever the tier does, nothing raises, nothing waits long, and the budget holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import (
    TierExhaustedError,
    TierIntegrityError,
    TierProtocolError,
    TierRefusedError,
    TierUnavailableError,
)
from kvtier.tier import link as link_module
from kvtier.tier.blob import record_layout
from kvtier.tier.breaker import Breaker
from kvtier.tier.client import Blob
from kvtier.tier.link import TierLink

PATIENCE_S = 10.0
LAYOUT = record_layout("test")
BUDGET = 1000


def eventually(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.002)


def blob_of(number: int, num_bytes: int = 100) -> Blob:
    return Blob(number.to_bytes(32, "big"), LAYOUT, [bytes(num_bytes)])


class FakeClient:
    """A tier in a test's hands: `gate` lets puts through, `fails` is raised by every call."""

    address = "there:1"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails: BaseException | None = None
        self.connect_fails: BaseException | None = None
        self.stored: list[Blob] = []
        self.known: set[bytes] = set()
        self.calls = self.connects = 0
        self.closed = False

    def connect(self) -> None:
        self.connects += 1
        error = self.connect_fails or self.fails
        if error is not None:
            raise error

    def put(self, blob: Blob, *, replace: bool = False) -> bool:
        self.calls += 1
        assert self.gate.wait(PATIENCE_S) or self.closed
        if self.closed:
            raise TierUnavailableError("cut off")
        if self.fails is not None:
            raise self.fails
        if blob.key in self.known and not replace:
            return False
        self.known.add(blob.key)
        self.stored.append(blob)
        return True

    def close(self) -> None:
        self.closed = True
        self.gate.set()


@contextmanager
def linked(**options: Any) -> Iterator[tuple[TierLink, FakeClient]]:
    client = FakeClient()
    breaker = options.pop("breaker", None) or Breaker(first_s=0.02, longest_s=0.05)
    link = TierLink(client, buffer_bytes=BUDGET, breaker=breaker, **options)
    try:
        yield link, client
    finally:
        link.close()
        assert not any(thread.is_alive() for thread in link._threads)


@pytest.fixture
def both():
    with linked() as both:
        yield both


@pytest.fixture
def link(both):
    return both[0]


@pytest.fixture
def client(both):
    return both[1]


def hold_the_put_thread(link, client):
    """A put under way that does not end until `client.gate` is set."""
    client.gate.clear()
    assert link.put([blob_of(10_000, 1)]) == 1
    eventually(lambda: client.calls == 1)


# ---- what it is for


def test_what_is_put_is_stored_in_order_and_counted(link, client):
    blobs = [blob_of(number) for number in range(5)]
    assert link.put(blobs) == 5
    assert link.flush(PATIENCE_S)
    assert link.put(blobs[:2]) == 2
    assert link.flush(PATIENCE_S)
    assert client.stored == blobs
    assert link.put(blobs[:1], replace=True) == 1
    assert link.flush(PATIENCE_S)
    assert link.counters == {"put": 6, "put_bytes": 600, "put_known": 2, "puts_shed": 0}
    assert link.held_bytes == link.pending == 0
    assert client.connects == 1


def test_a_payload_is_waited_for_in_the_background_before_it_is_read(link, client):
    complete = threading.Event()
    where: list[str] = []

    def ready() -> None:
        assert complete.wait(PATIENCE_S)
        where.append(threading.current_thread().name)

    assert link.put([blob_of(0), blob_of(1)], ready=ready) == 2
    assert link.put([blob_of(2)]) == 1
    time.sleep(0.02)
    assert client.stored == []
    complete.set()
    assert link.flush(PATIENCE_S)
    assert client.stored == [blob_of(number) for number in range(3)]
    assert where == ["kvtier-_putting"] * 2


def test_work_runs_in_the_background_and_its_result_is_there_when_it_is_done(link, client):
    began, go_on = threading.Event(), threading.Event()

    def work(given):
        assert given is client
        began.set()
        go_on.wait(PATIENCE_S)
        return 42

    fetch = link.submit(work)
    assert began.wait(PATIENCE_S)
    assert not fetch.done
    assert not fetch.wait(0.0)
    assert link.pending == 1
    go_on.set()
    assert fetch.wait(PATIENCE_S)
    assert (fetch.done, fetch.result) == (True, 42)


def test_flush_says_whether_it_got_there(link, client):
    hold_the_put_thread(link, client)
    assert not link.flush(0.01)
    client.gate.set()
    assert link.flush(PATIENCE_S)


# ---- what is asked for while it is on its way


def test_what_is_asked_for_goes_first_and_is_waited_for(link, client):
    hold_the_put_thread(link, client)
    blobs = [blob_of(number) for number in range(6)]
    for blob in blobs:
        link.put([blob])
    stored: list[list[Blob]] = []

    def work(_):
        settled_s = link.settle([blobs[2].key, blobs[4].key, blob_of(77).key], PATIENCE_S)
        stored.append(list(client.stored))
        return settled_s

    fetch = link.submit(work)
    eventually(lambda: link.counters["gets_settled"] == 1)
    assert not fetch.done
    client.gate.set()
    assert fetch.wait(PATIENCE_S)
    assert 0.0 < fetch.result < PATIENCE_S
    assert link.flush(PATIENCE_S)
    assert client.stored[1:] == [blobs[i] for i in (2, 4, 0, 1, 3, 5)]
    assert stored[0][:3] == client.stored[:3]


def test_what_belongs_together_keeps_its_order_when_it_goes_first(link, client):
    """A record must not be there before the spans it speaks of."""
    hold_the_put_thread(link, client)
    blobs = [blob_of(number) for number in range(6)]
    for number, blob in enumerate(blobs):
        link.put([blob], group="ours" if number % 2 else f"another's {number}")
    fetch = link.submit(lambda _: link.settle([blobs[5].key], PATIENCE_S))
    eventually(lambda: link.counters["gets_settled"] == 1)
    client.gate.set()
    assert fetch.wait(PATIENCE_S)
    assert link.flush(PATIENCE_S)
    assert client.stored[1:] == [blobs[i] for i in (1, 3, 5, 0, 2, 4)]


def test_what_is_not_on_its_way_is_not_waited_for(link, client):
    hold_the_put_thread(link, client)
    link.put([blob_of(1)])
    assert link.settle([blob_of(2).key], PATIENCE_S) == 0.0
    assert link.settle([], PATIENCE_S) == 0.0
    assert "gets_settled" not in link.counters
    client.gate.set()


def test_waiting_for_what_is_under_way_has_an_end(link, client):
    hold_the_put_thread(link, client)
    assert 0.02 <= link.settle([blob_of(10_000).key], 0.02) < PATIENCE_S
    assert client.stored == []
    client.gate.set()
    assert link.settle([blob_of(10_000).key], PATIENCE_S) < PATIENCE_S
    eventually(lambda: len(client.stored) == 1)


def test_nobody_waits_for_puts_that_wait_for_the_tier():
    with linked(breaker=Breaker(first_s=60.0)) as (link, client):
        client.fails = TierUnavailableError("down")
        fail(link, 3)
        link.put([blob_of(1)])
        assert link.settle([blob_of(1).key], PATIENCE_S) < PATIENCE_S / 2
        assert link.pending == 1


def test_nobody_waits_for_puts_that_pause():
    with linked(breaker=Breaker(first_s=60.0)) as (link, client):
        client.fails, link._connected = TierUnavailableError("only puts"), True
        link.put([blob_of(1)])
        eventually(lambda: link._put_breaker.is_open)
        assert link.healthy
        assert link.settle([blob_of(1).key], PATIENCE_S) < PATIENCE_S / 2


def test_what_is_on_its_way_is_not_sent_twice(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(1), blob_of(2)]) == 2
    assert link.put([blob_of(2), blob_of(1), blob_of(3)]) == 3
    assert link.held_bytes == 301
    assert link.put([blob_of(1)], replace=True) == 1
    assert link.held_bytes == 401
    client.gate.set()
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [1, 2, 3, 1]
    assert link.held_bytes == 0


# ---- cancelling


def test_work_that_is_cancelled_before_it_began_never_begins(link, client):
    go_on = threading.Event()
    first = link.submit(lambda _: go_on.wait(PATIENCE_S))
    ran = []
    second = link.submit(lambda _: ran.append(1))
    second.cancel()
    go_on.set()
    assert first.wait(PATIENCE_S)
    assert second.wait(PATIENCE_S)
    assert (second.result, ran) == (None, [])


@pytest.mark.parametrize("when", ["under way", "done"])
def test_a_result_that_nobody_wants_is_given_back_once(link, client, when):
    began, go_on, unwanted = threading.Event(), threading.Event(), []

    def work(_):
        began.set()
        go_on.wait(PATIENCE_S)
        return "a result"

    fetch = link.submit(work)
    assert began.wait(PATIENCE_S)
    if when == "done":
        go_on.set()
        assert fetch.wait(PATIENCE_S)
    fetch.cancel(unwanted.append)
    go_on.set()
    assert link.flush(PATIENCE_S)
    assert unwanted == ["a result"]


def test_giving_back_may_fail_and_the_thread_goes_on(link, client, caplog):
    began, go_on = threading.Event(), threading.Event()
    fetch = link.submit(lambda _: (began.set(), go_on.wait(PATIENCE_S)))
    assert began.wait(PATIENCE_S)
    fetch.cancel(lambda _: 1 / 0)
    go_on.set()
    assert link.submit(lambda _: "next").wait(PATIENCE_S)
    assert link.counters["get_bugs"] == 1
    assert "could not be given back" in caplog.text


# ---- the budget


def test_puts_beyond_the_budget_are_shed_the_last_ones_first(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(number, 300) for number in range(5)]) == 3
    assert link.held_bytes == 901
    assert link.put([blob_of(9, 2000)]) == 0
    assert link.counters["puts_shed"] == 3
    client.gate.set()
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [0, 1, 2]
    assert link.held_bytes == 0


def test_puts_are_shed_before_gets_and_the_newest_first(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(number, 300) for number in range(3)]) == 3
    assert link.claim(600)
    assert link.counters["puts_shed"] == 2
    assert link.held_bytes == 901
    assert not link.claim(400), "what is under way stays"
    assert link.counters["gets_refused"] == 1
    assert link.put([blob_of(9, 300)]) == 0
    client.gate.set()
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [0]
    link.release(600)
    assert link.held_bytes == 0


def test_a_get_that_could_not_fit_anyway_sheds_nothing(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(1, 300)]) == 1
    assert not link.claim(1000)
    assert not link.claim(1 << 60)
    client.gate.set()
    assert link.flush(PATIENCE_S)
    assert link.counters["puts_shed"] == 0
    assert len(client.stored) == 2


def test_shedding_the_last_put_that_waits_ends_a_flush(link, client):
    hold_the_put_thread(link, client)
    client.gate.set()
    assert link.flush(PATIENCE_S)
    with link._changed:
        assert link.put([blob_of(1, 900)]) == 1
        assert link.claim(500)
    assert link.flush(PATIENCE_S)
    link.release(500)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.integers(1, 600), min_size=1, max_size=4)),
    st.tuples(st.just("claim"), st.integers(1, 1200)),
    st.tuples(st.sampled_from(["release", "gate", "flush"]), st.none()),
    st.tuples(st.just("fail"), st.sampled_from([None, TierExhaustedError, TierUnavailableError])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_whatever_happens_no_more_is_held_than_the_budget_and_all_of_it_comes_back(steps):
    with linked() as (link, client):
        claimed: list[int] = []
        for number, (step, argument) in enumerate(steps):
            if step == "put":
                blobs = [blob_of(100 * number + i, size) for i, size in enumerate(argument)]
                assert 0 <= link.put(blobs) <= len(blobs)
            elif step == "claim":
                if link.claim(argument):
                    claimed.append(argument)
            elif step == "release" and claimed:
                link.release(claimed.pop())
            elif step == "gate":
                client.gate.clear() if client.gate.is_set() else client.gate.set()
            elif step == "fail":
                client.fails = argument("as told") if argument else None
            assert sum(claimed) <= link.held_bytes <= BUDGET
        client.gate.set()
        client.fails = None
        assert link.flush(PATIENCE_S)
        assert link.held_bytes == sum(claimed)


def test_more_fetches_than_may_wait_are_refused_at_once():
    with linked(waiting_fetches=2) as (link, _):
        began, go_on = threading.Event(), threading.Event()
        running = link.submit(lambda _: (began.set(), go_on.wait(PATIENCE_S)))
        assert began.wait(PATIENCE_S)
        waiting = [link.submit(lambda _: "done") for _ in range(2)]
        refused = link.submit(lambda _: "done")
        assert refused.done
        assert refused.result is None
        assert link.counters["gets_refused"] == 1
        go_on.set()
        assert link.flush(PATIENCE_S)
        assert running.done
        assert [fetch.result for fetch in waiting] == ["done", "done"]


# ---- failures


def fail(link, times: int) -> None:
    """Calls that fail, until the breaker opens."""
    for _ in range(times):
        assert link.submit(lambda client: client.put(blob_of(1))).wait(PATIENCE_S)


def test_puts_wait_for_a_tier_that_is_away_and_arrive_in_order(link, client):
    client.fails = TierUnavailableError("down")
    fail(link, 2)
    blobs = [blob_of(number) for number in range(6)]
    assert link.put(blobs[:3]) == 3
    eventually(lambda: not link.healthy)
    assert link.put(blobs[3:]) == 3
    assert not link.flush(0.05)
    assert link.held_bytes == 600
    client.fails = None
    assert link.flush(PATIENCE_S)
    assert client.stored == blobs
    assert link.held_bytes == 0
    assert link.counters["puts_shed"] == link.counters["puts_given_up"] == 0


def test_of_a_tier_that_stays_away_nothing_more_is_held(monkeypatch):
    monkeypatch.setattr(link_module, "HOLD_S", 0.05)
    with linked() as (link, client):
        client.fails = TierUnavailableError("down")
        fail(link, 3)
        assert link.put([blob_of(1)]) == 1
        eventually(lambda: link.room_bytes == 0)
        assert link.put([blob_of(2)]) == 0
        assert link.held_bytes == 100
        client.fails = None
        assert link.flush(PATIENCE_S)
        assert link.put([blob_of(3)]) == 1
        assert link.flush(PATIENCE_S)
        assert [blob.key[-1] for blob in client.stored] == [1, 3]


def test_puts_that_wait_for_the_tier_make_room_for_gets_and_have_their_limit(link, client):
    client.fails = TierUnavailableError("down")
    fail(link, 3)
    assert link.put([blob_of(number, 300) for number in range(4)]) == 3
    assert (link.held_bytes, link.room_bytes) == (900, 100)
    assert link.claim(600)
    assert link.counters["puts_shed"] == 3
    client.fails = None
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored] == [0]
    link.release(600)
    assert link.room_bytes == BUDGET


def test_what_was_damaged_on_its_way_is_sent_again(link, client):
    put, failed = client.put, []

    def damaged_twice(blob, **options):
        if len(failed) < 2:
            failed.append(blob)
            raise TierIntegrityError("other bytes than were sent")
        return put(blob, **options)

    client.put = damaged_twice
    assert link.put([blob_of(1), blob_of(2)]) == 2
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored] == [1, 2]
    assert link.healthy
    assert link.counters["put_TierIntegrityError"] == 2


def test_a_put_that_nothing_helps_is_paced_and_does_not_stand_for_the_tier(link, client):
    client.fails, link._connected = TierUnavailableError("whenever this comes"), True
    client.connect = lambda: None
    began = time.monotonic()
    assert link.put([blob_of(1)]) == 1
    assert link.flush(PATIENCE_S)
    # Four pauses of 0.02, 0.04, 0.05 and 0.05 s, a quarter more or less.
    assert time.monotonic() - began >= 0.75 * 0.16
    assert client.calls == link_module.PUT_ATTEMPTS
    assert link.breaker.opened == 0


def test_a_put_that_nothing_helps_does_not_hold_up_the_others(link, client):
    put = client.put

    def poisoned(blob, **options):
        if blob.key[-1] == 1:
            raise TierUnavailableError("whenever this comes")
        return put(blob, **options)

    client.put = poisoned
    assert link.put([blob_of(1), blob_of(2)]) == 2
    while client.stored == []:
        assert link.submit(lambda _: "got").wait(PATIENCE_S)
        assert link.healthy, "gets go on meanwhile"
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored] == [2]
    assert link.counters["puts_given_up"] == 1
    assert link.counters["put_TierUnavailableError"] == link_module.PUT_ATTEMPTS
    assert link.held_bytes == 0


def test_three_failures_open_the_breaker_and_the_rest_is_refused_at_once():
    with linked(breaker=Breaker(first_s=60.0)) as (link, client):
        client.fails = TierUnavailableError("down")
        fetches = [link.submit(lambda c: c.put(blob_of(1))) for _ in range(20)]
        assert link.flush(PATIENCE_S)
        assert all(fetch.result is None for fetch in fetches)
        assert client.connects == 3, "nobody else had to wait"
        assert not link.healthy
        assert link.counters == {"get_TierUnavailableError": 3, "refused_while_open": 17}
        began = time.monotonic()
        assert link.submit(lambda c: c).done
        assert link.put([blob_of(1)]) == 1
        assert time.monotonic() - began < 0.1
        assert client.connects == 3


def test_the_breaker_closes_by_itself_once_the_tier_is_back(both, caplog):
    link, client = both
    caplog.set_level("INFO")
    client.fails = TierUnavailableError("down")
    fail(link, 3)
    eventually(lambda: link.counters["probe_TierUnavailableError"] >= 3)
    client.fails = None
    eventually(lambda: link.healthy)
    assert link.put([blob_of(7)]) == 1
    assert link.flush(PATIENCE_S)
    assert client.stored[-1].key[-1] == 7
    assert caplog.text.count("serving goes on without the tier") == 1
    assert caplog.text.count("tier there:1 is back") == 1


@pytest.mark.parametrize("error", [TierRefusedError, TierProtocolError])
def test_a_tier_that_says_no_is_told_to_the_operator_as_an_error(both, caplog, error):
    link, client = both
    client.fails = error("no")
    link.put([blob_of(number) for number in range(5)])

    def told() -> list[str]:
        return [one.levelname for one in caplog.records if "serving goes on" in one.getMessage()]

    eventually(lambda: bool(told()))
    assert told() == ["ERROR"]
    assert not link.healthy


@pytest.mark.parametrize(
    ("error", "attempts"), [(TierExhaustedError, 1), (TierIntegrityError, link_module.PUT_ATTEMPTS)]
)
def test_a_tier_that_is_full_or_lost_something_is_still_asked(link, client, error, attempts):
    client.fails = error("full")
    client.connect_fails = None
    link._connected = True
    for number in range(10):
        link.put([blob_of(number)])
    assert link.flush(PATIENCE_S)
    assert link.healthy
    assert client.calls == 10 * attempts
    assert link.counters[f"put_{error.__name__}"] == 10 * attempts


def test_a_tier_that_answers_probes_and_nothing_else_costs_one_failure_each_time():
    with linked(breaker=Breaker(first_s=0.01, longest_s=0.01)) as (link, client):
        client.fails, client.connect = TierUnavailableError("down"), lambda: None

        fail(link, 3)
        assert link.breaker.opened == 1
        calls = client.calls
        for times in range(1, 6):
            eventually(lambda: link.healthy)
            fail(link, 1)
            assert client.calls == calls + times
            assert link.breaker.opened == 1 + times


def test_after_a_failure_it_connects_again_before_anything_else(link, client):
    link.put([blob_of(1)])
    assert link.flush(PATIENCE_S)
    client.fails = TierUnavailableError("gone")
    fail(link, 1)
    client.fails = None
    link.put([blob_of(3)])
    assert link.flush(PATIENCE_S)
    assert client.connects == 2


# ---- bugs


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), SystemExit(1)])
def test_a_bug_in_work_ends_neither_the_thread_nor_the_trust_in_the_tier(link, client, bug, caplog):
    def work(_):
        raise bug

    for _ in range(5):
        fetch = link.submit(work)
        assert fetch.wait(PATIENCE_S)
        assert fetch.result is None
    fetch = link.submit(lambda _: "fine")
    assert fetch.wait(PATIENCE_S)
    assert fetch.result == "fine"
    assert link.healthy
    assert link.counters["get_bugs"] == 5
    assert "failed unexpectedly" in caplog.text


def test_a_bug_in_a_put_loses_that_blob_only(link, client):
    client.fails, link._connected = ZeroDivisionError("a bug"), True
    link.put([blob_of(1)])
    assert link.flush(PATIENCE_S)
    client.fails = None
    link.put([blob_of(2)])
    assert link.flush(PATIENCE_S)
    assert [blob.key[-1] for blob in client.stored] == [2]
    assert link.counters["put_bugs"] == 1
    assert link.held_bytes == 0


def test_a_bug_in_probing_is_not_repeated_without_a_pause(link, client):
    client.fails = TierUnavailableError("down")
    link.put([blob_of(number) for number in range(3)])
    eventually(lambda: not link.healthy)
    client.fails = ZeroDivisionError("a bug")
    eventually(lambda: link.counters["probe_bugs"] >= 1)
    before, began = link.counters["probe_bugs"], time.monotonic()
    eventually(lambda: link.counters["probe_bugs"] >= before + 3)
    assert time.monotonic() - began > 3 * 0.75 * 0.02
    client.fails = None
    eventually(lambda: link.healthy)


def test_payloads_that_were_let_go_of_do_not_hurt_the_accounts(link, client):
    """A blob costs what it cost when it was queued."""
    hold_the_put_thread(link, client)
    buffer = bytearray(200)
    view = memoryview(buffer)
    assert link.put([Blob(bytes(32), LAYOUT, [view])]) == 1
    view.release()
    client.gate.set()
    assert link.flush(PATIENCE_S)
    assert link.held_bytes == 0


# ---- closing


def test_closing_ends_what_waits_and_cuts_off_what_is_under_way(caplog):
    with linked(breaker=Breaker(failures=1)) as (link, client):
        hold_the_put_thread(link, client)
        began, go_on = threading.Event(), threading.Event()
        running = link.submit(lambda _: (began.set(), go_on.wait(PATIENCE_S)))
        assert began.wait(PATIENCE_S)
        waiting = link.submit(lambda _: "never")
        link.put([blob_of(1)])
        threading.Timer(0.05, go_on.set).start()
        link.close()
        assert waiting.done
        assert waiting.result is None
        assert running.done
        assert client.closed
        assert client.stored == []
        assert link.held_bytes == 0
        assert "serving goes on" not in caplog.text, "it is our doing"
        assert link.submit(lambda _: 1).done
        assert link.put([blob_of(2)]) == 0
        assert not link.claim(BUDGET + 1)
        assert link.flush(0.0)
        link.close()


def test_closing_never_hangs_on_work_that_does(monkeypatch, caplog):
    monkeypatch.setattr(link_module, "CLOSE_S", 0.05)
    client = FakeClient()
    link = TierLink(client, buffer_bytes=BUDGET)
    began, go_on = threading.Event(), threading.Event()
    link.submit(lambda _: (began.set(), go_on.wait(PATIENCE_S)))
    assert began.wait(PATIENCE_S)
    since = time.monotonic()
    link.close()
    assert time.monotonic() - since < 1.0
    assert "left behind" in caplog.text
    go_on.set()
    for thread in link._threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_closing_while_the_breaker_is_open_does_not_wait_for_a_probe():
    with linked(breaker=Breaker(first_s=60.0)) as (link, client):
        client.fails = TierUnavailableError("down")
        fail(link, 3)
        link.put([blob_of(1)])
        since = time.monotonic()
        link.close()
        assert time.monotonic() - since < 1.0


def test_counters_are_exact_however_many_threads_count():
    with linked(breaker=Breaker(failures=1 << 30)) as (link, client):
        client.fails, link._connected = TierExhaustedError("full"), True

        def scheduler(first: int) -> None:
            for number in range(first, first + 200):
                link.put([blob_of(number, 1)])
                link.claim(1 << 30)

        threads = [threading.Thread(target=scheduler, args=[1000 * i]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert link.flush(PATIENCE_S)
        assert link.counters["gets_refused"] == 800
        assert link.counters["put_TierExhaustedError"] + link.counters["puts_shed"] == 800
