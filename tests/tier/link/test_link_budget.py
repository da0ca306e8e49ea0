"""The budget of host memory that both directions of a link share, and how many gets may wait."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from link_harness import BUDGET, blob_of, hold_the_put_thread, linked
from waiting import SAFETY_S

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.link.breaker import Breaker


def test_puts_beyond_the_budget_are_shed_the_last_ones_first(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(number, 300) for number in range(5)]) == 3
    assert link.held_bytes == 901
    assert link.put([blob_of(9, 2000)]) == 0
    assert link.counters["puts_shed"] == 3
    client.gate.set()
    assert link.flush(SAFETY_S)
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
    assert link.flush(SAFETY_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [0]
    link.release(600)
    assert link.held_bytes == 0


def test_a_get_that_could_not_fit_anyway_sheds_nothing(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(1, 300)]) == 1
    assert not link.claim(1000)
    assert not link.claim(1 << 60)
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert link.counters["puts_shed"] == 0
    assert len(client.stored) == 2


def test_shedding_the_last_put_that_waits_ends_a_flush(link, client):
    hold_the_put_thread(link, client)
    client.gate.set()
    assert link.flush(SAFETY_S)
    with link._changed:
        assert link.put([blob_of(1, 900)]) == 1
        assert link.claim(500)
    assert link.flush(SAFETY_S)
    link.release(500)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.integers(1, 600), min_size=1, max_size=4)),
    st.tuples(st.just("claim"), st.integers(1, 1200)),
    st.tuples(st.sampled_from(["release", "gate", "flush"]), st.none()),
    st.tuples(st.just("fail"), st.sampled_from([None, TierExhaustedError, TierUnavailableError])),
)


@settings(max_examples=60)
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
        assert link.flush(SAFETY_S)
        assert link.held_bytes == sum(claimed)


def test_more_fetches_than_may_wait_are_refused_at_once():
    with linked(waiting_fetches=2) as (link, _):
        began, go_on = threading.Event(), threading.Event()
        running = link.submit(lambda _: (began.set(), go_on.wait(SAFETY_S)))
        assert began.wait(SAFETY_S)
        waiting = [link.submit(lambda _: "done") for _ in range(2)]
        refused = link.submit(lambda _: "done")
        assert refused.done
        assert refused.result is None
        assert link.counters["gets_refused"] == 1
        go_on.set()
        assert link.flush(SAFETY_S)
        assert running.done
        assert [fetch.result for fetch in waiting] == ["done", "done"]


def test_counters_are_exact_however_many_threads_count():
    with linked(breaker=Breaker(failures=1 << 30)) as (link, client):
        client.fails, link._calls.connected = TierExhaustedError("full"), True

        def scheduler(first: int) -> None:
            for number in range(first, first + 200):
                link.put([blob_of(number, 1)])
                link.claim(1 << 30)

        threads = [threading.Thread(target=scheduler, args=[1000 * i]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert link.flush(SAFETY_S)
        assert link.counters["gets_refused"] == 800
        assert link.counters["put_TierExhaustedError"] + link.counters["puts_shed"] == 800
