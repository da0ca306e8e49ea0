"""The status page over HTTP: who may see it, what it costs the scheduler, and what it says."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.utils.auth import add_api_key_middleware
from tiered_tree_harness import REFRESH, two_turns
from tree_harness import MiniScheduler, run_turn
from tree_requests import context
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.status import routes
from kvtier_sglang.status.page import Server, render
from kvtier_sglang.status.routes import Asker, mount
from kvtier_sglang.status.state import answer, status_of

PATHS = ["/kvtier/status", "/kvtier/status.json"]


class Manager:
    """SGLang's tokenizer manager, as far as it asks schedulers; its communicator is SGLang's.

    replies: whether the scheduler answers by itself.
    """

    def __init__(self, cache, *, replies: bool = True) -> None:
        self.server_args = SimpleNamespace(served_model_name="<a model>", model_path="path")
        self.asked: list[GetInternalStateReq] = []
        self.replies = replies
        self._controller = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=cache))
        self.get_internal_state_communicator = FanOutCommunicator(self._send, 1)

    def auto_create_handle_loop(self) -> None:
        pass

    def _send(self, request: GetInternalStateReq) -> None:
        self.asked.append(request)
        if self.replies:
            asyncio.get_running_loop().call_soon(self.reply, request)

    def reply(self, request: GetInternalStateReq) -> None:
        self.get_internal_state_communicator.handle_recv(
            answer(the_server_state, self._controller, request)
        )


def the_server_state(controller, request) -> GetInternalStateReqOutput:
    return GetInternalStateReqOutput(internal_state={"api_key": "secret"})


@pytest.fixture
def cache():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2])
    run_turn(s, context(60, seed=1), [1, 2])
    return s.tree


def get(manager: Manager, path: str, key: str | None = None, **keys: str | None) -> httpx.Response:
    app = FastAPI()
    mount(app, lambda: manager)
    if any(keys.values()):
        add_api_key_middleware(
            app, api_key=keys.get("api_key"), admin_api_key=keys.get("admin_api_key")
        )

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return await client.get(path, headers=headers)

    return asyncio.run(asked())


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("keys", "key", "status"),
    [
        ({}, None, 200),
        ({"api_key": "user"}, None, 401),
        ({"api_key": "user"}, "user", 200),
        ({"admin_api_key": "admin"}, None, 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "user", 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "admin", 200),
    ],
)
def test_the_page_wants_the_key_that_management_endpoints_want(cache, path, keys, key, status):
    manager = Manager(cache)
    assert get(manager, path, key, **keys).status_code == status
    assert len(manager.asked) == (status == 200)


def test_the_page_loads_nothing_and_runs_nothing(cache):
    answered = get(Manager(cache), "/kvtier/status")
    policy = answered.headers["Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert answered.headers["Cache-Control"] == "no-store"
    for forbidden in ("<script", "src=", "href=", "url(", "@import", "http:", "https:"):
        assert forbidden not in answered.text
    assert "&lt;a model&gt;" in answered.text
    assert "<a model>" not in answered.text


def test_as_many_sessions_are_told_as_asked_for_and_never_more_than_there_are_places(cache):
    for asked, told in (("", 2), ("?sessions=1", 1), ("?sessions=0", 0)):
        found = get(Manager(cache), f"/kvtier/status.json{asked}").json()
        assert len(found["replicas"][0]["sessions"]["rows"]) == told
        assert found["replicas"][0]["sessions"]["seen"] == 2
    for wrong in ("-1", "201", "many"):
        assert get(Manager(cache), f"/kvtier/status.json?sessions={wrong}").status_code == 422


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "old"])
def test_however_many_ask_the_scheduler_is_asked_once_until_its_answer_is_old(
    cache, monkeypatch, fresh
):
    manager = Manager(cache)
    if not fresh:
        monkeypatch.setattr(routes, "FRESH_S", 0.0)

    async def all_at_once() -> None:
        asker = Asker(lambda: manager)
        await asyncio.gather(*(asker.ask() for _ in range(50)))
        await asker.ask()

    asyncio.run(all_at_once())
    assert len(manager.asked) == (1 if fresh else 2)


def test_a_late_scheduler_is_waited_for_in_the_background_and_its_answer_is_not_lost(cache):
    """A late answer must not be taken for that to SGLang's own next question."""
    manager = Manager(cache, replies=False)

    async def impatient() -> None:
        asker = Asker(lambda: manager, patience_s=0.05)
        for _ in range(2):
            with pytest.raises(HTTPException) as caught:
                await asker.ask()
            assert caught.value.status_code == 503
        assert len(manager.asked) == 1
        own = asyncio.create_task(manager.get_internal_state_communicator(GetInternalStateReq()))
        await asyncio.sleep(0)
        assert len(manager.asked) == 1
        manager.reply(manager.asked[0])
        asker._patience_s = SAFETY_S
        (replica,) = await asker.ask()
        assert replica["sessions"]["seen"] == 2
        while len(manager.asked) == 1:
            await asyncio.sleep(0)
        manager.reply(manager.asked[1])
        (told,) = await own
        assert told.internal_state == {"api_key": "secret"}

    asyncio.run(impatient())


# -- the page --

SERVER = Server("a-model", "2026-11-26 12:00:00 UTC")


def status(s: MiniScheduler) -> dict:
    """Return the status as it comes over SGLang's message."""
    return json.loads(json.dumps(status_of(s.tree)))


def test_the_page_has_a_row_for_each_session_and_each_of_its_turns(connect):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    two_turns(s)
    run_turn(s, context(30, seed=7), [1])
    found = status(s)
    page = render(SERVER, [found], 50)
    for row in found["sessions"]["rows"]:
        assert f'data-branch="{row["branch"]}"' in page
        for turn in row["turns"]:
            assert f"<td>{turn['begin']:,} to {turn['stop']:,}</td>" in page
    assert "context-anchored" in page
    assert "retention (share 0.5)" in page
    assert "well" in page
    assert page.count("<details") == 2
    assert render(SERVER, [found], 1).count("<details") == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_rule_in_force_is_told_in_words(adaptive):
    s = MiniScheduler(share=FixedShare(0.25), adaptive=adaptive)
    run_turn(s, context(60), [1])
    page = render(SERVER, [status(s)], 50)
    assert ("KV heads compete for the entries" in page) == adaptive
    assert ("are locality heads" in page) != adaptive
    assert "the first 4 and the last 6 tokens" in page


def test_a_tier_that_is_away_stands_out(connect):
    s = MiniScheduler(link=connect())
    for _ in range(3):
        s.tree.tier.link.breaker.failed()
    assert '<span class="bad">away</span>' in render(SERVER, [status(s)], 50)


def test_replicas_are_told_one_by_one_and_one_without_kvtier_is_no_error():
    s = MiniScheduler()
    run_turn(s, context(30), [1])
    page = render(SERVER, [status(s), None], 50)
    assert "Replica 0" in page
    assert "Replica 1" in page
    assert "not kvtier's" in page
