"""Two lanes: every job runs once, an error ends them both, and closing takes only the help away."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from waiting import SAFETY_S, be_slow

from kvtier.tier.transport.shared import Lanes


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes()
    yield lanes
    lanes.close()


@pytest.mark.parametrize("other", ["free", "busy", "closed"])
def test_every_job_runs_once_whatever_the_other_thread_does(lanes: Lanes, other: str) -> None:
    free, ran, threads = threading.Event(), [], []
    if other == "busy":
        lanes.later(lambda: free.wait(SAFETY_S))
    elif other == "closed":
        lanes.close()
        lanes.later(lambda: ran.append(-1))
    lanes.run([lambda i=i: ran.append(i) for i in range(1000)])
    assert sorted(ran) == list(range(1000))
    lanes.run([lambda: threads.append(threading.get_ident())])
    assert threads == [threading.get_ident()], "the caller takes part"
    free.set()


def test_an_error_in_either_lane_is_raised_when_nothing_runs_any_more(lanes: Lanes) -> None:
    both, running, ran = threading.Barrier(2, timeout=SAFETY_S), threading.Event(), []

    def fail() -> None:
        both.wait()
        raise ValueError("bad")

    def slow() -> None:
        both.wait()
        running.set()
        be_slow(0.05)
        running.clear()

    for jobs in ([fail, slow], [slow, fail]):
        with pytest.raises(ValueError, match="bad"):
            lanes.run([*jobs, *[lambda: ran.append(1)] * 100])
        assert not running.is_set()
    # The lane that did not fail may have begun one more each time.
    assert len(ran) <= 2
