"""Requests as SGLang makes and queues them: their memory and their room depend on what they ask for
of their prompt, which SGLang says between the two."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from tree_harness import MEMORY_KEY, MiniScheduler

from kvtier_sglang import hooks
from kvtier_sglang.memory import hooks as memory_hooks
from kvtier_sglang.memory.hooks import RequestHooks
from kvtier_sglang.tier.scopes import without_memory

PREFIX, OWN = list(range(20)), [7, 8, 9]
SIZE = 64


class Bank:
    """A bank of one memory."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.memory = SimpleNamespace(prefix_ids=tuple(PREFIX), digest="0" * 16)

    def __len__(self) -> int:
        return 1

    def of_prompt(self, ids: array) -> SimpleNamespace | None:
        return self.memory if list(ids[: len(PREFIX)]) == PREFIX else None


@pytest.fixture
def asked(monkeypatch):
    """The hooks of a scheduler, and the scheduler that they see."""
    monkeypatch.setattr(memory_hooks, "cache_is_ours", lambda: True)
    on_requests = RequestHooks(lambda: SimpleNamespace(bank=Bank()), hooks.fit_exact)
    s = MiniScheduler(size=SIZE, packs=False, memory=PREFIX)
    scheduler = SimpleNamespace(tree_cache=s.tree, token_to_kv_pool_allocator=s.allocator)
    return on_requests, scheduler


@pytest.fixture
def refused(monkeypatch) -> list[str]:
    """The words with which requests are aborted."""
    said: list[str] = []
    monkeypatch.setattr(Req, "set_finish_with_abort", lambda self, text: said.append(text))
    return said


def arrive(asked, prompt: list[int], logprob_start_len: int | None, custom: Any = None) -> Req:
    """A request from SGLang's constructor to its queue. logprob_start_len: from where on it wants
    log-probabilities of its prompt; None: those of its answer alone. custom: its own parameters."""
    on_requests, scheduler = asked
    params = SamplingParams(max_new_tokens=4, custom_params=custom)
    req = Req("r", "", array("q", prompt), params, return_logprob=True)
    on_requests.scope_request(None, req)
    req.logprob_start_len = len(prompt) if logprob_start_len is None else logprob_start_len
    on_requests.queue_request(scheduler, req)
    return req


@pytest.mark.parametrize(
    ("start", "key"), [(None, MEMORY_KEY), (len(PREFIX), MEMORY_KEY), (len(PREFIX) - 1, None)]
)
def test_a_memory_answers_who_wants_no_log_probabilities_of_its_prefix(asked, start, key):
    req = arrive(asked, [*PREFIX, *OWN], start)
    assert req.extra_key == key
    # It begins again with the exact prefix.
    req.extra_key = without_memory(req.extra_key)
    on_requests, scheduler = asked
    on_requests.queue_request(scheduler, req)
    assert req.extra_key is None


@pytest.mark.parametrize(("start", "fits"), [(None, True), (SIZE, False)])
def test_a_prompt_longer_than_the_pool_is_refused_who_wants_log_probabilities_of_it(
    asked, refused, start, fits
):
    req = arrive(asked, list(range(100, 110 + SIZE)), start)
    assert (not refused) == fits
    assert req.sampling_params.max_new_tokens == 4
    assert hooks.wants_exact(req) != fits


@pytest.mark.parametrize("custom", ["exact", [1], {"kvtier": {"x": True}}])
def test_what_cannot_be_asked_for_ends_the_request_and_not_the_scheduler(asked, refused, custom):
    req = arrive(asked, OWN, None, custom)
    assert refused
    assert refused[0].startswith("custom_params")
    # Others ask it again until it is gone.
    assert not hooks.wants_exact(req)
