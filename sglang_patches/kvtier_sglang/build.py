"""The factory behind `--radix-cache-backend kvtier`: a tree as the settings want it."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.registry import TreeCacheBuildContext

from kvtier.config import Settings
from kvtier.retention.locality import LocalityRule
from kvtier.retention.rules import compactor_of, locality_rule, refresh_rule
from kvtier_sglang.attention import active_backend
from kvtier_sglang.calibrated import curve_source
from kvtier_sglang.compaction import Compaction
from kvtier_sglang.identity import ModelIdentity
from kvtier_sglang.metrics import RetentionMetrics
from kvtier_sglang.pool import HeadSplitKVPool
from kvtier_sglang.radix import KvtierRadixCache
from kvtier_sglang.refresh_again import AgainRule
from kvtier_sglang.retention import Retention, share_rule
from kvtier_sglang.tier_setup import NamedModel, tier_link
from kvtier_sglang.tiered import TieredRadixCache


def build(ctx: TreeCacheBuildContext, settings: Settings) -> KvtierRadixCache:
    """The tree of one scheduler."""
    rule = locality_rule(settings)
    pool = ctx.params.token_to_kv_pool_allocator.pool
    parts: dict[str, Any] = {"streaming": settings.prefill == "streaming"}
    if settings.compacts:
        parts |= _compacting(ctx, settings, pool, rule)
    if settings.tier is None:
        return KvtierRadixCache(ctx.params, rule, **parts)
    identity = ModelIdentity(ctx.tp_worker.model_runner, ctx.server_args)
    model = NamedModel(settings, ctx.server_args.model_path, identity, pool, rule)
    tree = TieredRadixCache(
        ctx.params,
        rule,
        link=tier_link(settings),
        model=model,
        refresh=refresh_rule(settings),
        near_data=settings.refresh_by == "near-data",
        again=_again(settings),
        drain_s=settings.drain_s,
        **parts,
    )
    if tree.refresher is not None:
        backend = active_backend()
        assert backend is not None, "the attention backend is built before the tree"
        backend.refreshing = (tree, tree.refresher)
    return tree


def _again(settings: Settings) -> AgainRule | None:
    every, moved = settings.refresh_every_tokens, settings.refresh_moved
    return None if every is None and moved is None else AgainRule(every, moved)


def _compacting(
    ctx: TreeCacheBuildContext, settings: Settings, pool: HeadSplitKVPool, rule: LocalityRule
) -> dict[str, Any]:
    """What a tree needs whose CA heads may keep less than the whole context."""
    compactor, source, metrics = compactor_of(settings), None, None
    if ctx.server_args.enable_metrics:
        name = ctx.server_args.served_model_name or ctx.server_args.model_path
        metrics = RetentionMetrics(name, settings.quality)
    if settings.quality is not None:
        path = ctx.server_args.model_path
        dtype = str(pool.dtype).removeprefix("torch.")
        told = metrics.calibration_event if metrics is not None else None
        source = curve_source(settings, path, pool.profile, rule, compactor, dtype, told)
    choice = share_rule(settings, pool.slot_bytes.ca, source)
    return {
        "retention": Retention(choice, source, metrics),
        "compaction": Compaction(pool, compactor),
    }
