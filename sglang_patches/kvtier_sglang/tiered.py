"""The radix tree with a tier behind it: exact KV leaves at a turn's end and comes back for a fork,
on another server, or after a restart.

What a request goes through, in SGLang's own words for its storage tiers:

    prefetch_from_storage     it arrived: the tier is asked for what the tree lacks
    check_prefetch_progress   it waits in the queue for the answer, never longer than computing
                              what it asked for would take, and LONGEST_WAIT_S at the most
    match_prefix              what landed in host memory counts as a host hit
    init_load_back            it is admitted: slots are allocated, the KV is written, recorded turns
                              are compressed again just as they were
    checkpoint, on_release    its own KV leaves (spill.py)

A tier that is slow, full, lying or dead is a miss: the request computes.

Names in the tier say what computed the KV (identity.py). When the weights change they do, too; and
while the tree may hold KV of the weights before, nothing is asked for, awaited or stored:

    weights_change()    an update begins (any of SGLang's calls that can change weights)
    reset()             the cache was flushed: the tier is used again, under new names
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)

from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import Hole, RefreshRule
from kvtier.retention.share import Everything
from kvtier.tier.host import Layouts
from kvtier.tier.keys import Scope
from kvtier.tier.link import TierLink
from kvtier.tier.lookup import Landed, Lookup
from kvtier.tier.names import ContextNames
from kvtier.tier.turn_rules import TurnRules
from kvtier.tier.turns import NodeRecord
from kvtier_sglang.compaction import Compaction
from kvtier_sglang.load_flows import LoadFlows
from kvtier_sglang.rates import Rates
from kvtier_sglang.refresh import Refresher, Refreshing, holes_of
from kvtier_sglang.refresh_again import AgainRule, RefreshAgain
from kvtier_sglang.refresh_flows import CompactedContext, RefreshFlows
from kvtier_sglang.refresh_sources import FetchedSource, RefreshSource
from kvtier_sglang.restore import RestoringRadixCache, continues
from kvtier_sglang.retention import Retention
from kvtier_sglang.scopes import separated
from kvtier_sglang.spans import SpanCodec
from kvtier_sglang.spill import Spiller
from kvtier_sglang.variants import KvNode, wants_prompt_logprobs

logger = logging.getLogger(__name__)

# The longest that a request waits for the tier, however long computing would take.
LONGEST_WAIT_S = 30.0


class ServedModel(Protocol):
    """What the tree asks about the model that computes its KV."""

    def names(self) -> ContextNames:
        """What its KV is called in the tier, as the model is loaded now."""
        ...

    def adapter(self, lora_id: str) -> str | None:
        """A digest of an adapter's contents; None where it is not loaded."""
        ...


class TieredRadixCache(RestoringRadixCache):
    """See the module docstring.

    link:    owned by the tree; model: whose KV this is.
    names:   of its KV, until its weights change.
    refresh: the rule by which compacted contexts are refreshed when a turn begins; None: they are
             not. near_data: whether the tier chooses where it can; again: when they are refreshed
             again while the turn is generated, None: not at all.
    drain_s: longest wait for what is on its way to the tier when the server ends.
    """

    def __init__(
        self,
        params: Any,
        rule: LocalityRule,
        *,
        link: TierLink,
        model: ServedModel,
        rates: Rates | None = None,
        refresh: RefreshRule | None = None,
        near_data: bool = False,
        again: AgainRule | None = None,
        drain_s: float = 0.0,
        streaming: bool = False,
        retention: Retention | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.link, self.model, self.drain_s = link, model, drain_s
        self.names = names = model.names()
        # _renamed: the model's names have to be asked for again, as its weights may have changed.
        # _outdated: the tree may hold KV that was computed by the weights before.
        self._renamed = self._outdated = False
        self.rates = rates or Rates()
        self.tier_counters: Counter[str] = Counter()
        self.loads = LoadFlows(link)
        self.refresher: Refresher | None = None
        self.again: RefreshAgain | None = None
        self.refreshes: RefreshFlows | None = None
        # What a request matched last, and how many tokens it is to fill.
        self._matched: dict[str, tuple[KvNode, int]] = {}
        # Requests that want nothing compressed, see `wants_prompt_logprobs`.
        self._asks_exactly: set[str] = set()
        # When a request's chunk began: at its last match, or where its last chunk ended.
        self._clock: dict[str, float] = {}
        super().__init__(
            params, rule, streaming=streaming, retention=retention, compaction=compaction
        )
        self.codec = SpanCodec(self.allocator.pool)
        self.spiller = Spiller(link, self.codec, names)
        self.layouts = Layouts(self.codec.layout(names.span_tokens))
        # A tree that cannot compact keeps everything, whatever it was told.
        share = Everything() if compaction is None else self.retention.rule
        self.turn_rules = TurnRules(rule, share, streaming)
        if refresh is not None:
            self.refresher = Refresher(self.allocator, refresh)
            heads = [buffers.heads for buffers in self.allocator.pool.ca]
            self.refreshes = RefreshFlows(
                link, names, self.layouts, refresh, heads, near_data=near_data
            )
            if again is not None:
                self.again = RefreshAgain(self.refresher, self.refreshes, again)
                self.refresher.observer = self.again

    def reset(self) -> None:
        self.loads.clear()
        for rid in list(self._matched):
            self._forget(rid)
        super().reset()
        if self._outdated:
            logger.info("the cache is flushed since the weights changed: the tier is used again")
        self._outdated = False

    # -- whose KV this is --

    def weights_change(self) -> None:
        """The weights are about to change, or may: KV of the weights before must not be used for
        what is computed after."""
        self.tier_counters["weight_changes"] += 1
        self._renamed = True
        self.loads.clear()
        if self.refreshes is not None:
            self.refreshes.clear()
        self.spiller.clear()
        if not self._outdated and (self._matched or self.total_size()):
            self._outdated = True
            logger.warning(
                "the weights change while KV of the weights before is cached: the tier is neither "
                "asked nor written until the cache is flushed (/flush_cache)"
            )

    def _uses_tier(self) -> bool:
        """Whether KV here is of the model as it is loaded; names are its own after this."""
        if self._outdated:
            return False
        if self._renamed:
            self.names = self.spiller.names = self.model.names()
            if self.refreshes is not None:
                self.refreshes.names = self.names
            self._renamed = False
        return True

    def _scope(self, extra_key: str | None, cache_salt: str | None) -> Scope | None:
        """Of a request, by its `extra_key` (scopes.py); None for an adapter that is not loaded."""
        extra, lora_id = separated(extra_key)
        adapter = "" if lora_id is None else self.model.adapter(lora_id)
        return None if adapter is None else Scope(extra, cache_salt or "", adapter)

    # -- asking --

    # SGLang's scheduler reads these two before it prefetches; names are made of tokens here, so
    # any node will do and nodes carry no hashes.
    hicache_storage_pass_prefix_keys = False

    def is_backuped(self, node: KvNode) -> bool:
        return True

    def is_root(self, node: KvNode) -> bool:
        return node is self.root_node

    def get_last_hash_value(self, node: KvNode) -> None:
        return None

    def prefetch_from_storage(
        self,
        handle: CacheRequestHandle,
        last_host_node: KvNode,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: Any = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request arrived: ask the tier for what the tree lacks, in the background."""
        self.loads.forget(handle.rid)
        if not self.link.healthy or handle.rid in self._asks_exactly or not self._uses_tier():
            return
        matched, new = matched_prefix_tokens or (), new_input_tokens
        scope = self._scope(extra_key, cache_salt)
        if scope is None:
            return
        if self.refreshes is not None:
            self._ask_refresh(self.refreshes, handle.rid, last_host_node, matched, scope)
        least = self.names.span_tokens
        if len(new) < least or not self.rates.loading_pays(self.token_bytes):
            return
        lookup = Lookup(
            names=self.names,
            link=self.link,
            rules=self.turn_rules,
            # Both are cut from one array; most requests never get here.
            token_ids=matched + new if matched else new,
            begin=len(matched),
            scope=scope,
            layouts=self.layouts,
            least=least,
        )
        self.loads.ask(handle.rid, lookup, self._patience_s(len(new)))

    def _patience_s(self, tokens: int) -> float:
        """How long a request waits for the exact KV of so many tokens."""
        return min(self.rates.compute_s(tokens), LONGEST_WAIT_S)

    def _ask_refresh(
        self, refreshes: RefreshFlows, rid: str, node: KvNode, matched: Any, scope: Scope
    ) -> None:
        """Ask for what a refresh of the device's prefix needs, whose tokens are `matched`."""
        path = list(self._path(node))[::-1]
        holes = holes_of(path)
        if holes and rid in self._matched:
            context = CompactedContext(matched, holes, exact_stop(path), scope)
            refreshes.ask(rid, context, self._patience_s(node.stop))

    def holes_of_request(self, rid: str) -> list[Hole]:
        """The compacted spans of the prefix that a request was admitted with."""
        node, _ = self._matched.get(rid, (self.root_node, 0))
        return holes_of(list(self._path(node))[::-1])

    @property
    def token_bytes(self) -> int:
        """Of one token's exact KV and scores in the tier."""
        span = self.names.span_tokens
        return self.codec.layout(span).num_bytes // span

    def check_prefetch_progress(self, handle: CacheRequestHandle) -> bool:
        """Whether the request need not wait for the tier (any longer)."""
        return self._refresh_settled(handle.rid) and self.loads.settled(handle.rid)

    def _refresh_settled(self, rid: str) -> bool:
        """Whether what a refresh needs came, will not come, or is not waited for."""
        if self.refreshes is None or self.refresher is None:
            return True
        if not self.refreshes.settled(rid):
            return False
        taken = self.refreshes.take(rid)
        if taken is not None:
            self._offer_refresh(self.refresher, rid, *taken)
        return True

    def _offer_refresh(
        self,
        refresher: Refresher,
        rid: str,
        context: CompactedContext,
        source: RefreshSource | None,
    ) -> None:
        """The request will be admitted; without a source it may be refreshed later."""
        if source is None and self.again is None:
            return
        _, filled = self._matched[rid]
        refreshing = Refreshing(context.holes, source, filled)
        refresher.offer(rid, refreshing)
        if self.again is not None:
            self.again.watch(rid, refreshing, context)

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """Tokens that came from the tier for a request, and where they begin."""
        landed = self.loads.landed(handle.rid)
        if landed is None:
            return 0, None
        return landed.stop - landed.begin, landed.begin

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self._forget(handle.rid)
        self.spiller.forget(handle.rid)

    def check_hicache_events(self) -> None:
        """Nothing waits for a safe point: loads are written when they are admitted."""

    def has_pending_cache_operations(self) -> bool:
        return bool(self.loads or self.refreshes)

    def _forget(self, rid: str) -> None:
        """The request is gone: nothing is fetched or held for it any more."""
        self.loads.forget(rid)
        self._matched.pop(rid, None)
        self._asks_exactly.discard(rid)
        self._clock.pop(rid, None)
        if self.refreshes is not None:
            self.refreshes.forget(rid)
        if self.refresher is not None:
            self.hold_private(-self.refresher.forget(rid))

    # -- restoring --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The device's prefix, and what landed behind it as a host hit."""
        result = super().match_prefix(params)
        if params.req is None:
            return result
        rid, filled = params.req.rid, len(params.req.full_untruncated_fill_ids)
        self._clock[rid] = time.monotonic()
        self._matched[rid] = (result.last_device_node, filled)
        if wants_prompt_logprobs(params.req):
            # What is restored may be compressed, and is then no more exact than the tree's.
            self._asks_exactly.add(rid)
            return result
        landed = self.loads.landed(rid)
        if landed is None:
            return result
        held = result.device_prefix_len
        if not continues(landed, held) or landed.stop > len(params.key):
            return result
        node = result.last_device_node
        return result._replace(
            host_hit_length=landed.stop - held, last_host_node=node, best_match_node=node
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, KvNode]:
        """Write what landed behind the request's prefix into the pool: all of it or nothing."""
        req, node = params.req, params.best_match_node
        flow = self.loads.take(req.rid)
        landed = None if flow is None else flow.landed
        if flow is None or landed is None or not continues(landed, node.stop):
            return 0, node
        began = time.monotonic()
        restored = self._restored(req, node, landed)
        if restored is None:
            flow.drop()
            return 0, node
        loaded = landed.stop - node.stop
        self.tier_counters["restored_requests"] += 1
        self.tier_counters["restored_tokens"] += loaded
        seconds = flow.waited_s - flow.fetch.held_s + time.monotonic() - began
        self.rates.loaded(seconds, loaded * self.token_bytes)
        if not self._refreshed(req, restored, landed):
            flow.drop()
        return loaded, restored

    def _restored(self, req: Any, node: KvNode, landed: Landed) -> KvNode | None:
        """The deepest restored node; None where there was no room or something went wrong: what
        came from elsewhere must not end the scheduler, now and after every restart."""
        try:
            restored = self.restore(req, node, landed)
        except Exception:
            logger.exception("what the tier had could not be restored; it is computed instead")
            self.tier_counters["restore_failed"] += 1
            return None
        if restored is None:
            self.tier_counters["no_room"] += 1
        return restored

    def _refreshed(self, req: Any, node: KvNode, landed: Landed) -> bool:
        """Whether a restored context will be refreshed from what it was restored from."""
        try:
            return self._refresh_restored(req, node, landed)
        except Exception:
            logger.exception("a restored context cannot be refreshed; it is used as it was")
            self.tier_counters["refresh_restored_failed"] += 1
            return False

    def _refresh_restored(self, req: Any, node: KvNode, landed: Landed) -> bool:
        """Refresh a restored context from what it was restored from; whether that will happen."""
        filled = len(req.full_untruncated_fill_ids)
        self._matched[req.rid] = (node, filled)
        path = list(self._path(node))[::-1]
        holes = holes_of(path)
        scope = self._scope(req.extra_key, req.cache_salt)
        if self.refresher is None or not holes or holes[0].begin < landed.begin or scope is None:
            return False
        ids = req.full_untruncated_fill_ids[: node.stop]
        context = CompactedContext(ids, holes, exact_stop(path), scope)
        source = FetchedSource(landed.host, holes, self.refresher.rule, self.layouts)
        self._offer_refresh(self.refresher, req.rid, context, source)
        return True

    # -- spilling --

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        rid = req.rid
        if not self.disable:
            self.loads.forget(rid)
            if not self.spiller.known(rid):
                self._begin_spilling(req)
            self._measure(req, up_to)
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
            ids = req.full_untruncated_fill_ids[:up_to]
            began = time.monotonic()
            spill = self.spiller.ended if req.finished() else self.spiller.published
            spill(rid, ids, row)
            self.rates.spilled(time.monotonic() - began)
        super().checkpoint(req, up_to=up_to)

    def _begin_spilling(self, req: Any) -> None:
        """A request's first chunk is computed: its KV goes to the tier, if it has a name there."""
        scope = self._scope(req.extra_key, req.cache_salt) if self._uses_tier() else None
        if scope is None:
            return
        anchor = req.lock.node if req.lock is not None else self.root_node
        exact = self._computes_exactly(anchor)
        self.spiller.begin(req.rid, req.kv.cache_protected_len, scope, exact=exact)

    def _measure(self, req: Any, up_to: int) -> None:
        """How fast prompts are computed; the last checkpoint has decoding in it."""
        now = time.monotonic()
        began = self._clock.get(req.rid)
        if began is not None and not req.finished():
            self.rates.computed(now - began, up_to - req.kv.cache_protected_len)
        self._clock[req.rid] = now

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._forget(req.rid)
        if not (checkpointed and req.finished()) or self.disable:
            self.spiller.forget(req.rid)
            return
        nodes = [_record(node) for node in self._path(req.last_node)][::-1]
        ids = req.full_untruncated_fill_ids[: req.last_node.stop]
        self.spiller.compressed(req.rid, ids, nodes)

    def release_host_resources(self) -> None:
        """SGLang's scheduler ends: its requests are done, their newest turns may still be on their
        way to the tier."""
        super().release_host_resources()
        self.loads.clear()
        if not self.link.flush(self.drain_s):
            logger.warning(
                "the server ends with %d calls to the tier not done after %g s; what they carried "
                "is computed again when it is asked for",
                self.link.pending,
                self.drain_s,
            )

    def tier_report(self) -> dict[str, Any]:
        """For the server's internal state."""
        return {
            "healthy": self.link.healthy,
            "outdated": self._outdated,
            "pending": self.link.pending,
            "breaker_opened": self.link.breaker.opened,
            **self.link.counters,
            **self.spiller.counters,
            **self.loads.counters,
            **self.tier_counters,
            **self.rates.report(),
            "loading_pays": self.rates.loading_pays(self.token_bytes),
            **self._refresh_report(),
        }

    def _refresh_report(self) -> dict[str, Any]:
        if self.refresher is None or self.refreshes is None:
            return {}
        return {
            "refresh_s": self.refresher.refresh_s,
            "refresh_wait_s": self.refreshes.wait_s,
            **self.refreshes.counters,
            **self.refresher.counters,
        }


def exact_stop(path: list[KvNode]) -> int:
    """Up to which token a path was computed with nothing dropped."""
    return max((node.stop for node in path if node.exact), default=0)


def _record(node: KvNode) -> NodeRecord:
    begin, end = node.dropped
    kept = int(torch.count_nonzero(node.value[begin:end]))
    return NodeRecord(
        stop=node.stop,
        prompt_stop=node.prompt_stop,
        compressed=node.compressed,
        dropped=(begin, end),
        kept=kept,
        exact=node.exact,
    )


__all__ = ["ServedModel", "TieredRadixCache"]
