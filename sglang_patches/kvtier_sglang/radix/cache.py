"""The radix cache that SGLang sees: a tree whose nodes are compressed when their turn ends, and
whose exact KV waits in a tier.

A node has a slot for each token (`node.value`, as in SGLang's tree), but for those that compression
took: there it has 0. So matching, locking, eviction and SGLang's idle invariant see an ordinary
tree. Chunked prefill publishes a prompt as a chain of nodes, which becomes one node before it is
compressed:

    while prefilling   [chunk 0]-[chunk 1]-[chunk 2]                    exact
    turn ended         [ sink | what heads keep | recent | generated ]  one node

A request goes through these steps, in SGLang's own words for its storage tiers:

    prefetch_from_storage     it arrived: the tier is asked for what the tree lacks
    check_prefetch_progress   it waits in the queue for the answer
    match_prefix              what landed in host memory counts as a host hit
    init_load_back            it is admitted: what landed is written into the pool
    checkpoint, on_release    its own KV leaves, and its turn is compressed; the beginning of some
                              prompts already while they are prefilled (streaming.py)

What is known of a request is in its state, which all parts share (request_states.py). The parts
are called from here and call nothing here but what `refresh.state.Contexts` names. All of it runs
in the scheduler's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from kvtier.config import PrefillCompression
from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.prefetch import Landed
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.pool.turning import KeyTurner
from kvtier_sglang.radix import prefix_nodes
from kvtier_sglang.radix.edits import Edits
from kvtier_sglang.radix.index import TokenIndex
from kvtier_sglang.radix.matching import furthest_cached
from kvtier_sglang.radix.node import KvNode, moved_tokens
from kvtier_sglang.radix.request_log import RequestLog
from kvtier_sglang.radix.request_states import RequestState, RequestStates
from kvtier_sglang.radix.restorer import Restorer, continues
from kvtier_sglang.radix.streaming import Streaming
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.radix.turn_end import compress_path, evict_first, remove_path
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.refresh.state import CompactedContext
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.request_options import is_done, measures, note_recomputed, wants_exact
from kvtier_sglang.tier.connector import TierConnector
from kvtier_sglang.tier.state import FAILED
from kvtier_sglang.waits import resolve_all

logger = logging.getLogger(__name__)

# The tokens of evicted contexts that are remembered, as a tier may have them, are at most so many.
MOST_EVICTED_TOKENS = 4_000_000


class KvtierRadixCache(VariantRadixTree):
    """The cache behind `--radix-cache-backend kvtier`; see the module docstring.

    tier:         the tier that exact KV goes to and comes from; None: there is none.
    ranks:        the ranks that decide together; None: this one alone.
    memories:     prefix memories that requests may begin with; None: none.
    compress_prefill, chunk_tokens: see Streaming.
    turner:       turns keys of KV that is reused behind an edit; None: that is computed again.
    least_reused: the fewest tokens of a run that is worth it.
    log:          the log of requests that ended, closed with the cache; None: none is kept.

    refresh:      the refresh of compressed contexts; None: they have none. Set by who made both.
    """

    def __init__(
        self,
        params: Any,
        compressor: Compressor,
        *,
        tier: TierConnector | None = None,
        ranks: Ranks | None = None,
        memories: MemoryBank | None = None,
        compress_prefill: PrefillCompression = "never",
        chunk_tokens: int | None = None,
        turner: KeyTurner | None = None,
        least_reused: int = 0,
        log: RequestLog | None = None,
    ) -> None:
        self.memories = memories
        self.compressor, self.tier = compressor, tier
        self.refresh: TurnRefresh | None = None
        self.restorer: Restorer | None = None
        self.requests = RequestStates()
        super().__init__(params, compressor.rule, ranks or Ranks())
        self.streaming = Streaming(self, compressor, compress_prefill, chunk_tokens)
        self.allocator.has_gaps |= memories is not None
        self.allocator.prompt_slots = self.streaming.slots
        self.edits = None if turner is None else Edits(self, turner, least_reused)
        self.log = log
        if log is not None and self.index is None:
            # The log tells by it what stood behind other text.
            self.index = TokenIndex()
        if tier is not None:
            self.restorer = Restorer(self, compressor, tier.codec, self.ranks)
            if self.edits is not None:
                self.evicted = TokenIndex(MOST_EVICTED_TOKENS)

    def reset(self) -> None:
        for rid in list(self.requests):
            self.requests.drop(rid)
        if hasattr(self, "root_node"):
            self.misses.flushed(self.nodes())
        super().reset()
        for part in (self.tier, self.memories):
            if part is not None:
                part.cache_flushed()

    def weights_change(self) -> None:
        """Prepare for a change of the weights that may come; see TierConnector.weights_change."""
        self.misses.weights_change()
        for state in self.requests.values():
            state.weights_change()
        if self.memories is not None:
            self.memories.weights_change()
        if self.tier is not None:
            self.tier.weights_change(cached=bool(self.requests or self.total_size()))

    # -- a request arrives and waits --

    # SGLang's scheduler reads these before it prefetches. The tier's names are made of tokens, so
    # any node will do.
    hicache_storage_pass_prefix_keys = False

    def is_backuped(self, node: KvNode) -> bool:
        return True

    def is_root(self, node: KvNode) -> bool:
        return node is self.root_node

    def get_last_hash_value(self, node: KvNode) -> None:
        return None

    @property
    def uses_tier(self) -> bool:
        """Return whether SGLang's scheduler must ask here before it admits a request. Several ranks
        always do, as they must ask all at once and one's tier may be away."""
        return self.tier is not None and (
            self.ranks.size > 1 or self.tier.link.healthy or self.requests.are_waiting
        )

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
        """Ask the tier, in the background, for what the tree lacks of a request that arrived."""
        tier, node = self.tier, last_host_node
        if tier is None:
            return
        state = self.requests.of(handle.rid)
        state.cancel_kv_wait()
        state.edited_from = None
        scope = tier.scope(state, extra_key, cache_salt)
        if scope is None or state.exact_only:
            return
        if self.ranks.size == 1 and not tier.link.healthy:
            state.miss_reason = FAILED
            return
        matched = matched_prefix_tokens or ()
        if self.refresh is not None and state.node is not None:
            context = self._compacted(node, matched, scope)
            if context is not None:
                self.refresh.ask(state, context, tier.patience_s(node.stop))
        new = new_input_tokens
        if self.edits is not None:
            key = RadixKey(matched + new if matched else new, extra_key, cache_salt=cache_salt)
            evicted = self.edits.edited_from(key, len(matched))
            if evicted is not None:
                state.edited_from = evicted
                held = sum(
                    usable
                    for _, usable in self._steps(self.root_node, evicted, 0, exact_only=False)
                )
                matched, new = evicted.token_ids[:held], evicted.token_ids[held:]
        tier.prefetch(state, matched, new, scope, shared=self.ranks.size > 1)

    @rank_consensus(same_params=["handle.rid"], same_results=True)
    def check_prefetch_progress(self, handle: CacheRequestHandle) -> bool:
        """Return whether the request need not wait for the tier (any longer)."""
        state = self.requests.get(handle.rid)
        if self.tier is None or state is None:
            return True
        if self.refresh is not None and not self.refresh.is_ready(state, state.filled):
            return False
        return self.tier.is_ready(state)

    def waits(self, rid: str) -> bool:
        """Return whether a request waits for the tier's exact KV, or still holds what arrived."""
        state = self.requests.get(rid)
        return state is not None and state.kv_wait is not None

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """Return how many tokens came from the tier for a request, and where they begin."""
        state = self.requests.get(handle.rid)
        landed = None if state is None else state.landed
        if state is None or landed is None or state.edited_from is not None:
            return 0, None
        return landed.stop - landed.begin, landed.begin

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self.requests.drop(handle.rid)

    def check_hicache_events(self) -> None:
        """Resolve what all ranks have by now, as a round of the scheduler begins."""
        if self.tier is not None:
            resolve_all(self.requests.pending, self.ranks)

    def has_pending_cache_operations(self) -> bool:
        """Return that nothing keeps SGLang from flushing: requests wait only in its own queue."""
        return False

    # -- it is matched, and restored --

    @rank_consensus(same_results=["result.device_prefix_len", "result.host_hit_length"])
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the device's prefix, and what landed behind it as a host hit."""
        key, req = params.key, params.req
        state = None if req is None else self.requests.of(req.rid)
        exact_only = wants_exact(req)
        if state is not None and state.edited_from is not None:
            self._bring_back(state, state.edited_from)
        result = self._match_device(key, req, state, exact_only=exact_only)
        if self.tier is None or state is None:
            return result
        held, node = result.device_prefix_len, result.last_device_node
        self.tier.matched(state)
        state.node, state.filled = node, len(req.full_untruncated_fill_ids)
        if exact_only:
            # Restored KV may be compressed, and is then no more exact than the tree's.
            state.exact_only = True
            return result
        landed = state.landed
        if landed is None or not continues(landed, held) or landed.stop > len(key):
            return result
        return result._replace(
            host_hit_length=landed.stop - held, last_host_node=node, best_match_node=node
        )

    def _bring_back(self, state: RequestState, key: RadixKey) -> None:
        """Write the context that a request was edited from into the pool again, if it is there."""
        assert self.tier is not None, "a context from the tier without a tier"
        assert self.restorer is not None, "a tier without a restorer"
        landed, wait = state.landed, state.kv_wait
        if landed is None or wait is None:
            return
        state.edited_from = None
        began = time.monotonic()
        node, held = self.walk(self.root_node, key, 0)
        if continues(landed, held) and self.restorer.restore(key, node, landed) is not None:
            self.tier.restored(wait, landed.stop - held, time.monotonic() - began)
            self.counters["edited_contexts_restored"] += 1
        state.cancel_kv_wait()

    def _match_device(
        self, key: RadixKey, req: Any, state: RequestState | None, *, exact_only: bool
    ) -> MatchResult:
        """Return the prefix of a key that the tree has, with what can be copied behind an edit."""
        if self.disable or len(key) == 0:
            return self._empty_match_result
        start, is_exact, memory = prefix_nodes.begin(self, self.memories, key)
        exact = exact_only or is_exact
        node, length = self.walk(start, key, start.stop, exact_only=exact)
        if state is not None:
            state.memory = memory
            cached = furthest_cached(self.root_node, key, node)
            if exact_only:
                note_recomputed(req, cached[0] - length, length)
            elif measures(req):
                note_recomputed(req, 0, length)
            if self.edits is not None and not exact_only:
                node = self.edits.begin(req, state, key, node, cached[0])
                req.kvtier_moved = moved_tokens(node)
            copied, length = node.stop > length, node.stop
            self.misses.matched(req, cached, length, exact=exact, copied=copied)
        return MatchResult(
            device_prefix_len=length,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    @rank_consensus(same_params=["params.req.rid"], same_results=["result[0]"])
    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, KvNode]:
        """Write what landed behind the request's prefix into the pool: all of it or nothing."""
        assert self.tier is not None, "a host hit without a tier"
        assert self.restorer is not None, "a tier without a restorer"
        req, node = params.req, params.best_match_node
        state = self.requests.of(req.rid)
        wait, landed = state.kv_wait, state.landed
        if wait is None or landed is None or not continues(landed, node.stop):
            return 0, node
        began = time.monotonic()
        restored = self.restorer.restore(_whole_key(req), node, landed)
        if restored is None:
            state.miss_reason = FAILED
            state.cancel_kv_wait()
            return 0, node
        req.kvtier_loaded = loaded = landed.stop - node.stop
        self.tier.restored(wait, loaded, time.monotonic() - began)
        state.node, state.filled = restored, len(req.full_untruncated_fill_ids)
        if self._offer_restored(req, state, restored, landed):
            # The refresh owns what arrived.
            state.kv_wait = None
        state.cancel_kv_wait()
        return loaded, restored

    # -- what a refresh asks of its contexts (refresh.state.Contexts) --

    def pruned_ranges(self, rid: str) -> list[PrunedRange]:
        """Return the compressed ranges of the prefix that a request was admitted with."""
        state = self.requests.get(rid)
        node = None if state is None else state.node
        return self._pruned(node or self.root_node)

    def _pruned(self, node: KvNode) -> list[PrunedRange]:
        packed = self.allocator.pool.packed
        return node.pruned_ranges(is_coded=packed is not None and packed.coded is not None)

    def _compacted(
        self, node: KvNode, token_ids: Sequence[int], scope: Scope
    ) -> CompactedContext | None:
        """Return the context up to `node`, for a refresh; None where it has no pruned range."""
        ranges = self._pruned(node)
        if not ranges:
            return None
        exact_stop = max((one.stop for one in node.path() if one.exact), default=0)
        return CompactedContext(token_ids, ranges, exact_stop, scope)

    def _offer_restored(self, req: Any, state: RequestState, node: KvNode, landed: Landed) -> bool:
        """Offer a restored context for a refresh, from the very KV that it was restored from, and
        return whether it will have one. The refresh then owns what landed. An error over what came
        from elsewhere must not end the scheduler here, either: it is logged."""
        if self.refresh is None or self.tier is None:
            return False
        ids, context = req.full_untruncated_fill_ids, None
        try:
            scope = self.tier.scope(state, req.extra_key, req.cache_salt)
            if scope is not None:
                context = self._compacted(node, ids[: node.stop], scope)
            if context is None or context.ranges[0].begin < landed.begin:
                return False
            self.refresh.offer(state, context, landed.host, len(ids))
        except Exception:
            logger.exception("a restored context cannot be refreshed; it is used as it was")
            self.tier.counters["refresh_restored_failed"] += 1
            return False
        return True

    def make_room(self, num_slots: int) -> None:
        """Evict what is needed for so many slots of whole bundles, as far as that can be. Once so
        many slots are free, at most about as many again are evicted to make bundles whole."""
        self.allocator.evict_to_free_tokens(self, num_slots)
        spare = num_slots
        while spare > 0 and (missing := num_slots - self.allocator.whole_bundles()) > 0:
            evicted = self.evict(EvictParams(num_tokens=missing)).num_tokens_evicted
            spare = spare - evicted if evicted else 0

    # -- it computes, and ends --

    @rank_consensus(same_params=["req.rid", "up_to"])
    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Publish the request's KV up to `up_to`; see BasePrefixCache.checkpoint.

        The walk continues below the node that the request has locked, never from the root: another
        variant of the same tokens must not be taken for the request's own prefix.
        """
        if self.disable:
            return
        ids = req.full_untruncated_fill_ids[:up_to]
        # In a mixed batch SGLang counts a token whose id it does not know yet.
        up_to = len(ids)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
        owned = req.kv.cache_protected_len
        anchor = req.lock.node if req.lock is not None else self.root_node
        assert anchor is self.root_node or anchor.stop == owned, "lock and row disagree"
        state = self.requests.of(req.rid)
        texts = [text for text in (self.index, self.evicted) if text is not None]
        self.misses.computed(req, anchor, up_to, texts, state.miss_reason)
        if self.tier is not None:
            exact, elsewhere = not anchor.is_behind_a_drop, anchor.first_tokens_behind
            self.tier.published(req, state, row, exact=exact, elsewhere=elsewhere)
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        # A compressed copy is no substitute for the exact KV this request still uses.
        node, matched = self.walk(anchor, key, owned, exact_only=True)
        slots = row.to(torch.int64, copy=True)
        node = self.append(node, key, matched, slots, req.priority or 0, len(req.origin_input_ids))
        node.note_used(req.kv.cache_inserted_len)
        if matched > owned:
            # Another request published these meanwhile: the tree's copy is used, ours is freed.
            path = self.path_device_indices(node)
            new = slice(owned, matched)
            self.req_to_token_pool.write((req.kv.req_pool_idx, new), path[new])
            self.allocator.pool.moved.add(req.kv.req_pool_idx)
            self.allocator.free_segment(slots[new], start_pos=owned)
        req.kv.cache_protected_len = up_to
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, up_to)
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(node), node
        self._go_on(req, state, node)
        changed = self.streaming.chunk_ended(req, node)
        if changed is not None:
            path, before = self.path_device_indices(node), slice(changed, node.start)
            self.req_to_token_pool.write((req.kv.req_pool_idx, before), path[before])
            self.allocator.pool.moved.add(req.kv.req_pool_idx)
            state.note_drop()

    def _go_on(self, req: Any, state: RequestState, node: KvNode) -> None:
        """Let a request in its prefill go on behind a copy of what stood behind an edit."""
        if self.edits is None or req.finished() or wants_exact(req):
            return
        last = self.edits.go_on(state, _whole_key(req), node)
        if last is node:
            return
        begin, stop = node.stop, last.stop
        path = self.path_device_indices(last)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(begin, stop)), path[begin:stop])
        self.allocator.pool.moved.add(req.kv.req_pool_idx)
        req.kv.cache_protected_len = req.kv.cache_inserted_len = stop
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        # SGLang's scheduler goes on from there.
        req.extend_end = stop
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(last), last
        req.kvtier_moved = moved_tokens(last)
        state.note_drop()

    @rank_consensus(same_params=["req.rid", "checkpointed"])
    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Compress what no other request uses of the path of a turn that ended or was aborted. Take
        it out of the tree instead, as far as the request computed it, where an exact request
        computed cached tokens again, or the request only measured.

        The path of a retracted request stays as it is: the request will be back for its exact KV.
        """
        begin: int | None = getattr(req, "kvtier_own_from", None)
        account = self.misses.released(req, ended=req.finished())
        if account is not None and self.log is not None:
            self.log.ended(req, account, self.misses.began_s)
        if not self.disable and (checkpointed or req.finished()):
            if begin is None:
                compress_path(self, self.compressor, req.last_node)
                if account is not None and is_done(req):
                    evict_first(req.last_node, account.session)
            else:
                remove_path(self, req.last_node, begin)
        turn = self.requests.of(req.rid).turn
        self.requests.drop(req.rid)
        self.allocator.pool.moved.discard(req.kv.req_pool_idx)
        if self.tier is None or turn is None:
            return
        if not (checkpointed and req.finished()) or self.disable or begin is not None:
            return
        nodes = [node.record() for node in req.last_node.path()][::-1]
        ids = req.full_untruncated_fill_ids[: req.last_node.stop]
        req.last_node.note_sent(self.tier.spiller.compressed(turn, ids, nodes))

    def release_host_resources(self) -> None:
        """Close the tier and the log, as SGLang's scheduler ends."""
        super().release_host_resources()
        for state in self.requests.values():
            state.cancel_kv_wait()
        if self.tier is not None:
            self.tier.close()
        if self.log is not None:
            self.log.close()

    def report(self) -> dict[str, Any]:
        """Return the cache's counters and those of its parts, for the server's internal state."""
        report = {"integrity": self.check_integrity(), **self.counters, **self.compressor.report()}
        report["prompts"] = self.misses.report()
        if self.memories is not None:
            report["memories"] = self.memories.report()
        if self.tier is not None and self.restorer is not None:
            refresh = {} if self.refresh is None else self.refresh.report()
            report["tier"] = {**self.tier.report(), **self.restorer.counters, **refresh}
        return report


def _whole_key(req: Any) -> RadixKey:
    """Return the key of all tokens that a request has so far."""
    return RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
