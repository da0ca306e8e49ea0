"""The tier as the cache sees it: it is asked for the KV of prompts, and exact KV goes there.

    prefetch     a request arrived: in the background the tier is asked for what the tree lacks. It
                 waits in the queue for the answer, never longer than computing what it asked for
                 would take, and LONGEST_WAIT_S at the most; or as long as the settings say
    published    its own KV leaves (spiller.py), in the end with the record of how its turn was
                 compressed

A tier that is slow, full, lying or dead is a miss: the request computes.

Names in the tier say what computed the KV (identity.py). When the weights change they do, too; and
while the cache may hold KV of the weights before, nothing is asked for, awaited or stored:

    weights_change    an update begins (any of SGLang's calls that can change weights)
    cache_flushed     the tier is used again, under new names

The connector knows requests (state.py), never nodes or the tree. All of it runs in the scheduler's
thread only."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.prefetch import Landed, Layouts, Lookup
from kvtier_sglang.tier.codec import SpanCodec
from kvtier_sglang.tier.cost_model import CostModel
from kvtier_sglang.tier.scopes import (
    memory_in,
    separated,
    share_in,
    without_memory,
    without_share,
)
from kvtier_sglang.tier.setup import NamedModel
from kvtier_sglang.tier.spiller import Spiller
from kvtier_sglang.tier.state import FAILED, LOST, REFUSED, KvWait, TierState

logger = logging.getLogger(__name__)

# The longest that a request waits for the tier, however long computing would take.
LONGEST_WAIT_S = 30.0


class TierConnector:
    """The connection of one cache with the tier, see the module docstring.

    link:    the link, which the connector owns; model: the model whose KV this is.
    rules:   the rules that a stored turn must have been compressed by.
    names:   the names of this server's KV, until its weights change.
    drain_s: longest wait for what is on its way to the tier when the server ends.
    patience_s: longest wait of a request, whatever was measured; None: as the cost model says.
    """

    def __init__(
        self,
        link: TierLink,
        model: NamedModel,
        codec: SpanCodec,
        rules: TurnRules,
        *,
        drain_s: float = 0.0,
        patience_s: float | None = None,
    ) -> None:
        self.link, self.model, self.codec, self.rules = link, model, codec, rules
        self.drain_s = drain_s
        self._patience_s = patience_s
        self.names = names = model.names()
        # _renamed says that the model's names have to be asked for again, as its weights may have
        # changed; _outdated, that the cache may hold KV that was computed by the weights before.
        self._renamed = self._outdated = False
        self.cost_model = CostModel()
        self.counters: Counter[str] = Counter()
        self.spiller = Spiller(link, codec, names)
        self.layouts = Layouts(codec.layout(names.span_tokens))

    # -- whose KV this is --

    def weights_change(self, *, cached: bool) -> None:
        """Note that the weights are about to change, or may, and that nothing is fetched or spilled
        any more: KV of the weights before must not be used for what is computed after. cached:
        whether the cache holds any; the tier is not used then until it is flushed."""
        self.counters["weight_changes"] += 1
        self._renamed = True
        if cached and not self._outdated:
            self._outdated = True
            logger.warning(
                "the weights change while KV of the weights before is cached: the tier is neither "
                "asked nor written until the cache is flushed (/flush_cache)"
            )

    def cache_flushed(self) -> None:
        """Use the tier again, as the cache holds nothing any more, and no request waits."""
        if self._outdated:
            logger.info("the cache is flushed since the weights changed: the tier is used again")
        self._outdated = False

    @property
    def _is_usable(self) -> bool:
        """Return whether KV here is of the model as it is loaded; names are its own then."""
        if self._outdated:
            return False
        if self._renamed:
            self.names = self.spiller.names = self.model.names()
            self._renamed = False
        return True

    def scope(
        self, state: TierState, extra_key: str | None, cache_salt: str | None
    ) -> Scope | None:
        """Return where a request's KV is in the tier, by its `extra_key` (scopes.py); None where it
        has no place there now. That is so while the weights change, for an adapter that is not
        loaded, and for a request whose prefix memory was dropped before it was matched."""
        if not self._is_usable:
            return None
        memory = state.memory
        if memory_in(extra_key) != (memory and memory.digest):
            return None
        extra, lora_id = separated(without_share(without_memory(extra_key)))
        adapter = "" if lora_id is None else self.model.adapter(lora_id)
        if adapter is None:
            return None
        scope = Scope(extra, cache_salt or "", adapter, share=share_in(extra_key))
        if memory is not None:
            scope = replace(scope, memory=memory.digest, memory_tokens=len(memory.prefix_ids))
        return scope

    # -- prefetching --

    def prefetch(
        self, state: TierState, matched: Any, new: Any, scope: Scope, *, shared: bool
    ) -> None:
        """Ask for a request's `new` tokens, which follow those that the cache has. shared: other
        ranks may ask for it where this one does not, and will want to know."""
        least = self.names.span_tokens
        if len(new) < least:
            return
        if not self.loading_pays:
            if shared:
                self.decline(state, scope)
            state.miss_reason = REFUSED
            return
        lookup = Lookup(
            names=self.names,
            link=self.link,
            rules=self.rules,
            # Both are cut from one array; most requests never get here.
            token_ids=matched + new if matched else new,
            begin=len(matched),
            scope=scope,
            layouts=self.layouts,
            least=least,
        )
        deadline = time.monotonic() + self.patience_s(len(new))
        fetch = self.link.submit(lookup, needs=lookup.needs)
        state.kv_wait = KvWait(fetch, deadline, scope)
        self.counters["asked"] += 1
        state.miss_reason = LOST

    def decline(self, state: TierState, scope: Scope) -> None:
        """Note that other ranks may ask for the request and this one does not: its part is lost."""
        fetch: Fetch[Landed | None] = Fetch(lambda client: None)
        fetch.end(None)
        state.kv_wait = KvWait(fetch, time.monotonic(), scope)
        self.counters["declined"] += 1

    def is_ready(self, state: TierState) -> bool:
        """Return whether the request need not wait for exact KV (any longer): until all ranks have
        their part, or its patience ends. The wait of one that gets nothing is over."""
        wait = state.kv_wait
        if wait is None or wait.arrived:
            return True
        if wait.arrived is None:
            return False
        if not wait.fetch.done:
            self.counters["gave_up_waiting"] += 1
            state.miss_reason = REFUSED
        elif wait.fetch.result is not None:
            self.counters["lost_by_another_rank"] += 1
            state.miss_reason = FAILED
        state.cancel_kv_wait()
        return True

    def patience_s(self, tokens: int) -> float:
        """Return how long a request waits for the exact KV of so many tokens."""
        if self._patience_s is not None:
            return self._patience_s
        return min(self.cost_model.compute_s(tokens), LONGEST_WAIT_S)

    @property
    def loading_pays(self) -> bool:
        """Return whether the tier is asked at all."""
        return self._patience_s is not None or self.cost_model.loading_pays(self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """The bytes that one token's exact KV and scores take in the tier."""
        span = self.names.span_tokens
        return self.codec.layout(span).num_bytes // span

    def restored(self, wait: KvWait, tokens: int, seconds: float) -> None:
        """Note that so many tokens of what arrived were written into the pool, in so many seconds.
        Waiting behind other requests' questions, and for the scheduler to look, is not loading: a
        busy server would take its tier for a slow one."""
        self.counters["restored_requests"] += 1
        self.counters["restored_tokens"] += tokens
        loading_s = wait.fetch.took_s + seconds
        self.cost_model.loaded(loading_s, tokens, tokens * self.token_bytes)

    # -- spilling --

    def matched(self, state: TierState) -> None:
        """Note that a request was matched and may compute from now on."""
        state.cancel_unless("" if state.memory is None else state.memory.digest)
        state.chunk_began_s = time.monotonic()

    def published(
        self,
        req: Any,
        state: TierState,
        slots: torch.Tensor,
        *,
        exact: bool,
        elsewhere: Callable[[int], Sequence[Sequence[int]]],
    ) -> None:
        """Spill what a request has computed: as many tokens as there are slots, the first ones
        before. slots: its slots, any integers. exact: whether it computes with nothing dropped
        before it. elsewhere: returns at most so many tokens that follow, in each of some other
        turns, what it began behind."""
        held, finished = req.kv.cache_protected_len, req.finished()
        state.cancel_kv_wait()
        if state.turn is None:
            scope = self.scope(state, req.extra_key, req.cache_salt)
            if scope is not None:
                others = elsewhere(self.names.span_tokens)
                state.turn = self.spiller.begin(held, scope, exact=exact, elsewhere=others)
        began = time.monotonic()
        # This measures how fast prompts are computed; the last checkpoint has decoding in it.
        if state.chunk_began_s is not None and not finished:
            self.cost_model.computed(began - state.chunk_began_s, len(slots) - held)
        state.chunk_began_s = began
        if state.turn is not None:
            spill = self.spiller.ended if finished else self.spiller.published
            spill(state.turn, req.full_untruncated_fill_ids[: len(slots)], slots)
        self.cost_model.spilled(time.monotonic() - began)

    def close(self) -> None:
        """Wait `drain_s` at the most for what is on its way to the tier, as the server ends: its
        requests are done, but their newest turns may be among that."""
        if self.link.pending:
            logger.info(
                "the server ends: %d calls to the tier are waited for, %g s at the most",
                self.link.pending,
                self.drain_s,
            )
        if not self.link.flush(self.drain_s):
            logger.warning(
                "the server ends with %d calls to the tier not done after %g s; what they carried "
                "is computed again when it is asked for",
                self.link.pending,
                self.drain_s,
            )

    def report(self) -> dict[str, Any]:
        """Return the tier's state and counters, for the server's internal state."""
        return {
            "healthy": self.link.healthy,
            "outdated": self._outdated,
            "pending": self.link.pending,
            "breaker_opened": self.link.breaker.opened,
            **self.link.counters,
            **self.spiller.counters,
            **self.counters,
            **self.cost_model.report(),
            "loading_pays": self.loading_pays,
        }
