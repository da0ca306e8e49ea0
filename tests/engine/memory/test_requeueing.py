"""Requests between two starts: a memory did not answer them, and they are not queued yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier_sglang.memory.requeueing import Requeueing


class Scheduler:
    """Queues requests, and aborts those that are queued."""

    def __init__(self) -> None:
        self.waiting_queue: list[SimpleNamespace] = []

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
    passed = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False), is_empty=lambda: True
    )
    scheduler.enable_overlap, scheduler.last_batch, scheduler.running_batch = True, None, passed
    requeueing.process(lambda *args: None, scheduler, passed, None)
    assert sorted([*aborted, *(req.rid for req in scheduler.waiting_queue)]) == ["a", "b", "c"]
    assert not any(req.stream for req in requests)
