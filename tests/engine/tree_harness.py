"""A scheduler in miniature: drives the real tree, allocator and pool without a model.

It does what SGLang's scheduler does to a radix cache, in the same order: match, lock, allocate,
write the row, checkpoint, release. It writes KV whose value is a digest of the token's whole
prefix, so that any entry found under the wrong prefix is noticed.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packed_checks import CODED_UNIT, SHAPE, AnyOrder, check_packed
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from tree_requests import Request, digest
from waiting import wait_for

from kvtier.heads.profile import HeadProfile
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers.compactor import Compactor
from kvtier.retention.shares import ShareRule
from kvtier.tier.blobs.keys import KvIdentity
from kvtier.tier.blobs.names import ContextNames
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.link.link import TierLink
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.compression.retention import Retention
from kvtier_sglang.compression.selection import (
    AdaptiveSelection,
    PackedSelection,
    ProfileSelection,
)
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.turning import KeyTurner
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.refresh.refresher import AdaptiveRefresher, ProfileRefresher
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.tier.codec import SpanCodec
from kvtier_sglang.tier.connector import TierConnector
from kvtier_sglang.tier.scopes import with_memory

# Digests are large numbers: attention over them would only ever see the largest.
QUERY_SCALE = 1e-4
# The extra key of requests behind a memory.
MEMORY_KEY = with_memory(None, "0" * 16)
PROFILE = HeadProfile(model="test", shape=SHAPE, method="test", ca_heads=((), (1,)))


@dataclass
class Unchanging:
    """A model whose weights never change; its adapters' contents are their ids."""

    known: ContextNames

    def names(self) -> ContextNames:
        return self.known

    def adapter(self, lora_id: str) -> str | None:
        return lora_id


@dataclass
class OneMemory:
    """A bank of one memory, which stands for a prefix."""

    prefix_ids: tuple[int, ...]

    def named(self, digest: str) -> Any:
        return self

    def cache_flushed(self) -> None:
        pass


class MiniScheduler:
    """See the module docstring."""

    def __init__(
        self,
        size=400,
        sink=4,
        recent=6,
        branch=3,
        share: ShareRule | None = None,
        link: TierLink | None = None,
        span_tokens: int = 6,
        refresh: RefreshRule | None = None,
        patience_s: float | None = None,
        adaptive: bool = False,
        bits: int | None = None,
        reuse: int | None = None,
        packs: bool = True,
        memory: Sequence[int] = (),
    ):
        """adaptive: every head is CA, and heads compete for what is kept. bits: of its codes.
        reuse: least tokens of a run that is taken from behind an edit; None: none is. packs: False
        where nothing is compressed. memory: prefix of which requests with MEMORY_KEY have a
        memory."""
        merges = refresh is not None and refresh.merges
        self.pool = HeadPagedKVPool(
            size,
            # There are no codes of two numbers.
            shape=SHAPE if bits is None else SHAPE.model_copy(update={"head_dim": 8}),
            dtype=torch.float32,
            device="cpu",
            state_width=None if share is None else 0 if adaptive else Compactor.state_width,
            packs=packs,
            votes=SHAPE.group_size if merges else int(not adaptive),
            bits=bits,
        )
        self.allocator = BundleAllocator(self.pool)
        self.rows = ReqToTokenPool(
            size=16, max_context_len=512, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        self.rule = LocalityRule(sink, recent, branch)
        rotary = [None] * SHAPE.num_layers
        selection: PackedSelection | None = None
        if not packs:
            pass
        elif adaptive:
            selection = AdaptiveSelection(self.pool, AnyOrder(), rotary)
        else:
            selection = ProfileSelection(
                self.pool, Compactor(), rotary, profile=PROFILE, most_anchored=1,
                compensation=True, spare=int(merges),
            )  # fmt: skip
        compressor = Compressor(
            self.allocator,
            self.rule,
            retention=None if share is None else Retention(share),
            selection=selection,
        )
        tier = None
        if link is not None:
            identity = KvIdentity(
                "test",
                "0",
                "float32",
                2,
                3,
                self.pool.head_dim,
                policy=f"{share}",
                scores=f"{share}",
            )
            tier = TierConnector(
                link,
                Unchanging(ContextNames(identity, span_tokens)),
                SpanCodec(self.pool),
                TurnRules(self.rule, compressor.share, compressor.page),
                drain_s=0.0,
                patience_s=patience_s,
            )
        self.tree = KvtierRadixCache(
            params,
            compressor,
            tier=tier,
            memories=OneMemory(tuple(memory)) if memory else None,
            turner=None if reuse is None else KeyTurner(self.pool, rotary),
            least_reused=reuse or 0,
        )
        if tier is not None and refresh is not None:
            refresher = (
                AdaptiveRefresher(refresh, self.tree, selection.score)
                if adaptive
                else ProfileRefresher(refresh, self.tree, selection.anchored_heads)
            )
            self.tree.refresh = TurnRefresh(refresher, tier)
        # Columns that keep one entry for all, see `check_packed`.
        self.means = selection._means if isinstance(selection, ProfileSelection) else []
        self.running: list[Request] = []
        self.free_rows = list(range(1, 16))

    def admit(self, prompt: list[int], **asked: Any) -> Request | None:
        """Match and lock; None when the pool cannot hold the request. asked: other fields of the
        request."""
        return self.admit_again(Request(prompt, **asked))

    def admit_again(self, request: Request) -> Request | None:
        """The same for a request that may have been retracted."""
        wanted = len(request.full_untruncated_fill_ids)
        key = RadixKey(
            request.full_untruncated_fill_ids, request.extra_key, limit=wanted - 1,
            cache_salt=request.cache_salt,
        )  # fmt: skip
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        if self.tree.tier is not None:
            match = self._ask_tier(request, key, match)
        request.prefix_len = request.kv.cache_protected_len = match.device_prefix_len
        request.last_node = match.last_device_node
        if match.host_hit_length:
            self._load_back(request, match)
        request.lock = self.tree.lock(request.last_node)
        need = wanted - request.prefix_len + 1
        room = self.allocator.available_size() + self.tree.evictable_size()
        if need >= room or not self.free_rows:
            self.tree.unlock(request.lock)
            self.tree.release_aborted_request(CacheRequestHandle(request.rid, 0))
            return None
        request.kv.req_pool_idx = self.free_rows.pop()
        path = self.tree.path_device_indices(request.last_node)
        assert len(path) == request.prefix_len
        self.rows.req_to_token[request.kv.req_pool_idx, : len(path)] = path.to(torch.int32)
        request.filled = request.prefix_len
        self.running.append(request)
        return request

    def _ask_tier(self, request: Request, key: RadixKey, match: MatchResult) -> MatchResult:
        """Arrival and waiting, as SGLang's scheduler goes about them."""
        handle, held = CacheRequestHandle(request.rid, 0), match.device_prefix_len
        ids = request.full_untruncated_fill_ids[: len(request.prompt) - 1]
        node = match.last_device_node
        self.tree.prefetch_from_storage(
            handle, node, ids[held:], matched_prefix_tokens=ids[:held],
            extra_key=request.extra_key, cache_salt=request.cache_salt,
        )  # fmt: skip

        def is_ready() -> bool:
            self.tree.check_hicache_events()
            return self.tree.check_prefetch_progress(handle)

        wait_for(is_ready)
        return self.tree.match_prefix(MatchPrefixParams(key=key, req=request))

    def _load_back(self, request: Request, match: MatchResult) -> None:
        lock = self.tree.lock(match.last_device_node)
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
        loaded, request.last_node = self.tree.init_load_back(params)
        self.tree.unlock(lock)
        assert loaded in (0, match.host_hit_length), "all that was promised or nothing"
        request.prefix_len += loaded
        request.kv.cache_protected_len = request.prefix_len
        request.restored = loaded

    def extend(self, request: Request, tokens: int, *, decoding: bool = False) -> bool:
        """Compute `tokens` more of the request; False when memory is short even after eviction."""
        tokens = min(tokens, len(request.full_untruncated_fill_ids) - request.filled)
        ahead = self.tree.requests[request.rid].tokens_ahead(request.filled)
        tokens = tokens if ahead is None else min(tokens, ahead)
        if tokens == 0:
            return True
        self.allocator.evict_to_free_tokens(self.tree, tokens)
        slots = self.allocator.alloc(tokens)
        if slots is None:
            return False
        begin, end = request.filled, request.filled + tokens
        self.rows.req_to_token[request.kv.req_pool_idx, begin:end] = slots.to(torch.int32)
        ids = request.full_untruncated_fill_ids
        values = torch.tensor([digest(ids[: p + 1]) for p in range(begin, end)])
        coded = self.pool.packed is not None and self.pool.packed.coded is not None
        shown = CODED_UNIT * values if coded else values
        block = shown[:, None, None].expand(-1, SHAPE.num_kv_heads, self.pool.head_dim)
        for layer in self.pool.kv:
            for side in layer:
                side[slots] = block
        if self.pool.state is not None:
            for state in self.pool.state:
                state[:, slots] = values % 97
            self.pool.nll[slots] = values % 5
        request.filled = request.kv.kv_allocated_len = end
        self._refresh(request, tokens, decoding)
        return True

    def _refresh(self, request: Request, tokens: int, decoding: bool) -> None:
        """Do what the attention backend does about a refresh in a pass."""
        refresh = self.tree.refresh
        if refresh is None or decoding:
            return
        table, index = self.rows.req_to_token, request.kv.req_pool_idx
        refresh.refresher.begin_pass([request.rid], [index], [request.filled], (0, tokens), table)
        for layer in range(SHAPE.num_layers):
            q = self._queries(request, tokens, layer)
            refresh.refresher.layer(layer, q, QUERY_SCALE)
        refresh.refresher.end_pass()

    def _queries(self, request: Request, tokens: int, layer: int) -> torch.Tensor:
        """[tokens, KV heads, group, dim], the same for all that are as far in the same turn."""
        generator = torch.Generator().manual_seed(request.filled + layer)
        group = SHAPE.num_attention_heads // SHAPE.num_kv_heads
        shape = (tokens, SHAPE.num_kv_heads, group, self.pool.head_dim)
        return torch.randn(shape, generator=generator)

    def checkpoint(self, request: Request) -> None:
        request.extend_end = request.filled
        self.tree.checkpoint(request, up_to=request.filled)
        request.filled = request.extend_end

    def decode(self, request: Request, token: int) -> bool:
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids + array("q", [token])
        if self.extend(request, 1, decoding=True):
            return True
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids[:-1]
        return False

    def release(self, request: Request, *, checkpoint: bool, aborted: bool = False) -> None:
        """`release_kv_cache` in SGLang: finish (checkpoint), abort, or retract (neither)."""
        request.done = checkpoint or aborted
        if checkpoint:
            self.checkpoint(request)
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        # SGLang frees slots of the row's own type, too, which is int32.
        self.allocator.free(row[request.kv.cache_protected_len : request.filled])
        self.tree.unlock(request.lock)
        self.tree.on_release(request, checkpointed=checkpoint)
        self.free_rows.append(request.kv.req_pool_idx)
        self.running.remove(request)

    def check(self) -> None:
        """Every invariant, including that each entry holds the KV of its own prefix."""
        assert self.tree.check_integrity() == []
        held = sum(r.filled - r.kv.cache_protected_len for r in self.running)
        assert (
            self.allocator.available_size()
            + self.tree.evictable_size()
            + self.tree.protected_size()
            + held
            == self.allocator.size
        )
        for request in self.running:
            row = self.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
            tokens = list(request.full_untruncated_fill_ids)
            check_packed(self.pool, row, tokens, request.lock.node, self.means)


def run_turn(
    s: MiniScheduler, prompt: list[int], answer: list[int], chunk: int = 1000, **asked: Any
) -> Request:
    """A request from its arrival to its end, with every invariant checked after it. asked: other
    fields of the request."""
    request = s.admit(prompt, **asked)
    assert request is not None
    while request.filled < len(prompt):
        assert s.extend(request, chunk)
        s.checkpoint(request)
    for token in answer:
        assert s.decode(request, token)
    s.release(request, checkpoint=True)
    s.check()
    return request


def random_life(
    s: MiniScheduler,
    rng: random.Random,
    history: list[list[int]],
    prompt: Callable[[], list[int]],
    most: int,
    *,
    flushes: bool = False,
) -> None:
    """500 random operations: arrivals, chunks, decodes, ends, aborts, evictions and, where asked
    for, flushes; every invariant after each of them, and all slots back in the end.

    history: of contexts that ended, to which those that end are added. prompt: makes one. most:
    tokens that are computed or evicted at once.
    """
    for _ in range(500):
        operation = rng.random()
        if operation < 0.3 or not s.running:
            s.admit(prompt())
        elif operation < 0.6:
            request = rng.choice(s.running)
            if s.extend(request, rng.randrange(1, most)):
                s.checkpoint(request)
        elif operation < 0.75:
            request = rng.choice(s.running)
            if request.filled == len(request.full_untruncated_fill_ids):
                s.decode(request, rng.randrange(3))
        elif operation < 0.93:
            request = rng.choice(s.running)
            complete = request.filled == len(request.full_untruncated_fill_ids)
            s.release(request, checkpoint=complete, aborted=rng.random() < 0.5)
            if complete:
                history.append(list(request.full_untruncated_fill_ids))
        elif operation < 0.98 or not flushes:
            s.tree.evict(EvictParams(num_tokens=rng.randrange(1, most)))
        else:
            while s.running:
                s.release(s.running[0], checkpoint=False)
            s.tree.reset()
            s.allocator.clear()
        s.check()
    while s.running:
        s.release(s.running[0], checkpoint=False)
    s.tree.evict(EvictParams(num_tokens=10_000))
    s.check()
    assert s.allocator.available_size() == s.allocator.size


def matched(s: MiniScheduler, tokens: list[int]) -> int:
    """Return how many of the tokens the tree has."""
    key = RadixKey(array("q", tokens))
    return s.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
