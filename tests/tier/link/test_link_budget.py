"""The budget of host memory that both directions of a link share, and how many gets may wait."""

from __future__ import annotations

import errno
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_harness import BUDGET, blob_of, hold_the_put_thread, linked
from waiting import SAFETY_S

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier import prefetch
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.link import link as link_module


def test_the_last_puts_are_shed_first_and_all_before_a_get(link, client):
    hold_the_put_thread(link, client)
    assert link.put([blob_of(number, 300) for number in range(5)]) == 3
    assert link.put([blob_of(9, 2000)]) == 0
    assert (link.held_bytes, link.counters["puts_shed"]) == (901, 3)
    for too_much in (1000, 1 << 60):
        assert not link.claim(too_much), "what is under way stays"
    assert link.counters["puts_shed"] == 3, "what could not fit anyway sheds nothing"
    assert link.claim(600)
    assert (link.held_bytes, link.counters["puts_shed"]) == (901, 5)
    assert not link.claim(400)
    assert link.counters["gets_refused"] == 3
    assert link.put([blob_of(9, 300)]) == 0
    client.gate.set()
    assert link.flush(SAFETY_S)
    assert [blob.key[-1] for blob in client.stored[1:]] == [0]
    link.release(600)
    assert link.held_bytes == 0


def test_shedding_the_last_put_that_waits_ends_a_flush(link, client):
    hold_the_put_thread(link, client)
    client.gate.set()
    assert link.flush(SAFETY_S)
    with link._changed:
        assert link.put([blob_of(1, 900)]) == 1
        assert link.claim(500)
    assert link.flush(SAFETY_S)
    link.release(500)


def test_spans_that_there_is_no_host_memory_for_hold_nothing_of_the_budget(
    link, client, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(prefetch.mmap, "mmap", full)
    layouts = prefetch.Layouts(SpanLayout("float32", 1, 4, 1, 4))
    with pytest.raises(OSError, match="allocate"):
        prefetch.fetch_spans(client, link, [SpanName(bytes(32), 0, 4)], layouts)
    assert link.held_bytes == 0


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


def test_more_fetches_than_may_wait_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(link_module, "WAITING_FETCHES", 2)
    with linked() as (link, _):
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
