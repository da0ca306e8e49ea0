"""Requests that no memory answers well: those begin again, with the exact prefix.

    prompt prefilled ── more lookups fell back than the memory's card allows ──> queued again
                     └─ else ──> its answer

No token of such a request has been sent, and nothing of it is kept: it is retracted, as SGLang
retracts requests when memory is short, and matches the exact prefix when it is admitted again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.memory.passes import Lookups, MemoryPasses
from kvtier_sglang.metrics import MemoryMetrics
from kvtier_sglang.tier.scopes import without_memory


class Requeueing:
    """The requeueing of one scheduler, whose thread alone calls it."""

    def __init__(
        self, bank: MemoryBank, passes: MemoryPasses, metrics: MemoryMetrics | None = None
    ) -> None:
        self.bank = bank
        self.passes = passes
        self.metrics = metrics
        # The lookups of requests that are not through their prompts.
        self._so_far: dict[str, Lookups] = {}
        self._leaving: list[Any] = []
        # The streaming of requests that are to be queued again: whether, and how often.
        self._silent: dict[str, tuple[bool, int | None]] = {}

    def process(
        self, original: Callable[..., None], scheduler: Any, batch: Any, result: Any
    ) -> None:
        """AROUND Scheduler.process_batch_result."""
        leaving = self._not_answered(batch, result) if batch.forward_mode.is_extend() else []
        for req in leaving:
            self._retract(scheduler, req)
        original(scheduler, batch, result)
        # The passes launched meanwhile have been looked at: they cannot be taken for the new start.
        waiting, self._leaving = self._leaving, leaving
        if not scheduler.enable_overlap or not scheduler.result_queue:
            # None was: on an idle server there may be no further pass.
            waiting, self._leaving = [*waiting, *self._leaving], []
        for req in waiting:
            self._queue(scheduler, req)
        # Where passes overlap, `batch` is a copy, and the one launched meanwhile has them, too.
        batches = [batch]
        if scheduler.enable_overlap:
            batches = [scheduler.last_batch, scheduler.running_batch]
        for one in batches if leaving else ():
            if one is not None and not one.is_empty():
                one.filter_batch(reqs_to_exclude=leaving)

    def abort(self, scheduler: Any, asked: Any) -> None:
        """BEFORE Scheduler.abort_request, which looks for requests that are queued or run."""
        found = [req for req in self._leaving if asked.abort_all or req.rid.startswith(asked.rid)]
        self._leaving = [req for req in self._leaving if req not in found]
        for req in found:
            self._queue(scheduler, req)

    def _queue(self, scheduler: Any, req: Any) -> None:
        req.stream, req.sampling_params.stream_interval = self._silent.pop(req.rid)
        scheduler._add_request_to_queue(req, is_retracted=True)

    def _not_answered(self, batch: Any, result: Any) -> list[Any]:
        """The requests of an extend pass whose prompts are through and were answered too seldom."""
        if getattr(result, "copy_done", None) is not None:
            # The pass ran in another stream.
            result.copy_done.synchronize()
        for rid, lookups in self.passes.lookups([req.rid for req in batch.reqs]).items():
            self._so_far[rid] = self._so_far.get(rid, Lookups()).plus(lookups)
        found = []
        for req in batch.reqs:
            if req.inflight_middle_chunks > 0 or req.rid not in self._so_far:
                continue
            lookups = self._so_far.pop(req.rid)
            memory = self.bank.memory_of(req.rid)
            self.bank.counters["lookups"] += lookups.asked
            self.bank.counters["fell_back"] += lookups.fell
            if memory is None or req.finished() or req.output_ids:
                continue
            leaves = lookups.fell > memory.card.requeue_above * lookups.asked
            if leaves and batch.return_logprob:
                # SGLang counts log-probabilities of a pass request by request: with one less, the
                # others' would be shifted.
                self.bank.counters["not_requeued"] += 1
                leaves = False
            if leaves:
                found.append(req)
            if self.metrics is not None:
                self.metrics.prompt(memory.digest, "exact" if leaves else "answered", *lookups)
        # Others were aborted, in the middle of their prompt.
        self._so_far = {
            rid: so_far
            for rid, so_far in self._so_far.items()
            if self.bank.memory_of(rid) is not None
        }
        return found

    def _retract(self, scheduler: Any, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import release_req

        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        # It is answered from the exact prefix from now on.
        req.extra_key = without_memory(req.extra_key)
        self._silence(req)
        self.bank.counters["requeued"] += 1

    def _silence(self, req: Any) -> None:
        """Have SGLang send nothing of a request that has no token yet: it would send that there is
        none."""
        params = req.sampling_params
        self._silent[req.rid] = req.stream, params.stream_interval
        req.stream, params.stream_interval = True, 2
