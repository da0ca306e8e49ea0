"""Requests between two starts: a memory did not answer them, and they are not queued yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier_sglang.memory.requeueing import Requeueing


def batch(reqs: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=reqs,
        forward_mode=SimpleNamespace(is_extend=lambda: bool(reqs)),
        is_empty=lambda: not reqs,
    )


class Scheduler:
    """Queues requests, and aborts those that are queued."""

    enable_overlap = True

    def __init__(self, in_flight: int = 0) -> None:
        self.waiting_queue: list[SimpleNamespace] = []
        self.last_batch, self.running_batch = None, batch([])
        self.result_queue = [(batch([]), None)] * in_flight

    def _add_request_to_queue(self, req: SimpleNamespace, is_retracted: bool) -> None:
        assert is_retracted
        self.waiting_queue.append(req)


def leaving(requeueing: Requeueing, *rids: str) -> list[SimpleNamespace]:
    """Requests that are retracted, as a pass leaves them where passes overlap."""
    requests = [
        SimpleNamespace(
            rid=rid, stream=False, sampling_params=SimpleNamespace(stream_interval=None)
        )
        for rid in rids
    ]
    for req in requests:
        requeueing._silence(req)
    requeueing._leaving = list(requests)
    return requests


@pytest.mark.parametrize(
    ("asked", "aborted"),
    [(("b", False), ["b"]), (("", True), ["a", "b", "c"]), (("x", False), [])],
)
def test_a_request_that_is_about_to_begin_again_can_be_aborted(asked, aborted):
    """It is queued at once, where the abort finds it, and is not queued a second time."""
    requeueing, scheduler = Requeueing(None, None), Scheduler()
    requests = leaving(requeueing, "a", "b", "c")
    rid, everything = asked
    requeueing.abort(scheduler, SimpleNamespace(rid=rid, abort_all=everything))
    assert [req.rid for req in scheduler.waiting_queue] == aborted
    assert [req.stream for req in requests] == [req.rid not in aborted for req in requests]
    scheduler.waiting_queue.clear()
    requeueing.process(lambda *args: None, scheduler, batch([]), None)
    assert sorted([*aborted, *(req.rid for req in scheduler.waiting_queue)]) == ["a", "b", "c"]
    assert not any(req.stream for req in requests)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_request_begins_again_at_once_where_no_pass_is_in_flight(monkeypatch, in_flight):
    """Else after that pass, which it may be in."""
    monkeypatch.setattr(Requeueing, "_not_answered", lambda self, batch, result: batch.reqs)
    monkeypatch.setattr(Requeueing, "_retract", lambda self, scheduler, req: None)
    requeueing, scheduler = Requeueing(None, None), Scheduler(in_flight)
    requests = leaving(requeueing, "a")
    requeueing._leaving = []
    requeueing.process(lambda *args: None, scheduler, batch(requests), None)
    assert scheduler.waiting_queue == requests[in_flight:]
    scheduler.result_queue.clear()
    requeueing.process(lambda *args: None, scheduler, batch([]), None)
    assert scheduler.waiting_queue == requests
