"""`GET /kvtier/status` (HTML) and `GET /kvtier/status.json`, beside SGLang's own endpoints.

They are guarded as SGLang's management endpoints are: with `--admin-api-key` by that key, with
`--api-key` alone by that one. Both take `sessions`, the number of sessions that are shown, at most
MOST_SESSIONS.

However many ask, a scheduler is asked once at a time, and not again within FRESH_S. A question that
was sent is waited for to its end, whoever goes on waiting: SGLang would take a late answer for that
to the next question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import HTMLResponse, JSONResponse

from kvtier_sglang.metrics import name_in_metrics
from kvtier_sglang.shadow import shadowed
from kvtier_sglang.status.page import Server, render
from kvtier_sglang.status.state import ANSWER, MOST_SESSIONS, QUESTION

SHOWN = 50
# A page waits so long for a scheduler: one that computes a long chunk answers after it.
PATIENCE_S = 10.0
FRESH_S = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}

Replicas = Sequence[dict[str, Any] | None]


class Asker:
    """The questions to the schedulers behind SGLang's tokenizer manager, for one event loop.

    manager: returns it; called whenever they are asked, as it is there only once the server runs.
    """

    def __init__(self, manager: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        self._manager, self._patience_s = manager, patience_s
        self._asking: asyncio.Task[Replicas] | None = None
        self._answered_at = float("-inf")

    async def ask(self) -> Replicas:
        """Return every replica's status. Raises HTTPException where they do not answer in time, or
        the answer was to another question."""
        if self._asking is None or (self._asking.done() and not self._is_fresh):
            self._asking = asyncio.create_task(self._ask())
        done, _ = await asyncio.wait({self._asking}, timeout=self._patience_s)
        if not done:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the scheduler did not answer within {self._patience_s:g} s: it computes",
            )
        return self._asking.result()

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._answered_at < FRESH_S

    async def _ask(self) -> Replicas:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        manager = self._manager()
        manager.auto_create_handle_loop()
        found = await manager.get_internal_state_communicator(GetInternalStateReq(rid=QUESTION))
        states = [one.internal_state for one in found]
        if any(ANSWER not in state for state in states):
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE, "the answer was another's; ask again"
            )
        self._answered_at = time.monotonic()
        return [state[ANSWER] for state in states]


def mount(app: FastAPI, manager: Callable[[], Any]) -> None:
    """Add the routes to SGLang's application, before it looks which keys guard its routes."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    asker = Asker(manager)

    @app.get("/kvtier/status", include_in_schema=False)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def status(sessions: int = Query(SHOWN, ge=0, le=MOST_SESSIONS)) -> HTMLResponse:
        found = await asker.ask()
        server = Server(
            name_in_metrics(manager().server_args),
            time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            shadowed(manager()),
        )
        return HTMLResponse(render(server, found, sessions), headers=_HEADERS)

    @app.get("/kvtier/status.json", include_in_schema=False)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def status_json(sessions: int = Query(SHOWN, ge=0, le=MOST_SESSIONS)) -> JSONResponse:
        shown = [one and _first_sessions(one, sessions) for one in await asker.ask()]
        return JSONResponse({"replicas": shown, "shadow": shadowed(manager())}, headers=_HEADERS)


def _first_sessions(status: dict[str, Any], most: int) -> dict[str, Any]:
    rows = status["sessions"]["rows"][:most]
    return {**status, "sessions": {**status["sessions"], "rows": rows}}
