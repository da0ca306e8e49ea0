"""The link as long as the tier is well: what goes when, what waits for what, and cancelling."""

from __future__ import annotations

import threading

import pytest
from link_harness import blob_of, hold_the_put_thread, linked
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.link import link as link_module
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.queues import Fetch

# ---- what it is for


def test_what_is_put_is_stored_in_order_and_counted(link, client):
    blobs = [blob_of(number) for number in range(5)]
    assert link.put(blobs) == 5
    assert link.flush(SAFETY_S)
    assert link.put(blobs[:2]) == 2
    assert link.flush(SAFETY_S)
    assert client.stored == blobs
    assert link.put(blobs[:1], replace=True) == 1
    assert link.flush(SAFETY_S)
    assert link.counters == {"put": 6, "put_bytes": 600, "put_known": 2, "puts_shed": 0}
    assert link.held_bytes == link.pending == 0
    assert client.connects == 1


def test_a_payload_is_waited_for_in_the_background_before_it_is_read(link, client):
    """One that does not become complete is not stored."""
    asked, complete = threading.Event(), threading.Event()
    where: list[str] = []

    def ready(asking: object) -> bool:
        assert asking is client
        asked.set()
        assert complete.wait(SAFETY_S)
        where.append(threading.current_thread().name)
        return True

    assert link.put([blob_of(0), blob_of(1)], ready=ready) == 2
    assert link.put([blob_of(2)], ready=lambda asking: False) == 1
    assert link.put([blob_of(3)]) == 1
    assert asked.wait(SAFETY_S)
    assert client.stored == []
    complete.set()
    assert link.flush(SAFETY_S)
    assert client.stored == [blob_of(number) for number in (0, 1, 3)]
    assert where == ["kvtier-putting"] * 2
    assert link.counters["puts_incomplete"] == 1
    assert link.held_bytes == link.pending == 0


# ---- what is asked for while it is on its way


@pytest.fixture
def patient(monkeypatch):
    """No get stops waiting for puts before a test does."""
    monkeypatch.setattr(link_module, "SETTLE_S", 100 * SAFETY_S)


def asking(link, *numbers: int) -> Fetch[int]:
    """A get that needs these blobs; how many puts were over when it began."""
    return link.submit(
        lambda client: len(client.stored), needs=lambda: [blob_of(n).key for n in numbers]
    )


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("asked", "options", "order"),
    [
        ((2, 4, 77), lambda number: {}, (2, 4, 0, 1, 3, 5)),
        # A record follows the spans it speaks of: the order of a group is kept.
        ((5,), lambda number: {"group": number % 2 or f"another's {number}"}, (1, 3, 5, 0, 2, 4)),
        # A turn's first span begins in the turn before, and that one's in the one before it.
        ((5,), lambda number: {"reads": {blob_of(number - 2).key}}, (1, 3, 5, 0, 2, 4)),
    ],
    ids=["asked for", "group", "reads"],
)
def test_what_is_asked_for_goes_first_with_what_it_needs_and_is_waited_for(
    link, client, asked, options, order
):
    hold_the_put_thread(link, client)
    blobs = [blob_of(number) for number in range(2, 8)]
    for number, blob in enumerate(blobs, start=2):
        link.put([blob], **options(number))
    fetch = asking(link, *(number + 2 for number in asked))
    wait_for(lambda: link.counters["gets_settled"] == 1)
    assert not fetch.done
    assert link.pending == 8
    client.gate.set()
    assert fetch.wait(SAFETY_S)
    assert fetch.result >= 3
    assert link.flush(SAFETY_S)
    assert client.stored[1:] == [blobs[i] for i in order]


@pytest.mark.usefixtures("patient")
def test_a_get_that_waits_for_puts_holds_no_other_up(link, client):
    """A link whose puts are never done still answers those who need none of them."""
    hold_the_put_thread(link, client)
    link.put([blob_of(number) for number in range(3)])
    held = [asking(link, number) for number in range(3)]
    others = [asking(link, 7), asking(link), link.submit(lambda client: len(client.stored))]
    for fetch in others:
        assert fetch.wait(SAFETY_S)
        assert fetch.result == 0
    assert not any(fetch.done for fetch in held)
    assert link.counters["gets_settled"] == 3
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert all(fetch.result for fetch in held)


def test_waiting_for_what_is_under_way_has_an_end(link, client, monkeypatch):
    monkeypatch.setattr(link_module, "SETTLE_S", 0.02)
    hold_the_put_thread(link, client)
    clock = FakeClock()
    monkeypatch.setattr(link_module, "time", clock)

    def needs() -> list[bytes]:
        clock.now += 7  # while it waits for its turn
        return [blob_of(10_000).key]

    def work(client) -> int:
        clock.now += 5
        return len(client.stored)

    fetch = link.submit(work, needs=needs)
    assert fetch.wait(SAFETY_S)
    assert fetch.result == 0
    assert link.counters["gets_settled"] == 1
    assert fetch.took_s == 5
    client.gate.set()


@pytest.mark.usefixtures("patient")
def test_who_waits_for_puts_and_loses_interest_never_begins(link, client):
    hold_the_put_thread(link, client)
    began = []
    fetch = link.submit(began.append, needs=lambda: [blob_of(10_000).key])
    wait_for(lambda: link.counters["gets_settled"] == 1)
    fetch.cancel()
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert fetch.done
    assert began == []


@pytest.mark.usefixtures("patient")
def test_no_get_waits_for_puts_that_wait_for_the_tier_or_pause():
    with linked() as (link, client):
        hold_the_put_thread(link, client)
        fetch = asking(link, 10_000)
        wait_for(lambda: link.counters["gets_settled"] == 1)
        for _ in range(3):
            link.breaker.failed()
        link.put([blob_of(1)])
        assert fetch.wait(SAFETY_S), "the breaker opened while it waited"
        client.gate.set()
    with linked(breaker=Breaker(first_s=60.0)) as (link, client):
        client.fails, link.connected = TierUnavailableError("only puts"), True
        link.put([blob_of(1)])
        wait_for(lambda: link.put_breaker.is_open)
        assert link.healthy
        client.fails = None
        assert asking(link, 1).wait(SAFETY_S)
        assert link.counters["gets_settled"] == 0


def test_what_is_on_its_way_is_not_sent_twice(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(1), blob_of(2)]) == 2
    assert link.put([blob_of(2), blob_of(1), blob_of(3)]) == 3
    assert link.held_bytes == 301
    assert link.put([blob_of(1)], replace=True) == 1
    assert link.held_bytes == 401
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [1, 2, 3, 1]
    assert link.held_bytes == 0


# ---- cancelling


def test_work_that_is_cancelled_before_it_began_never_begins(link, client):
    go_on = threading.Event()
    first = link.submit(lambda _: go_on.wait(SAFETY_S))
    ran = []
    second = link.submit(lambda _: ran.append(1))
    second.cancel()
    go_on.set()
    assert first.wait(SAFETY_S)
    assert second.wait(SAFETY_S)
    assert (second.result, ran) == (None, [])


@pytest.mark.parametrize("when", ["under way", "done"])
def test_a_result_that_is_no_longer_wanted_is_given_back_once(link, client, when, caplog):
    """Giving back may fail, and the thread goes on."""
    began, go_on, unwanted = threading.Event(), threading.Event(), []

    def work(_):
        began.set()
        go_on.wait(SAFETY_S)
        return "a result"

    def give_back(result):
        unwanted.append(result)
        if when == "under way":
            raise ZeroDivisionError("a bug")

    fetch = link.submit(work)
    assert began.wait(SAFETY_S)
    if when == "done":
        go_on.set()
        assert fetch.wait(SAFETY_S)
    fetch.cancel(give_back)
    go_on.set()
    assert link.submit(lambda _: "next").wait(SAFETY_S)
    assert link.flush(SAFETY_S)
    assert unwanted == ["a result"]
    assert link.counters["get_bugs"] == (when == "under way")
    assert ("could not be given back" in caplog.text) == (when == "under way")
