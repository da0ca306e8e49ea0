"""The attention backend `kvtier`: every KV head of a layer attends over its own list of entries.

A pass is planned once (plans.py). New tokens attend to each other in the pass, and to what was
there before over lists, or, where nothing of it is compressed, over the slots of its tokens. Layers
with a window read the slots of their newest tokens (windows.py).

Runs over a `HeadPagedKVPool` only. It serves SGLang's own radix cache as well (policy `full`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def support_triton(self) -> bool:
        return False

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Return that shared reads end with the pass, whatever the mode: what the scheduler's
        thread writes next may be KV and votes (a fold, a compaction, a refresh), which every layer
        reads."""
        return SharedReadEnds.UNKNOWN

    # -- once per forward pass --

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, planner, refresh = forward_batch.forward_mode, self.planner, self.refresh()
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_target_verify():
            self.forward_metadata = planner.verify(forward_batch)
        elif mode.is_extend():
            requests = forward_batch.req_pool_indices.tolist()
            if refresh is not None:
                new = forward_batch.extend_seq_lens_cpu
                held = forward_batch.extend_prefix_lens_cpu
                stops = [int(a) + int(b) for a, b in zip(held, new, strict=True)]
                refresh.refresher.begin_pass(
                    forward_batch.rids, requests, stops, indptr(new), self.req_to_token
                )
            self.forward_metadata = planner.extend(forward_batch, requests)
        else:
            self.forward_metadata = planner.decode(forward_batch)

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
        self.forward_metadata = self.planner.decode(forward_batch, recorded=True)

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
        batch = self.forward_metadata
        assert batch is not None, "init_forward_metadata was not called"
        heads, dim, scale = layer.tp_k_head_num, layer.qk_head_dim, layer.scaling
        q = q.view(-1, heads, layer.tp_q_head_num // heads, dim)
        k, v = k.view(-1, heads, dim), v.view(-1, heads, dim)
        if sinks is not None:
            sinks = sinks.view(heads, -1)
        index = layer.layer_id - self.pool.start_layer
        windowed = self._windowed[index]
        if self.selection is not None and batch.prefill is not None and not windowed:
            self.selection.observe(index, q, k, v, batch.prefill, scale)
        memory = None if batch.memory is None else batch.memory.state(index, q, scale)
        q, k, v = self._in_stored_units(index, q, k, v)
        if save_kv_cache:
            self.kernels.store(k, v, RaggedKV(*self.pool.kv[index]), batch.write)
        v_scale = self.pool.scales.of(index).v
        if windowed:
            out = self._over_window(index, q, k, v, scale, batch, sinks)
        elif batch.drafts is not None:
            out = self._verify(index, q, k, v, scale, batch, batch.drafts)
        else:
            state = self._over_all(index, q, k, v, scale, batch)
            if memory is not None:
                o = memory.o if v_scale == 1.0 else memory.o / v_scale
                state = self.kernels.merge_states(state, AttentionState(o, memory.lse))
            out = state.o if sinks is None else with_sinks(state, sinks).o
        # It was summed over values as stored.
        if v_scale != 1.0:
            out.mul_(v_scale)
        return out.view(out.shape[0], -1)

    # One token per request. The pass knows what it is.
    forward_decode = forward_extend

    def _over_all(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        batch: BatchPlan,
    ) -> AttentionState:
        """A layer that attends to everything, in stored units."""
        refresh, lists = self.refresh(), self.planner.lists
        if not batch.q_indptr:
            assert batch.lists is not None, "a decoding pass without a plan"
            return lists.decode(q, batch.lists, index, scale)
        if refresh is not None:
            # Requests that begin a turn in this pass choose this layer's entries anew.
            refresh.refresher.layer(index, q, scale)
            if index == self.pool.layer_num - 1:
                refresh.refresher.end_pass()
        kv = RaggedKV(*self.pool.kv[index])
        state = self.kernels.extend(q, k, v, batch.q_indptr, kv, batch.prefixes, scale)
        if batch.lists is None:
            return state
        before = lists.extend(q, batch.q_indptr, batch.lists, index, scale)
        return self.kernels.merge_states(before, state)

    def _over_window(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        batch: BatchPlan,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """A layer that attends to its newest tokens only."""
        windows = self.planner.windows
        assert windows is not None, "a window that nothing was planned for"
        if not batch.q_indptr:
            return windows.decode(q, batch.windows, index, scale, sinks)
        kv = RaggedKV(*self.pool.kv[index])
        return windows.extend(q, k, v, batch.q_indptr, kv, batch.tails, scale, sinks)

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

    def _in_stored_units(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's new tokens for a cache of another dtype (kvtier_kernels.fp8).

        They are attended to as they will be stored, so what a context says does not depend on where
        its chunks and turns ended. The scale of keys goes into the queries: then plans are
        alike in all layers.
        """
        scales, dtype = self.pool.scales.of(index), self.pool.dtype
        if scales.k != 1.0:
            q = q * scales.k
        return q, as_stored(k, dtype, scales.k), as_stored(v, dtype, scales.v)
