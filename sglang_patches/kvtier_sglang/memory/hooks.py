"""The hooks in SGLang's requests and schedulers, where there may be prefix memories.

A request whose prompt begins with a memory's prefix gets an extra key with the memory's digest, so
its whole context is in a tree of its own (radix/prefix_nodes.py): nothing that was computed behind
a memory is taken for what was computed behind the exact prefix, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.errors import KvtierError, UsageError
from kvtier.memory.storage import PrefixMemory
from kvtier_sglang.compat import cache_is_ours
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.memory.server import Memories
from kvtier_sglang.request_options import asks_exactly, requested_share
from kvtier_sglang.tier.scopes import separate_adapters, with_memory, with_share

# In the `server_args` of `/set_internal_state`, with any number.
RELOAD = "kvtier_reload_memories"
# In a request's `custom_params`: false, and it is answered from the exact prefix.
WANTS = "kvtier_memory"


class RequestHooks:
    """The hooks of one process. memories: its own; None before they are opened, and where there are
    none. fit: called with the scheduler and each request that is queued for the first time."""

    def __init__(
        self, memories: Callable[[], Memories | None], fit: Callable[[Any, Any], None]
    ) -> None:
        self._memories, self._fit = memories, fit

    def scope_request(self, result: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER Req.__init__: extra keys and adapters cannot be taken for each other, nor what was
        computed by sessions that keep less for what was computed without. What cannot be asked
        for, and was not refused before, is asked for no more, and refused when it is queued."""
        if not cache_is_ours():
            return
        separate_adapters(req)
        try:
            share = requested_share(req)
        except UsageError as error:
            req.sampling_params.custom_params, req.kvtier_refused = None, str(error)
            return
        if share is not None:
            req.extra_key = with_share(req.extra_key, share)

    def queue_request(self, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        """BEFORE Scheduler._add_request_to_queue: refuse what cannot be asked for, fit a request
        that wants exact KV into the pool, and give a request its memory. Only here is known from
        where on it wants log-probabilities of its prompt; nothing was matched before. A request
        that is queued again stays as it is."""
        if hasattr(req, "kvtier_queued"):
            return
        req.kvtier_queued = True
        if hasattr(req, "kvtier_refused"):
            req.set_finish_with_abort(req.kvtier_refused)
            return
        self._fit(scheduler, req)
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


def assign(bank: MemoryBank, req: Any) -> None:
    """Give a new request the extra key of its memory, if there is one that it may be answered
    with."""
    if not len(bank) or req.lora_id is not None or req.input_embeds is not None:
        return
    custom = req.sampling_params.custom_params
    if asks_exactly(req) or (custom or {}).get(WANTS) is False:
        bank.counters["opted_out"] += 1
        return
    memory = bank.of_prompt(req.origin_input_ids)
    if memory is None:
        return
    # Nobody computes log-probabilities of the prefix's tokens.
    asks_of_prefix = req.return_logprob and 0 <= req.logprob_start_len < len(memory.prefix_ids)
    if not asks_of_prefix:
        req.extra_key = with_memory(req.extra_key, memory.digest)
