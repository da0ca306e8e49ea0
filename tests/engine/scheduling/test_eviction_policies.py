"""Each of SGLang's policies evicts the same as from SGLang's own tree, where nothing is
compressed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from packed_checks import SHAPE
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES
from tree_requests import Request

from kvtier.retention.locality import LocalityRule
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.radix.cache import KvtierRadixCache

# The last one is refused at start-up: it counts tokens in SGLang's own tree.
POLICIES = sorted(set(_EVICTION_POLICY_FACTORIES) - {"tlru"})
SLOTS, LONGEST = 3000, 1000
# Nothing is old enough to be dropped.
KEEPS_ALL = LocalityRule(4, 2 * LONGEST, 4)


@dataclass
class Asked(Request):
    """A request with what SGLang's own tree reads of its Req, too."""

    session: None = None
    kv_rotation_base: None = None


def tree(ours: bool, policy: str) -> BasePrefixCache:
    rows = ReqToTokenPool(size=4, max_context_len=LONGEST, device="cpu", enable_memory_saver=False)
    if ours:
        pool = HeadPagedKVPool(SLOTS, shape=SHAPE, dtype=torch.float32, device="cpu")
        allocator = BundleAllocator(pool)
    else:
        allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", SimpleNamespace(), False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        eviction_policy=policy,
        tree_components=(ComponentType.FULL,),
    )
    if ours:
        return KvtierRadixCache(params, Compressor(allocator, KEEPS_ALL))
    return UnifiedRadixCache(params)


def ask(cache: BasePrefixCache, prompt: list[int], priority: int = 0) -> int:
    """A request from its arrival to its end, with one token as its answer, of which no KV is made.
    Returns how many of its tokens were cached."""
    req = Asked(prompt, priority=priority)
    key = RadixKey(req.full_untruncated_fill_ids, limit=len(prompt) - 1)
    match = cache.match_prefix(MatchPrefixParams(key=key, req=req))
    held = req.kv.cache_protected_len = match.device_prefix_len
    req.lock = cache.lock(match.last_device_node)
    allocator = cache.token_to_kv_pool_allocator
    allocator.evict_to_free_tokens(cache, len(prompt) - held)
    slots = allocator.alloc(len(prompt) - held)
    req.kv.req_pool_idx = 1
    row = torch.cat((cache.path_device_indices(match.last_device_node), slots))
    cache.req_to_token_pool.write((1, slice(0, len(prompt))), row.to(torch.int32))
    cache.checkpoint(req, up_to=len(prompt))
    # SGLang does so again when the request has ended.
    req.done = True
    cache.checkpoint(req, up_to=len(prompt))
    cache.unlock(req.lock)
    cache.on_release(req, checkpointed=True)
    return held


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_evicted_in_the_order_of_sglangs_tree(policy):
    found: dict[bool, list[int]] = {}
    for ours in (True, False):
        rng, cache = random.Random(5), tree(ours, policy)
        known: list[list[int]] = [tokens(rng, 200) for _ in range(6)]
        found[ours] = []
        for _ in range(150):
            base = rng.choice(known)[: rng.randrange(300)]
            prompt = [*base, *tokens(rng, rng.randrange(1, 150))]
            found[ours].append(ask(cache, prompt, rng.randrange(3)))
            known[rng.randrange(len(known))] = prompt
    assert found[True] == found[False]
