"""The breaker: a few failures open it, a probe closes it on probation, a success for good."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st
from waiting import FakeClock

from kvtier.tier.link.breaker import FAILURES, Breaker

FIRST_S, LONGEST_S = 1.0, 8.0


@given(st.lists(st.sampled_from(["failed", "failed", "succeeded", "probed"]), max_size=60))
def test_it_is_open_after_three_failures_in_a_row_and_waits_longer_each_time(steps):
    breaker = Breaker(first_s=FIRST_S, longest_s=LONGEST_S, clock=FakeClock())
    failures, is_open, wait_s, opened = 0, False, FIRST_S, 0
    for step in steps:
        opens = getattr(breaker, step)()
        if step == "succeeded":
            failures, is_open, wait_s = 0, False, FIRST_S
        elif is_open:
            wait_s = min(2 * wait_s, LONGEST_S)
            failures, is_open = FAILURES - 1, step == "failed"
        elif step == "failed":
            failures += 1
            is_open = failures >= 3
            opened += is_open
            assert opens == is_open
        assert breaker.is_open == is_open
        assert breaker.opened == opened
        assert (breaker.seconds_to_probe() is not None) == is_open
        if is_open and step == "failed":
            assert 0.75 * wait_s <= breaker.seconds_to_probe() <= 1.25 * wait_s


def test_a_probe_is_due_after_a_while_and_not_for_all_links_at_once():
    clock, waits = FakeClock(), []
    for _ in range(50):
        breaker = Breaker(failures=1, first_s=1.0, clock=clock)
        breaker.failed()
        waits.append(breaker.seconds_to_probe())
    assert max(waits) - min(waits) > 0.1
    assert breaker.open_s == 0.0
    clock.passes(2.0)
    assert breaker.seconds_to_probe() == 0.0
    breaker.failed()
    breaker.probed()
    breaker.failed()
    assert breaker.open_s == 2.0, "probations do not start it again"


def test_threads_that_fail_at_once_open_it_once():
    breaker, opened = Breaker(failures=20), []

    def fail():
        opened.extend(breaker.failed() for _ in range(50))

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened.count(True) == breaker.opened == 1
