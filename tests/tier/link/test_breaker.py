"""The breaker: a few failures open it, a probe closes it on probation, a success for good."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import FakeClock

from kvtier.tier.link.breaker import FAILURES, Breaker


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return Breaker(first_s=1.0, longest_s=8.0, clock=clock)


def open_it(breaker):
    while not breaker.failed():
        assert not breaker.is_open


def test_it_opens_after_a_few_failures_in_a_row_and_three_are_enough(breaker):
    assert FAILURES <= 3
    for _ in range(5):
        assert not breaker.failed()
        assert not breaker.failed()
        breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.failed()
    assert not breaker.is_open
    assert breaker.seconds_to_probe() is None
    assert breaker.failed()
    assert breaker.is_open
    assert breaker.opened == 1


def test_a_probe_is_due_after_a_while_and_not_for_all_links_at_once(clock):
    waits = []
    for _ in range(50):
        breaker = Breaker(first_s=1.0, clock=clock)
        open_it(breaker)
        waits.append(breaker.seconds_to_probe())
    assert all(0.75 <= wait <= 1.25 for wait in waits)
    assert max(waits) - min(waits) > 0.1
    clock.now += 2.0
    assert breaker.seconds_to_probe() == 0.0


def test_every_failed_probe_waits_longer_up_to_a_limit(breaker, clock):
    open_it(breaker)
    for wanted in (2.0, 4.0, 8.0, 8.0, 8.0):
        clock.now += breaker.seconds_to_probe()
        assert not breaker.failed()
        assert 0.75 * wanted <= breaker.seconds_to_probe() <= 1.25 * wanted
    assert breaker.opened == 1


def test_after_a_probe_one_failure_opens_it_again_and_waits_longer(breaker):
    open_it(breaker)
    for wanted in (2.0, 4.0, 8.0, 8.0):
        breaker.probed()
        assert not breaker.is_open
        assert breaker.failed()
        assert 0.75 * wanted <= breaker.seconds_to_probe() <= 1.25 * wanted


def test_after_a_success_everything_is_as_at_first(breaker):
    open_it(breaker)
    breaker.failed()
    breaker.probed()
    breaker.succeeded()
    open_it(breaker)
    assert breaker.seconds_to_probe() <= 1.25
    assert breaker.opened == 2


@given(st.lists(st.sampled_from(["failed", "succeeded", "probed"]), max_size=60))
def test_whatever_happens_it_never_takes_more_than_the_limit_to_open(steps):
    breaker, in_a_row = Breaker(clock=FakeClock()), 0
    for step in steps:
        was_open = breaker.is_open
        getattr(breaker, step)()
        in_a_row = in_a_row + 1 if step == "failed" else 0
        if in_a_row >= FAILURES:
            assert breaker.is_open
        if step != "failed":
            assert not breaker.is_open
        elif was_open:
            assert breaker.is_open
        assert (breaker.seconds_to_probe() is not None) == breaker.is_open


def test_threads_that_fail_at_once_open_it_once():
    breaker = Breaker(failures=20)
    opened = []

    def fail():
        for _ in range(50):
            opened.append(breaker.failed())

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened.count(True) == breaker.opened == 1
