"""The one owner of what kvtier is in a process: SGLang asks for its parts one after the other, and
each is given those that were made before it.

    size_pools, build_pool, build_allocator    the pool
    attention_backend                          over that pool; with it the selection of tokens
    radix_cache                                over the pool, with compressor, tier and refresh

Which SGLang function each is hooked to is in plugin.py. Where a server asked for other backends
than kvtier's, SGLang's own parts are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext

from kvtier.calibration.defaults import fitted_worth
from kvtier.calibration.store.watcher import CalibrationWatcher
from kvtier.config import Settings, load_settings
from kvtier.errors import StartupError
from kvtier.heads.profile import HeadProfile, ModelShape, full_profile, load_profile
from kvtier.heads.reference.rotation import KeyRotation
from kvtier.memory.published import MemoryFinder
from kvtier.memory.storage import PrefixMemory
from kvtier.pool_sizing import TABLE_BYTES, entry_votes, slot_bytes
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.rules import locality_rule, refresh_rule, scorer_of, state_width
from kvtier.retention.shares import PAGE, QualityTarget, Serving, configured_share, reads_nll
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier_sglang.attention.backend import KvtierAttnBackend
from kvtier_sglang.attention.lists import table_bytes
from kvtier_sglang.attention.plans import warm_up
from kvtier_sglang.compat import (
    attention_is_ours,
    cache_is_ours,
    check_documents,
    settings_of,
)
from kvtier_sglang.compression.calibration import FixedCurve, curve_source, stored_profile
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.compression.retention import Retention, observe_nll
from kvtier_sglang.compression.selection import (
    AdaptiveSelection,
    PackedSelection,
    ProfileSelection,
)
from kvtier_sglang.memory.server import Memories
from kvtier_sglang.memory.source import MemorySource
from kvtier_sglang.metrics import RetentionMetrics, name_in_metrics
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool, kvtier_pool
from kvtier_sglang.pool.scales import KvScales
from kvtier_sglang.pool.turning import KeyTurner
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.radix.request_log import RequestLog
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.refresh.refresher import AdaptiveRefresher, ProfileRefresher, Refresher
from kvtier_sglang.refresh.state import Contexts
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.support import confirm, rotations
from kvtier_sglang.tier.codec import SpanCodec
from kvtier_sglang.tier.connector import TierConnector
from kvtier_sglang.tier.setup import NamedModel, tier_link

logger = logging.getLogger(__name__)


class Runtime:
    """See the module docstring. Used by the thread that starts the engine, then the scheduler's."""

    def __init__(self) -> None:
        self._whole: HeadProfile | None = None
        self.selection: PackedSelection | None = None
        self.backend: KvtierAttnBackend | None = None
        self.cache: KvtierRadixCache | None = None
        self.memory_source: MemorySource | None = None
        self.memories: Memories | None = None
        self.turner: KeyTurner | None = None
        # Tokens that some layers attend to; None where all attend to everything.
        self.window: int | None = None

    @cached_property
    def settings(self) -> Settings:
        return load_settings()

    @cached_property
    def ranks(self) -> Ranks:
        return Ranks.of_this_process()

    # -- pools --

    def size_pools(
        self, original: Callable[..., Any], configurator: Any, budget_bytes: int, **kwargs: Any
    ) -> Any:
        """AROUND config_from_budget: turn the byte budget into slots."""
        if not cache_is_ours():
            return original(configurator, budget_bytes, **kwargs)
        self.settings = settings_of(configurator.server_args)
        self._check_ranks_agree()
        profile = self._profile(configurator)
        self._say_if_not_calibrated(profile, configurator.server_args)
        if self.settings.memory is not None:
            path = configurator.model_config.model_path
            self.memory_source = MemorySource(MemoryFinder(self.settings, path), self.ranks)
            budget_bytes -= self.memory_source.bytes_at_start
        if self._compresses:
            budget_bytes -= table_bytes(configurator)
        return size_pool(
            original,
            configurator,
            budget_bytes,
            profile.shape.of_rank(self.ranks.size),
            state_width=state_width(self.settings),
            votes=self._votes if self._compresses else None,
            **kwargs,
        )

    def _check_ranks_agree(self) -> None:
        """Raise StartupError where ranks found other calibrations, as where one node reaches no
        store: they would keep other numbers of entries, and wait for each other for ever."""
        file, found = self.settings.scorer.file, None
        if self.settings.competes and file is not None and self.ranks.size > 1:
            found = sha256(file.read_bytes()).hexdigest()
        if len(set(self.ranks.every(found))) > 1:
            raise StartupError(
                "ranks found different calibrations, or some none: let every node reach the same "
                "store, or have the same copy below KVTIER_DATA_DIR"
            )

    @property
    def _compresses(self) -> bool:
        """Return whether anything of a turn that has ended is dropped, by kvtier's cache."""
        return cache_is_ours() and (self.settings.compacts or self.profile.ca_share < 1)

    @property
    def _reuses(self) -> bool:
        """Return whether what stood behind an edit is taken from there."""
        asked, competes = self.settings.reuse_behind_edits, self.settings.competes
        is_asked = asked == "on" or (asked == "auto" and competes and self._compresses)
        return is_asked and cache_is_ours()

    @property
    def _votes(self) -> int:
        """The number of votes that an entry may have: see PackedSpans."""
        return entry_votes(self.settings, self.profile.shape, self.profile.ca_share)

    def _say_if_not_calibrated(self, profile: HeadProfile, server_args: Any) -> None:
        """One line where everything is kept only because nobody has calibrated the model."""
        settings, model = self.settings, server_args.model_path
        if settings.compacts or not settings.heads_may_compete or profile.ca_share < 1:
            return
        revision = getattr(server_args, "revision", None)
        if self.ranks.is_first and fitted_worth(settings, model, revision) is None:
            logger.warning(
                "%s is not calibrated, so every head keeps the whole context; a quarter is kept "
                "after `kvtier calibrate --model-path %s --parts tokens`, which takes minutes",
                model,
                model,
            )

    @property
    def profile(self) -> HeadProfile:
        """The whole model's profile in force, once pools are built."""
        assert self._whole is not None, "no pool was built"
        return self._whole

    def _profile(self, configurator: Any) -> HeadProfile:
        """The whole model's profile in force, the same on every rank. It is looked up once, so that
        all that is built from it sees the same one."""
        if self._whole is None:
            self._whole = self.ranks.first(lambda: self._find_profile(configurator))
        return self._whole

    def _find_profile(self, configurator: Any) -> HeadProfile:
        """The user's or the stored one for kvtier's cache, every head CA for SGLang's own."""
        config = configurator.model_config
        shape = ModelShape(
            num_layers=configurator.layer_info.num_effective_layers,
            num_kv_heads=config.get_total_num_kv_heads(),
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
        )
        if not cache_is_ours() or self.settings.competes:
            return full_profile(shape)
        if self.settings.head_profile is None:
            stored = stored_profile(self.settings, config.model_path, shape)
            return stored or full_profile(shape)
        profile = load_profile(self.settings.head_profile)
        profile.check_fits(shape)
        return profile

    def build_pool(
        self,
        original: Callable[..., Any],
        configurator: Any,
        *,
        max_total_num_tokens: int,
        **kwargs: Any,
    ) -> Any:
        """AROUND _build_mha_kv_pool: kvtier's pool where attention is."""
        if not attention_is_ours():
            return original(configurator, max_total_num_tokens=max_total_num_tokens, **kwargs)
        profile = self._profile(configurator)
        pool = HeadPagedKVPool(
            max_total_num_tokens,
            shape=profile.shape.of_rank(self.ranks.size),
            dtype=configurator.kv_cache_dtype,
            device=configurator.device,
            start_layer=configurator.layer_info.start_layer,
            state_width=state_width(self.settings) if cache_is_ours() else None,
            packs=self._compresses,
            votes=self._votes,
            bits=self.settings.kept_bits,
        )
        heads = profile.shape.num_layers * profile.shape.num_kv_heads
        logger.info(
            "kvtier pool: %d slots, %d of %d KV heads context-anchored",
            max_total_num_tokens,
            profile.num_ca_heads,
            heads,
        )
        return pool

    def build_allocator(
        self,
        original: Callable[..., Any],
        configurator: Any,
        *,
        token_to_kv_pool: Any,
        token_to_kv_pool_allocator: Any,
        **kwargs: Any,
    ) -> Any:
        """AROUND _build_token_to_kv_pool_allocator: ours where the radix cache is kvtier's."""
        if not cache_is_ours() or token_to_kv_pool_allocator is not None:
            return original(
                configurator,
                token_to_kv_pool=token_to_kv_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
                **kwargs,
            )
        return BundleAllocator(token_to_kv_pool)

    # -- attention --

    def attention_backend(self, runner: Any) -> KvtierAttnBackend:
        """Make the backend of `--attention-backend kvtier`. Raises StartupError over a pool that is
        not ours, UnsupportedModelError for a loaded model that cannot be served."""
        settings, pool = self.settings, kvtier_pool(runner)
        pool.scales = KvScales.of_model(runner.model, pool.layers, pool.dtype)
        confirmed = confirm(runner, pool)
        windows = confirmed.windows
        self.window = next((one for one in windows if one is not None), None)
        if self.window is not None and pool.packed is not None and not settings.competes:
            expected = "no head profile for a model of which some layers have a window"
            raise StartupError(f"--head-profile: {expected}")
        pool.full_layers = tuple(index for index, one in enumerate(windows) if one is None)
        rotated: list[KeyRotation | None] = []
        reuses = self._reuses and self.window is None
        if pool.state is not None or self.memory_source is not None or reuses:
            rotated = rotations(runner.model, confirmed)
        if reuses:
            self.turner = KeyTurner(pool, rotated)
        if pool.state is not None:
            # Again, for a model that was no local directory at start-up, or a file that changed.
            check_documents(settings, self.profile.shape, runner.server_args)
        if pool.packed is not None:
            self.selection = self._selection(pool, rotated)
        self.backend = KvtierAttnBackend(
            runner,
            settings,
            selection=self.selection,
            refresh=self._turn_refresh,
            windows=windows,
        )
        if self.memory_source is not None:
            source, shape = self.memory_source, self.profile.shape
            self.memories = Memories(
                source, runner, rotated, self.backend.kernels, shape, self._memory_of
            )
            self.backend.planner.use_memories(self.memories.passes)
        if torch.device(runner.device).type == "cuda":
            context = int(runner.model_config.context_len)
            warm_up(
                self.backend.kernels,
                pool,
                dtype=runner.dtype,
                chunk=_chunk_tokens(runner.server_args) or context,
                context=context,
            )
            if self.selection is not None:
                self.selection.warm_up()
        return self.backend

    def _selection(
        self, pool: HeadPagedKVPool, rotated: list[KeyRotation | None]
    ) -> PackedSelection:
        """Return the selection of the entries that heads keep of a finished turn."""
        settings, ranks, profile = self.settings, self.ranks, self.profile
        scorer = ranks.scorer(scorer_of(settings), profile.shape)
        if settings.competes:
            return AdaptiveSelection(pool, scorer, rotated)
        return ProfileSelection(
            pool,
            scorer,
            rotated,
            profile=profile.of_rank(ranks.rank, ranks.size),
            most_anchored=max(
                profile.of_rank(rank, ranks.size).num_ca_heads for rank in range(ranks.size)
            ),
            compensation=settings.locality.compensation,
            spare=int(settings.merge.is_on),
        )

    def _turn_refresh(self) -> TurnRefresh | None:
        return None if self.cache is None else self.cache.refresh

    def _memory_of(self, rid: str) -> PrefixMemory | None:
        """Return the memory that a request was matched behind; None for none."""
        state = None if self.cache is None else self.cache.requests.get(rid)
        return None if state is None else state.memory

    def measure_prompt_nll(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """AROUND LogitsProcessor.forward: measure the NLL of a prefill where it will be asked."""
        rows = None if self.backend is None else self.backend.prefill_rows()
        if self.backend is not None and rows is not None and reads_nll(self.settings):

            def logits_of(states: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = processor._get_logits(
                    states, lm_head, logits_metadata, use_logits_buffer=False
                )
                return found

            stride, nll = self.settings.nll_stride, self.backend.pool.nll
            observe_nll(logits_of, hidden_states, input_ids, rows, stride, nll)
        return original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs
        )

    # -- cache --

    def radix_cache(self, ctx: TreeCacheBuildContext) -> KvtierRadixCache:
        """Make the cache of `--radix-cache-backend kvtier`. Raises StartupError over another
        allocator."""
        settings, allocator = self.settings, ctx.params.token_to_kv_pool_allocator
        if not isinstance(allocator, BundleAllocator):
            raise StartupError(
                f"radix cache kvtier: expected a BundleAllocator, got "
                f"{type(allocator).__name__}; serve with --attention-backend kvtier as well"
            )
        compressor = self._compressor(ctx, allocator)
        tier, rule = None, refresh_rule(settings)
        if settings.tier.address is not None:
            tier = self._tier(ctx, compressor)
        self.cache = KvtierRadixCache(
            ctx.params,
            compressor,
            tier=tier,
            ranks=self.ranks,
            memories=None if self.memories is None else self.memories.bank,
            compress_prefill=settings.compress_prefill,
            chunk_tokens=_chunk_tokens(ctx.server_args),
            turner=self.turner,
            least_reused=settings.reuse_least_tokens,
            log=self._request_log(),
        )
        if tier is not None and rule is not None:
            refresher = self._refresher(rule, self.cache)
            self.cache.refresh = TurnRefresh(refresher, tier)
        return self.cache

    def _request_log(self) -> RequestLog | None:
        file = self.settings.request_log
        if file is None or not self.ranks.is_first:
            return None
        replica = self.ranks.replica
        return RequestLog(file.with_suffix(f".{replica}{file.suffix}") if replica else file)

    def _refresher(self, rule: RefreshRule, contexts: Contexts) -> Refresher:
        """Return the refresher that chooses the entries of a turn again, as `selection` keeps
        them."""
        if isinstance(self.selection, AdaptiveSelection):
            return AdaptiveRefresher(rule, contexts, self.selection.score)
        assert isinstance(self.selection, ProfileSelection), "a refresh without a selection"
        return ProfileRefresher(rule, contexts, self.selection.anchored_heads)

    def _compressor(self, ctx: TreeCacheBuildContext, allocator: BundleAllocator) -> Compressor:
        settings, pool = self.settings, allocator.pool
        rule = replace(locality_rule(settings), window=self.window or 0)
        share = configured_share(settings)
        if share is None:
            return Compressor(allocator, rule, selection=self.selection)
        source: CalibrationWatcher | FixedCurve | None = None
        metrics = None
        if ctx.server_args.enable_metrics and self.ranks.is_first:
            target = share.number if share.rule is QualityTarget else None
            metrics = RetentionMetrics(name_in_metrics(ctx.server_args), target)
        if share.rule.needs_curve:
            dtype = str(pool.dtype).removeprefix("torch.")
            told = metrics.calibration_event if metrics is not None else None
            path, scorer = ctx.server_args.model_path, scorer_of(settings)
            # The first rank decides what contexts keep.
            source = FixedCurve(None)
            if self.ranks.is_first:
                source = curve_source(settings, path, self.profile, rule, scorer, dtype, told)
        full = len(pool.full_layers) / pool.layer_num
        slot = full * self.profile.ca_share * self.ranks.size * pool.slot_bytes
        entry_bytes = max(1, round(slot * PAGE / pool.kept_page))
        chosen = share.rule.of(share.number, Serving(entry_bytes, source))
        retention = Retention(chosen, source, metrics, self.ranks)
        return Compressor(allocator, rule, retention=retention, selection=self.selection)

    def _tier(self, ctx: TreeCacheBuildContext, compressor: Compressor) -> TierConnector:
        settings, rule = self.settings, compressor.rule
        runner = ctx.tp_worker.model_runner
        return TierConnector(
            tier_link(settings.tier),
            NamedModel(runner, settings, rule, self.profile, self.ranks),
            SpanCodec(compressor.allocator.pool),
            TurnRules(rule, compressor.share, compressor.page),
            drain_s=settings.tier.drain_s,
            patience_s=settings.tier.patience_s,
        )


def size_pool(
    original: Callable[..., Any],
    configurator: Any,
    budget_bytes: int,
    shape: ModelShape,
    *,
    state_width: int | None,
    votes: int | None,
    **kwargs: Any,
) -> Any:
    """SGLang's answer to how many tokens fit, which are our slots.

    shape: of this rank's part of the model; state_width, votes: see `slot_bytes`.

    SGLang divides the budget by the bytes of a token's KV alone. Handing it the bytes that the KV
    of as many tokens as we have slots would cost makes it arrive at our number; a token cap of the
    user (--max-total-tokens) caps the slots as it always did.

    Raises StartupError where SGLang arrives at more than was planned.
    """
    itemsize = configurator.kv_cache_dtype.itemsize
    per_slot = slot_bytes(shape, itemsize, state_width=state_width, votes=votes)
    slots = budget_bytes // (per_slot + TABLE_BYTES)
    token_bytes = slot_bytes(shape, itemsize)
    config = original(configurator, slots * token_bytes, **kwargs)
    if config.max_total_num_tokens > slots:
        raise StartupError(
            f"{slots} slots fit the memory, but SGLang made {config.max_total_num_tokens} of them: "
            f"it does not count {token_bytes} bytes for a token"
        )
    return config


def _chunk_tokens(server_args: Any) -> int | None:
    """The most tokens of a prefill pass; None where prompts are not cut."""
    chunk = server_args.chunked_prefill_size
    return int(chunk) if chunk and chunk > 0 else None
