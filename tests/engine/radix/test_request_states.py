"""The states of requests: what they wait for, and what is given back when they are gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.tier.blobs.keys import Scope
from kvtier.tier.link.queues import Fetch
from kvtier.tier.prefetch import Landed
from kvtier_sglang.radix.request_states import RequestStates
from kvtier_sglang.refresh.state import CompactedContext, Refreshing, RefreshWait
from kvtier_sglang.tier.state import KvWait

NEVER = float("inf")


class Held:
    """Something that is given back once."""

    released = 0

    def release(self) -> None:
        self.released += 1


def kv_wait() -> KvWait:
    return KvWait(Fetch(lambda client: None), NEVER, Scope())


def refresh_wait() -> RefreshWait:
    context = CompactedContext([], [], 0, Scope())
    return RefreshWait(Fetch(lambda client: None), NEVER, context)


def test_what_is_pending_is_in_the_order_of_asking_whoever_came_first():
    """Another order on one tensor parallel rank would give a request the answer to another one's
    question."""
    states = RequestStates()
    first, second = states.of("first"), states.of("second")
    second.kv_wait, second.refresh_wait = kv_wait(), refresh_wait()
    first.refresh_wait, first.kv_wait = refresh_wait(), kv_wait()
    asked = [second.kv_wait, second.refresh_wait, first.refresh_wait, first.kv_wait]
    assert [id(one) for one in states.pending] == [id(one) for one in asked]
    second.refresh_wait.resolve(arrived=False)
    first.refresh_wait.resolve(arrived=True)
    assert [id(one) for one in states.pending] == [id(asked[0]), id(asked[3])]
    states.drop("second")
    first.kv_wait.resolve(arrived=True)
    assert states.pending == []
    assert states.are_waiting
    first.stop_waiting()
    assert not states.are_waiting


@pytest.mark.parametrize("is_late", [False, True])
def test_what_arrives_for_a_request_is_given_back_with_it_however_late(is_late):
    states, host, source = RequestStates(), Held(), Held()
    state = states.of("r")
    state.kv_wait, state.refresh_wait = kv_wait(), refresh_wait()
    fetches = [
        (state.kv_wait.fetch, Landed(0, 1, 1, [], host)),
        (state.refresh_wait.fetch, source),
    ]
    for fetch, result in () if is_late else fetches:
        fetch.end(result)
    states.drop("r")
    for fetch, result in fetches if is_late else ():
        fetch.end(result)
    assert (host.released, source.released) == (1, 1)
    assert states == {}
    states.drop("r")
    assert (host.released, source.released) == (1, 1)


def test_while_the_weights_change_nothing_is_fetched_or_spilled_and_a_refresh_goes_on():
    states, source = RequestStates(), Held()
    state = states.of("r")
    state.kv_wait, state.refresh_wait, state.turn = kv_wait(), refresh_wait(), SimpleNamespace()
    state.miss_reason = "lost"
    context = state.refresh_wait.context
    state.refreshing = Refreshing(None, context, source, prompt_tokens=1)
    waits = [state.kv_wait, state.refresh_wait]
    state.weights_change()
    assert all(wait.fetch.cancelled for wait in waits)
    assert (state.kv_wait, state.refresh_wait, state.turn) == (None, None, None)
    assert (state.miss_reason, source.released) == ("lost", 0)
    states.drop("r")
    assert source.released == 1
