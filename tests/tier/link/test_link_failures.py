"""The link when the tier fails, or it is closed: nothing raises, nothing waits long, and what can
still arrive does.
"""

from __future__ import annotations

import threading

import pytest
from link_harness import BUDGET, LAYOUT, FakeClient, blob_of, fail, hold_the_put_thread, linked
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.errors import TierIntegrityError, TierUnavailableError
from kvtier.tier.client import Blob
from kvtier.tier.link import link as link_module
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink

# ---- failures


def test_puts_wait_for_a_tier_that_is_away_and_arrive_in_order(link, client):
    client.fails = TierUnavailableError("down")
    fail(link, 2)
    blobs = [blob_of(number) for number in range(6)]
    assert link.put(blobs[:3]) == 3
    wait_for(lambda: not link.healthy)
    assert link.put(blobs[3:]) == 3
    assert not link.flush(0.05)
    assert link.held_bytes == 600
    client.fails = None
    assert link.flush(SAFETY_S)
    assert client.stored == blobs
    assert link.held_bytes == 0
    assert link.counters["puts_shed"] == link.counters["puts_given_up"] == 0
    connects = client.connects
    client.fails = TierUnavailableError("gone")
    fail(link, 1)
    client.fails = None
    assert link.submit(lambda _: "got").wait(SAFETY_S)
    assert client.connects == connects + 1, "first of all it connects again"


def test_of_a_tier_that_stays_away_nothing_more_is_held(monkeypatch):
    monkeypatch.setattr(link_module, "HOLD_S", 0.05)
    with linked() as (link, client):
        client.fails = TierUnavailableError("down")
        fail(link, 3)
        assert link.put([blob_of(1)]) == 1
        wait_for(lambda: link.room_bytes == 0)
        assert link.put([blob_of(2)]) == 0
        assert link.held_bytes == 100
        client.fails = None
        assert link.flush(SAFETY_S)
        assert link.put([blob_of(3)]) == 1
        assert link.flush(SAFETY_S)
        assert [blob.key[-1] for blob in client.stored] == [1, 3]


def test_a_put_that_nothing_helps_is_paced_and_does_not_stand_for_the_tier():
    clock = FakeClock()
    with linked(breaker=Breaker(first_s=0.02, longest_s=0.05, clock=clock)) as (link, client):
        client.fails, link.connected = TierUnavailableError("whenever this comes"), True
        client.connect = lambda: None
        assert link.put([blob_of(1)]) == 1
        for attempt, about_s in enumerate((0.02, 0.04, 0.05, 0.05), start=1):
            pause_s = wait_for(link.put_breaker.seconds_to_probe)
            assert 0.75 * about_s <= pause_s <= 1.25 * about_s + 1e-9
            assert client.calls == attempt
            clock.now += pause_s + 1e-6
        assert link.flush(SAFETY_S)
        assert client.calls == link_module.PUT_ATTEMPTS
        assert link.breaker.opened == 0


@pytest.mark.parametrize(
    ("error", "times"), [(TierUnavailableError, 1 << 30), (TierIntegrityError, 2)]
)
def test_a_put_that_fails_is_tried_again_a_few_times_and_holds_up_no_other(
    link, client, error, times
):
    put, failed = client.put, []

    def poisoned(blob, **options):
        if blob.key[-1] == 1 and len(failed) < times:
            failed.append(blob)
            raise error("whenever this comes")
        return put(blob, **options)

    client.put = poisoned
    assert link.put([blob_of(1), blob_of(2)]) == 2
    while client.stored == []:
        assert link.submit(lambda _: "got").wait(SAFETY_S)
        assert link.healthy, "gets go on meanwhile"
    assert link.flush(SAFETY_S)
    tries = min(times, link_module.PUT_ATTEMPTS)
    given_up = tries < times
    assert [blob.key[-1] for blob in client.stored] == ([2] if given_up else [1, 2])
    assert link.counters["puts_given_up"] == given_up
    assert link.counters[f"put_{error.__name__}"] == len(failed) == tries
    assert link.held_bytes == 0


def test_three_failures_open_the_breaker_and_the_rest_is_refused_at_once(caplog):
    """Closing does not wait for the next probe, either."""
    breaker = Breaker(first_s=3600.0, longest_s=3600.0)
    with linked(breaker=breaker) as (link, client):
        client.fails = TierUnavailableError("down")
        fetches = [link.submit(lambda c: c.put(blob_of(1))) for _ in range(20)]
        assert link.flush(SAFETY_S)
        assert all(fetch.result is None for fetch in fetches)
        assert client.connects == 3, "no other call had to wait"
        assert not link.healthy
        assert link.counters == {"get_TierUnavailableError": 3, "refused_while_open": 17}
        assert link.submit(lambda c: c).done
        assert link.put([blob_of(1)]) == 1
        assert client.connects == 3
        link.close()
        assert "left behind" not in caplog.text


def test_a_tier_that_answers_probes_and_nothing_else_costs_one_failure_each_time():
    with linked(breaker=Breaker(first_s=0.01, longest_s=0.01)) as (link, client):
        client.fails, client.connect = TierUnavailableError("down"), lambda: None

        fail(link, 3)
        assert link.breaker.opened == 1
        calls = client.calls
        for times in range(1, 6):
            wait_for(lambda: link.healthy)
            fail(link, 1)
            assert client.calls == calls + times
            assert link.breaker.opened == 1 + times


# ---- bugs


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), SystemExit(1)])
@pytest.mark.parametrize("where", ["work", "needs", "put"])
def test_a_bug_ends_neither_the_thread_nor_the_trust_in_the_tier(link, client, bug, where, caplog):
    def fail(*_):
        raise bug

    if where == "put":
        client.fails, link.connected = bug, True
        link.put([blob_of(1)])
        assert link.flush(SAFETY_S)
        client.fails = None
    else:
        for _ in range(5):
            fetch = link.submit(fail, needs=fail if where == "needs" else None)
            assert fetch.wait(SAFETY_S)
            assert fetch.result is None
    fetch = link.submit(lambda _: "fine")
    assert fetch.wait(SAFETY_S)
    assert fetch.result == "fine"
    link.put([blob_of(2)])
    assert link.flush(SAFETY_S)
    assert client.stored == [blob_of(2)]
    assert link.healthy
    assert link.held_bytes == 0
    what, times = ("put", 1) if where == "put" else ("get", 5)
    assert link.counters[f"{what}_bugs"] == times
    assert "failed unexpectedly" in caplog.text


class NotedBreaker(Breaker):
    """A breaker of which every answer about pauses is noted; no time passes for it."""

    def __init__(self) -> None:
        super().__init__(first_s=0.02, longest_s=0.05, clock=FakeClock())
        self.pauses_s: list[float | None] = []

    def seconds_to_probe(self) -> float | None:
        self.pauses_s.append(super().seconds_to_probe())
        return self.pauses_s[-1]


def test_a_bug_in_probing_is_not_repeated_without_a_pause():
    with linked(breaker=NotedBreaker()) as (link, client):
        client.fails = TierUnavailableError("down")
        fail(link, 3)
        client.fails = ZeroDivisionError("a bug")
        wait_for(lambda: link.counters["probe_bugs"] >= 4)
        # One for each probe.
        assert len(link.breaker.pauses_s) >= 4
        assert all(pause_s >= 0.75 * 0.02 for pause_s in link.breaker.pauses_s)
        client.fails = None
        wait_for(lambda: link.healthy)


def test_payloads_that_were_let_go_of_do_not_hurt_the_accounts(link, client):
    """A blob costs what it cost when it was queued."""
    hold_the_put_thread(link, client)
    buffer = bytearray(200)
    view = memoryview(buffer)
    assert link.put([Blob(bytes(32), LAYOUT, [view])]) == 1
    view.release()
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert link.held_bytes == 0


# ---- closing


def test_closing_ends_what_waits_and_cuts_off_what_is_under_way(caplog):
    with linked(breaker=Breaker(failures=1)) as (link, client):
        hold_the_put_thread(link, client)
        began, go_on = threading.Event(), threading.Event()
        running = link.submit(lambda _: (began.set(), go_on.wait(SAFETY_S)))
        assert began.wait(SAFETY_S)
        waiting = link.submit(lambda _: "never")
        link.put([blob_of(1)])
        close = client.close
        client.close = lambda: (close(), go_on.set())
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
    link.submit(lambda _: (began.set(), go_on.wait(SAFETY_S)))
    assert began.wait(SAFETY_S)
    link.close()
    assert "left behind" in caplog.text
    go_on.set()
    for thread in link._threads:
        thread.join(SAFETY_S)
        assert not thread.is_alive()
