"""The hooks in SGLang's requests and schedulers, where there may be prefix memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.errors import KvtierError
from kvtier.memory.storage import PrefixMemory
from kvtier_sglang.compat import backends_are_ours
from kvtier_sglang.memory.assigning import assign
from kvtier_sglang.memory.server import Memories
from kvtier_sglang.request_options import requested_share
from kvtier_sglang.tier.scopes import separate_adapters, with_share

# In the `server_args` of `/set_internal_state`, with any number.
RELOAD = "kvtier_reload_memories"


class RequestHooks:
    """The hooks of one process. memories: its own; None before they are opened, and where there are
    none."""

    def __init__(self, memories: Callable[[], Memories | None]) -> None:
        self._memories = memories

    def scope_request(self, result: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER Req.__init__: extra keys and adapters cannot be taken for each other, nor what was
        computed behind a prefix memory, or by sessions that keep less, for what was computed
        without."""
        if backends_are_ours()[1]:
            separate_adapters(req)
            share = requested_share(req)
            if share is not None:
                req.extra_key = with_share(req.extra_key, share)
            if (memories := self._memories()) is not None:
                assign(memories.bank, req)

    def process_batch_result(
        self, original: Callable[..., None], scheduler: Any, batch: Any, result: Any
    ) -> None:
        """AROUND Scheduler.process_batch_result: who is not answered well by a memory begins
        again."""
        if (memories := self._memories()) is None:
            return original(scheduler, batch, result)
        return memories.requeueing.process(original, scheduler, batch, result)

    def abort_request(self, scheduler: Any, asked: Any) -> None:
        """BEFORE Scheduler.abort_request: who is about to begin again can be aborted, too."""
        if (memories := self._memories()) is not None:
            memories.requeueing.abort(scheduler, asked)

    def update_handlers(
        self, handlers: dict[str, Any], controller: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """AFTER SchedulerInternalStateController._update_handlers: `/set_internal_state` with
        RELOAD reads the folder of memories, or what is published, again. All of it, or nothing.
        SGLang asks every rank, at the same place of its schedule."""
        from sglang.srt.managers.scheduler_components.internal_state import (
            UpdateRejected,
            _UpdateHandler,
        )

        memories = self._memories()
        if memories is None:
            return handlers
        found: dict[str, PrefixMemory] = {}

        def validate(key: str, value: Any) -> None:
            try:
                found.update(memories.readable())
            except KvtierError as error:
                raise UpdateRejected(f"{key}: {error}") from error

        return {**handlers, RELOAD: _UpdateHandler(validate, lambda *_: memories.apply(found))}


__all__ = ["RELOAD", "RequestHooks"]
