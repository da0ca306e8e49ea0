"""The tier as the cache sees it: it is asked for the KV of prompts, and exact KV goes there.

    prefetch     a request arrived: the tier is asked for what the tree lacks
    settled      it waits in the queue for the answer, never longer than computing what it asked
                 for would take, and LONGEST_WAIT_S at the most; or as long as the settings say
    landed       what came, in host memory
    take         it is admitted: what came is the cache's, to be restored
    published    its own KV leaves (spiller.py)
    ended        ... with the record of how its turn was compressed

A tier that is slow, full, lying or dead is a miss: the request computes.

Names in the tier say what computed the KV (identity.py). When the weights change they do, too; and
while the cache may hold KV of the weights before, nothing is asked for, awaited or stored:

    weights_change    an update begins (any of SGLang's calls that can change weights)
    cache_flushed     the tier is used again, under new names

The connector knows requests, never nodes or the tree. All of it runs in the scheduler's thread
only."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtier.memory.storage import PrefixMemory
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.blobs.turns import NodeRecord
from kvtier.tier.link.link import TierLink
from kvtier.tier.prefetch import Landed, Layouts, Lookup
from kvtier_sglang.ranks import Awaited
from kvtier_sglang.tier.codec import SpanCodec
from kvtier_sglang.tier.cost_model import CostModel
from kvtier_sglang.tier.prefetch import REFUSED, PendingFetch, PendingFetches
from kvtier_sglang.tier.scopes import (
    memory_in,
    separated,
    share_in,
    without_memory,
    without_share,
)
from kvtier_sglang.tier.setup import NamedModel
from kvtier_sglang.tier.spiller import Spiller

logger = logging.getLogger(__name__)

# The longest that a request waits for the tier, however long computing would take.
LONGEST_WAIT_S = 30.0


class TierConnector:
    """The connection of one cache with the tier, see the module docstring.

    link:    the link, which the connector owns; model: the model whose KV this is.
    rules:   the rules that a stored turn must have been compressed by.
    names:   the names of this server's KV, until its weights change.
    memory_of: returns the memory that a request was matched behind; None: there are none.
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
        cost_model: CostModel | None = None,
        memory_of: Callable[[str], PrefixMemory | None] | None = None,
        drain_s: float = 0.0,
        patience_s: float | None = None,
    ) -> None:
        self.link, self.model, self.codec, self.rules = link, model, codec, rules
        self.memory_of = memory_of or (lambda rid: None)
        self.drain_s = drain_s
        self._patience_s = patience_s
        self.names = names = model.names()
        # _renamed says that the model's names have to be asked for again, as its weights may have
        # changed; _outdated, that the cache may hold KV that was computed by the weights before.
        self._renamed = self._outdated = False
        self.cost_model = cost_model or CostModel()
        self.counters: Counter[str] = Counter()
        self.fetches = PendingFetches(link)
        self.spiller = Spiller(link, codec, names)
        self.layouts = Layouts(codec.layout(names.span_tokens))
        # The times when requests' chunks began: at the last match, or where the last chunk ended.
        self._clock: dict[str, float] = {}

    # -- whose KV this is --

    def weights_change(self, *, cached: bool) -> None:
        """Forget what is fetched and spilled, as the weights are about to change, or may: KV of the
        weights before must not be used for what is computed after. cached: whether the cache holds
        any; the tier is not used then until it is flushed."""
        self.counters["weight_changes"] += 1
        self._renamed = True
        self.fetches.clear()
        self.spiller.clear()
        if cached and not self._outdated:
            self._outdated = True
            logger.warning(
                "the weights change while KV of the weights before is cached: the tier is neither "
                "asked nor written until the cache is flushed (/flush_cache)"
            )

    def cache_flushed(self) -> None:
        """Use the tier again, as the cache holds nothing any more, and no request waits."""
        self.fetches.clear()
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

    def scope(self, rid: str, extra_key: str | None, cache_salt: str | None) -> Scope | None:
        """Return where a request's KV is in the tier, by its `extra_key` (scopes.py); None where it
        has no place there now. That is so while the weights change, for an adapter that is not
        loaded, and for a request whose prefix memory was dropped before it was matched."""
        if not self._is_usable:
            return None
        memory = self.memory_of(rid)
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

    def prefetch(self, rid: str, matched: Any, new: Any, scope: Scope, *, shared: bool) -> None:
        """Ask for a request's `new` tokens, which follow those that the cache has. shared: other
        ranks may ask for it where this one does not, and will want to know."""
        least = self.names.span_tokens
        if len(new) < least:
            return
        if not self.loading_pays:
            if shared:
                self.fetches.decline(rid, scope)
            self.fetches.said[rid] = REFUSED
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
        self.fetches.ask(rid, lookup, self.patience_s(len(new)))

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

    @property
    def open(self) -> Sequence[Awaited]:
        """The answers that requests wait for and the ranks have not settled yet."""
        return self.fetches.open

    @property
    def is_awaited(self) -> bool:
        """Return whether any request waits for the tier."""
        return bool(self.fetches)

    def settled(self, rid: str) -> bool:
        """Return whether the request need not wait for the tier (any longer)."""
        return self.fetches.settled(rid)

    def landed(self, rid: str) -> Landed | None:
        return self.fetches.landed(rid)

    def take(self, rid: str) -> PendingFetch | None:
        """Hand what came to the caller, who drops it."""
        return self.fetches.take(rid)

    def restored(self, pending: PendingFetch, tokens: int, seconds: float) -> None:
        """Note that so many tokens of what came were written into the pool, in so many seconds.
        Waiting behind other requests' questions, and for the scheduler to look, is not loading: a
        busy server would take its tier for a slow one."""
        self.counters["restored_requests"] += 1
        self.counters["restored_tokens"] += tokens
        loading_s = pending.fetch.took_s + seconds
        self.cost_model.loaded(loading_s, tokens, tokens * self.token_bytes)

    def forget_prefetch(self, rid: str) -> None:
        """Let nothing be fetched for the request any more."""
        self.fetches.forget(rid)

    def forget(self, rid: str) -> None:
        """Forget what is fetched and was said of a request that ended, in whatever way."""
        self.fetches.forget(rid)
        self.fetches.said.pop(rid, None)
        self._clock.pop(rid, None)

    # -- spilling --

    def matched(self, rid: str) -> None:
        """Note that a request was matched and may compute from now on."""
        memory = self.memory_of(rid)
        self.fetches.stays_behind(rid, "" if memory is None else memory.digest)
        self._clock[rid] = time.monotonic()

    def published(
        self,
        req: Any,
        slots: torch.Tensor,
        *,
        exact: bool,
        elsewhere: Callable[[int], Sequence[Sequence[int]]],
    ) -> None:
        """Spill what a request has computed: as many tokens as there are slots, the first ones
        before. slots: its slots, any integers. exact: whether it computes with nothing dropped
        before it. elsewhere: returns at most so many tokens that follow, in each of some other
        turns, what it began behind."""
        rid, held, finished = req.rid, req.kv.cache_protected_len, req.finished()
        self.fetches.forget(rid)
        if not self.spiller.known(rid):
            scope = self.scope(rid, req.extra_key, req.cache_salt)
            if scope is not None:
                others = elsewhere(self.names.span_tokens)
                self.spiller.begin(rid, held, scope, exact=exact, elsewhere=others)
        began = time.monotonic()
        # This measures how fast prompts are computed; the last checkpoint has decoding in it.
        if rid in self._clock and not finished:
            self.cost_model.computed(began - self._clock[rid], len(slots) - held)
        self._clock[rid] = began
        spill = self.spiller.ended if finished else self.spiller.published
        spill(rid, req.full_untruncated_fill_ids[: len(slots)], slots)
        self.cost_model.spilled(time.monotonic() - began)

    def is_behind_a_drop(self, rid: str) -> None:
        """Note that what a request computes from now on sees KV of which something was dropped."""
        self.spiller.is_behind_a_drop(rid)

    def ended(self, rid: str, token_ids: Sequence[int], nodes: Sequence[NodeRecord]) -> int:
        """Store the record of a turn whose nodes are what they will be. Returns how many of its
        tokens were handed over, the newest ones of its context."""
        return self.spiller.compressed(rid, token_ids, nodes)

    def forget_spilling(self, rid: str) -> None:
        """Forget what is spilled of a request that is gone, or will start again."""
        self.spiller.forget(rid)

    def close(self) -> None:
        """Wait `drain_s` at the most for what is on its way to the tier, as the server ends: its
        requests are done, but their newest turns may be among that."""
        self.fetches.clear()
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
            **self.fetches.counters,
            **self.counters,
            **self.cost_model.report(),
            "loading_pays": self.loading_pays,
        }


__all__ = ["TierConnector"]
