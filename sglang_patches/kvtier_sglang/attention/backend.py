"""The attention backend `kvtier`: every KV head of a layer attends over its own list of entries.

A pass is planned once (plans.py). New tokens attend to each other in the pass, and to what was
there before over lists, or, where nothing of it is compressed, over the slots of its tokens. Layers
with a window read the slots of their newest tokens (windows.py).

Runs over a `HeadPagedKVPool` only. It serves SGLang's own radix cache as well (policy `full`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds

from kvtier.config import Settings
from kvtier.errors import IncompatibleFlagError
from kvtier_kernels import AttentionKernels, AttentionState, RaggedKV, get_kernels, with_sinks
from kvtier_kernels.fp8 import as_stored
from kvtier_sglang.attention.drafts import fold, over_branches, over_prefixes, unfold
from kvtier_sglang.attention.plans import BatchPlan, Planner, indptr
from kvtier_sglang.compression.selection import PackedSelection, PrefillRows
from kvtier_sglang.memory.passes import MemoryPasses
from kvtier_sglang.pool.kv_pool import kvtier_pool
from kvtier_sglang.refresh.turn_refresh import TurnRefresh


class KvtierAttnBackend(AttentionBackend):
    """See the module docstring. One per model runner; used by its forward thread.

    selection: told of every prefill's tokens, so that it can keep the best when the turn ends.
    refresh:   gives what is told of passes; the cache, which has it, is built after the backend.
    windows:   how many of its newest tokens each layer attends to, None for all; empty where all
               layers do.
    """

    def __init__(
        self,
        model_runner: Any,
        settings: Settings,
        *,
        selection: PackedSelection | None = None,
        refresh: Callable[[], TurnRefresh | None] = lambda: None,
        windows: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        self.pool = kvtier_pool(model_runner)
        # SGLang's models and its forward context ask for the pools by these names.
        self.token_to_kv_pool = self.pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.device = model_runner.device
        self.settings = settings
        self.kernels: AttentionKernels = get_kernels(settings.kernels, str(self.device))
        if not self.kernels.reads(self.pool.dtype):
            raise IncompatibleFlagError(
                "--kv-cache-dtype", f"one that {self.kernels.name} reads on this GPU", "fp8_e4m3"
            )
        self._windowed = [window is not None for window in windows or [None] * self.pool.layer_num]
        window = next((one for one in windows if one is not None), None)
        self.planner = Planner(self.kernels, self.pool, self.req_to_token, window)
        self.selection = selection
        self.refresh = refresh
        self.forward_metadata: BatchPlan | None = None
        # Set where there are prefix memories.
        self.memories: MemoryPasses | None = None

    def use_memories(self, memories: MemoryPasses) -> None:
        """Requests may begin with prefixes that these stand for."""
        self.memories = memories
        self.planner.lists.allow_gaps()

    def support_triton(self) -> bool:
        return False

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Return that shared reads end with the pass, whatever the mode: what the scheduler's
        thread writes next may be KV and votes (a fold, a compaction, a refresh), which every layer
        reads."""
        return SharedReadEnds.UNKNOWN

    # -- once per forward pass --

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        if forward_batch.forward_mode.is_target_verify():
            self.forward_metadata = self.planner.verify(forward_batch)
        elif forward_batch.forward_mode.is_extend():
            self.forward_metadata = self._begin_extend(forward_batch)
        else:
            self.forward_metadata = self._begin_decode(forward_batch)

    # CUDA graphs of decoding call these instead: the second part is recorded.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: the tables of lists are there, and a plan is made where it is recorded."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that only fill up a batch: none has to read anything."""
        return 0

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not in_capture:
            self.planner.follow_moved(forward_batch)
        # A replay plans by itself, and may not find an earlier pass here.
        self.forward_metadata = None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        plan = self.planner.recorded(forward_batch)
        if self.memories is not None:
            plan = replace(plan, memory=self.memories.recorded(forward_batch))
        self.forward_metadata = plan

    def _begin_extend(self, forward_batch: Any) -> BatchPlan:
        requests = forward_batch.req_pool_indices.tolist()
        refresh = self.refresh()
        if refresh is not None:
            new = forward_batch.extend_seq_lens_cpu
            held = forward_batch.extend_prefix_lens_cpu
            stops = [int(a) + int(b) for a, b in zip(held, new, strict=True)]
            refresh.begin_prefill(
                forward_batch.rids, requests, stops, indptr(new), self.req_to_token
            )
        plan = self.planner.extend(forward_batch, requests)
        if self.memories is None:
            return plan
        return replace(plan, memory=self.memories.extend(forward_batch))

    def _begin_decode(self, forward_batch: Any) -> BatchPlan:
        watching = self._watching
        if watching is not None:
            requests = forward_batch.req_pool_indices.tolist()
            watching.begin_decode(forward_batch.rids, requests, self.req_to_token)
        plan = self.planner.decode(forward_batch)
        if self.memories is None:
            return plan
        return replace(plan, memory=self.memories.decode(forward_batch))

    @property
    def _watching(self) -> TurnRefresh | None:
        """The refresh that watches the queries of generated tokens, if any does."""
        refresh = self.refresh()
        return refresh if refresh is not None and refresh.watches_decoding else None

    def prefill_rows(self) -> PrefillRows | None:
        """Return the rows that the extend pass under way computes, if selection will want to
        know."""
        return None if self.forward_metadata is None else self.forward_metadata.prefill

    # -- once per layer --

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads * dim], k, v [tokens, KV heads, dim] -> [tokens, heads * dim]. sinks:
        [heads], the logits of what heads give to nothing."""
        batch = self._metadata()
        q, k, v = self._shaped(q, k, v, layer)
        sinks = self._of_groups(sinks)
        index = layer.layer_id - self.pool.start_layer
        if self._windowed[index]:
            return self._window(index, q, k, v, layer.scaling, batch, sinks, save=save_kv_cache)
        if self.selection is not None and batch.prefill is not None:
            self.selection.observe(index, q, k, v, batch.prefill, layer.scaling)
        memory = None if batch.memory is None else batch.memory.state(index, q, layer.scaling)
        q, k, v = self._stored(index, q, k, v, batch, save=save_kv_cache)
        if batch.drafts is not None:
            out = self._verify(index, q, k, v, layer.scaling, batch, batch.drafts)
            return self._in_model_units(index, out)
        refresh = self.refresh()
        if refresh is not None:
            # Requests that begin a turn in this pass choose this layer's entries anew.
            refresh.layer(index, q, layer.scaling)
            if index == self.pool.layer_num - 1:
                refresh.end_pass()
        kv = RaggedKV(*self.pool.kv[index])
        rest = batch.q_indptr, kv, batch.prefixes, layer.scaling
        state = self.kernels.extend(q, k, v, *rest)
        if batch.lists is not None:
            before = self.planner.lists.extend(q, batch.q_indptr, batch.lists, index, layer.scaling)
            state = self.kernels.merge_states(before, state)
        return self._with_memory(index, state, memory, sinks)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One token per request; shapes as in `forward_extend`."""
        batch = self._metadata()
        q, k, v = self._shaped(q, k, v, layer)
        sinks = self._of_groups(sinks)
        index = layer.layer_id - self.pool.start_layer
        if self._windowed[index]:
            return self._window(index, q, k, v, layer.scaling, batch, sinks, save=save_kv_cache)
        memory = None if batch.memory is None else batch.memory.state(index, q, layer.scaling)
        q, k, v = self._stored(index, q, k, v, batch, save=save_kv_cache)
        watching = self._watching
        if watching is not None:
            watching.record(index, q)
        assert batch.lists is not None, "a decoding pass without a plan"
        state = self.planner.lists.decode(q, batch.lists, index, layer.scaling)
        return self._with_memory(index, state, memory, sinks)

    def _window(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        batch: BatchPlan,
        sinks: torch.Tensor | None,
        *,
        save: bool,
    ) -> torch.Tensor:
        """A layer that attends to its newest tokens only."""
        windows = self.planner.windows
        assert windows is not None, "a window that nothing was planned for"
        q, k, v = self._stored(index, q, k, v, batch, save=save)
        if batch.q_indptr:
            kv = RaggedKV(*self.pool.kv[index])
            out = windows.extend(q, k, v, batch.q_indptr, kv, batch.tails, scale, sinks)
        else:
            out = windows.decode(q, batch.windows, index, scale, sinks)
        return self._in_model_units(index, out)

    def _verify(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        batch: BatchPlan,
        masks: torch.Tensor,
    ) -> torch.Tensor:
        """Drafts over their requests' prefixes and their own branches (attention/drafts.py)."""
        assert batch.lists is not None, "a pass of drafts without a plan"
        count = masks.shape[-1]
        q = fold(q, count)
        decode = partial(self.planner.lists.decode, plans=batch.lists, layer=index, scale=scale)
        state, branches = over_prefixes(decode, q), over_branches(q, k, v, masks, scale)
        return unfold(self.kernels.merge_states(state, branches).o, count)

    def _with_memory(
        self,
        index: int,
        state: AttentionState,
        memory: AttentionState | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """A layer's output, of what was found in entries (in stored units) and in memories."""
        if memory is not None:
            v_scale = self.pool.scales.of(index).v
            o = memory.o if v_scale == 1.0 else memory.o / v_scale
            state = self.kernels.merge_states(state, AttentionState(o, memory.lse))
        if sinks is not None:
            state = with_sinks(state, sinks)
        return self._in_model_units(index, state.o)

    def _stored(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: BatchPlan,
        *,
        save: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's new tokens in stored units, which are written into the pool where asked."""
        q, k, v = self._in_stored_units(index, q, k, v)
        if save:
            self.kernels.store(k, v, RaggedKV(*self.pool.kv[index]), batch.write)
        return q, k, v

    def _in_stored_units(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's new tokens for a cache of another dtype (kvtier_kernels.fp8).

        They are attended to as they will be stored, so what a context says does not depend on where
        its chunks and turns ended. The scale of keys goes into the queries: then plans, and queries
        that a refresh remembers, are alike in all layers.
        """
        scales, dtype = self.pool.scales.of(index), self.pool.dtype
        if scales.k != 1.0:
            q = q * scales.k
        return q, as_stored(k, dtype, scales.k), as_stored(v, dtype, scales.v)

    def _in_model_units(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """A layer's output `[tokens, heads * dim]`, which was summed over values as stored."""
        scale = self.pool.scales.of(index).v
        if scale != 1.0:
            out.mul_(scale)
        return out.view(out.shape[0], -1)

    def _of_groups(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sinks of the query heads of each KV head, `[heads, group]`: a view."""
        return None if sinks is None else sinks.view(self.pool.head_num, -1)

    def _metadata(self) -> BatchPlan:
        assert self.forward_metadata is not None, "init_forward_metadata was not called"
        return self.forward_metadata

    def _shaped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q as [tokens, KV heads, group, dim]; k, v as [tokens, KV heads, dim]."""
        heads, dim = layer.tp_k_head_num, layer.qk_head_dim
        group = layer.tp_q_head_num // heads
        return q.view(-1, heads, group, dim), k.view(-1, heads, dim), v.view(-1, heads, dim)


__all__ = ["KvtierAttnBackend"]
