"""The attention backend `kvtier`: one ragged kernel call per head class and layer.

Per forward pass the slot tables are planned once per class and shared by all layers (a streaming
prefill plans its settled entries again in each); per layer the query heads of each class attend
over their own class's entries. Nothing is padded. Kernels that plan on the device (on a GPU) are
told where the engine's tables are, and CUDA graphs record that (`graphs`); the others get a table
made on the host.

Runs over a `HeadSplitKVPool` only. With every head CA (policy `full`) the locality class is
empty and never touched, so the same backend serves SGLang's own radix cache.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kvtier.config import Settings
from kvtier.errors import StartupError
from kvtier.retention.rules import compactor_of
from kvtier_kernels import AttentionKernels, RaggedKV, Window, get_kernels
from kvtier_kernels.side_by_side import SideBySide
from kvtier_sglang.compaction import Compaction, PrefillRows, find_rotary
from kvtier_sglang.graphs import DecodeGraphs
from kvtier_sglang.pool import ClassBuffers, HeadSplitKVPool
from kvtier_sglang.refresh import Refresher
from kvtier_sglang.refresh_again import RefreshAgain


@dataclass(frozen=True)
class ClassPlan:
    """The entries of one class for this pass, and the streaming window if it has one."""

    plan: Any
    window: Window | None = None


@dataclass(frozen=True)
class BatchPlan:
    """What one forward pass attends over.

    ca, locality: per class; locality is None when no layer has locality heads.
    write:        where this pass's new tokens are stored, in both slot spaces.
    q_indptr:     row ranges of the requests in an extend pass; empty in a decoding one.
    prefill:      what an extend pass computes, where compaction wants to know; else None.
    """

    ca: ClassPlan
    locality: ClassPlan | None
    write: KVWriteLoc
    q_indptr: tuple[int, ...]
    prefill: PrefillRows | None = None


_active: weakref.ReferenceType[KvtierAttnBackend] | None = None


def active_backend() -> KvtierAttnBackend | None:
    """The attention backend of this process, for what observes a forward pass from outside."""
    return None if _active is None else _active()


class KvtierAttnBackend(AttentionBackend):
    """See the module docstring. One per model runner; used by its forward thread."""

    def __init__(self, model_runner: Any, settings: Settings) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, HeadSplitKVPool):
            raise StartupError(
                f"attention backend kvtier: expected a HeadSplitKVPool, got "
                f"{type(pool).__name__}; the pool hook did not take"
            )
        self.pool = pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.device = model_runner.device
        self.settings = settings
        self.kernels: AttentionKernels = get_kernels(settings.kernels, str(self.device))
        self.forward_metadata: BatchPlan | None = None
        # Set by a tree that refreshes: it and its refresher.
        self.refreshing: tuple[Any, Refresher] | None = None
        self.compaction: Compaction | None = None
        # Set by the runner that captures CUDA graphs.
        self.graphs: DecodeGraphs | None = None
        self._side_by_side = SideBySide(self.device)
        if pool.mass is not None:
            layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
            pool.rotary = find_rotary(model_runner.model, layers)
            self.compaction = Compaction(pool, compactor_of(settings))
        global _active
        _active = weakref.ref(self)

    def support_triton(self) -> bool:
        return False

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Not before the pass ends, whatever the mode: what the scheduler's thread writes next may
        be KV and votes (a fold, a compaction, a refresh), which every layer reads."""
        return SharedReadEnds.UNKNOWN

    # -- once per forward pass --

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        if forward_batch.forward_mode.is_extend():
            self.forward_metadata = self._plan_extend(forward_batch)
        else:
            self.forward_metadata = self._plan_decode(forward_batch)

    # What CUDA graphs of decoding call instead: the second part is recorded.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Room for the plans of batches of up to max_bs requests."""
        self.graphs = DecodeGraphs(self.kernels, self.pool, self.req_to_token, max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that only fill up a batch: none has to read anything."""
        return 0

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        assert self.graphs is not None, "init_cuda_graph_state was not called"
        self.graphs.room(forward_batch.batch_size)
        # A replay plans by itself, and nobody may find an earlier pass here.
        self.forward_metadata = None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert self.graphs is not None, "init_cuda_graph_state was not called"
        self.graphs.fill(forward_batch)
        ca, locality = self.graphs.room(forward_batch.batch_size)
        self.forward_metadata = BatchPlan(
            ca=ClassPlan(ca),
            locality=None if locality is None else ClassPlan(locality),
            write=self._write(forward_batch.out_cache_loc),
            q_indptr=(),
        )

    def _plan_extend(self, forward_batch: Any) -> BatchPlan:
        requests = forward_batch.req_pool_indices.tolist()
        lengths = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        if self.refreshing is not None:
            tree, refresher = self.refreshing
            stops = [length + n for length, n in zip(lengths, new, strict=True)]
            rids, table = forward_batch.rids, self.req_to_token
            refresher.begin_pass(tree, rids, requests, stops, _indptr(new), table)
        written = forward_batch.out_cache_loc
        prefill = None
        if self.compaction is not None:
            prefill = PrefillRows(_indptr(new), tuple(lengths), written)
        rows = self._rows(requests, lengths)
        return BatchPlan(
            ca=self._plan_ca(rows),
            locality=self._plan_locality(rows, streaming=self._streams),
            write=self._write(written),
            q_indptr=_indptr(new),
            prefill=prefill,
        )

    def _plan_decode(self, forward_batch: Any) -> BatchPlan:
        watching = self._watching
        if watching is not None:
            tree, again = watching
            requests = forward_batch.req_pool_indices.tolist()
            again.begin_pass(tree, forward_batch.rids, requests, self.req_to_token)
        if self.kernels.plans_on_device:
            longest = int(forward_batch.seq_lens_cpu.max())
            ca = self._plan_on_device(forward_batch, longest, None)
            locality = None
            if self.pool.splits_heads:
                locality = self._plan_on_device(forward_batch, longest, self.pool.locality_of)
        else:
            lengths = [int(n) for n in forward_batch.seq_lens_cpu]
            rows = self._rows(forward_batch.req_pool_indices.tolist(), lengths)
            ca, locality = self._plan_ca(rows), self._plan_locality(rows, streaming=False)
        return BatchPlan(ca, locality, self._write(forward_batch.out_cache_loc), ())

    @property
    def _watching(self) -> tuple[Any, RefreshAgain] | None:
        """The tree, and who watches the queries of generated tokens, if anybody does."""
        if self.refreshing is None:
            return None
        tree, _ = self.refreshing
        return None if tree.again is None else (tree, tree.again)

    def _rows(self, requests: list[int], lengths: list[int]) -> list[torch.Tensor]:
        """Each request's token slots."""
        return [
            self.req_to_token[request, :length].to(torch.int64)
            for request, length in zip(requests, lengths, strict=True)
        ]

    def _write(self, written: torch.Tensor) -> KVWriteLoc:
        """Where this pass's new tokens go, in both slot spaces."""
        if self.pool.splits_heads:
            return KVWriteLoc(written, self.pool.locality_of[written])
        return KVWriteLoc(written)

    def _plan_on_device(
        self, forward_batch: Any, longest: int, image: torch.Tensor | None
    ) -> ClassPlan:
        """Entries of one class, of all requests of a decoding pass."""
        plan = self.kernels.plan_on_device(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            longest,
            image,
            voted=image is not None or self.pool.ca_votes is not None,
        )
        return ClassPlan(plan)

    def prefill_rows(self) -> PrefillRows | None:
        """What the extend pass under way computes, if compaction will want to know."""
        return None if self.forward_metadata is None else self.forward_metadata.prefill

    def _plan_ca(self, rows: list[torch.Tensor]) -> ClassPlan:
        """CA entries: every token's, less those that compaction took (slot 0)."""
        if self.compaction is not None:
            rows = [row[row > 0] for row in rows]
        slots, indptr = _ragged(rows)
        votes = self.pool.ca_voted if self.pool.ca_votes is not None else None
        return ClassPlan(self.kernels.plan(slots, indptr, _if_any(votes, slots)))

    @property
    def _streams(self) -> bool:
        return self.settings.prefill == "streaming"

    def _plan_locality(self, rows: list[torch.Tensor], *, streaming: bool) -> ClassPlan | None:
        """Locality entries: the CA slots that still have a locality slot, in order."""
        if not self.pool.splits_heads:
            return None
        images = [self.pool.locality_of[row] for row in rows]
        positions = [torch.nonzero(image).flatten() for image in images]
        slots = [image[where] for image, where in zip(images, positions, strict=True)]
        entries, indptr = _ragged(slots)
        plan = self.kernels.plan(entries, indptr, _if_any(self.pool.log_votes, entries))
        if not streaming:
            return ClassPlan(plan)
        settled = [self.pool.settled[r[p]] for r, p in zip(rows, positions, strict=True)]
        window = Window(
            sink_tokens=self.settings.sink_tokens,
            recent_tokens=self.settings.recent_tokens,
            q_start=tuple(int(row.numel()) for row in rows),
            positions=torch.cat(positions),
            settled=torch.cat(settled),
        )
        return ClassPlan(plan, window)

    # -- once per layer --

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """q [tokens, heads * dim], k, v [tokens, KV heads, dim] -> [tokens, heads * dim]."""
        batch = self._metadata()
        q, k, v = self._shaped(q, k, v, layer)
        index = layer.layer_id - self.pool.start_layer
        if save_kv_cache:
            self.pool.store(self.kernels, index, batch.write, k, v)
        if self.compaction is not None and batch.prefill is not None:
            self.compaction.observe(index, q, k, v, batch.prefill, layer.scaling)
        if self.refreshing is not None:
            self._refresh(index, q, layer.scaling)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for buffers, part, votes in self._classes(index, batch):
            self.kernels.extend_heads(
                q,
                k,
                v,
                batch.q_indptr,
                RaggedKV(buffers.k, buffers.v, votes),
                part.plan,
                layer.scaling,
                buffers.head_map,
                out,
                part.window,
            )
        return out.view(out.shape[0], -1)

    def _refresh(self, index: int, q: torch.Tensor, scale: float) -> None:
        """Let the requests that begin a turn in this pass choose this layer's entries anew."""
        assert self.refreshing is not None, "nothing refreshes"
        _, refresher = self.refreshing
        refresher.layer(index, q, scale)
        if index == self.pool.layer_num - 1:
            refresher.end_pass()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One token per request; shapes as in `forward_extend`."""
        batch = self._metadata()
        q, k, v = self._shaped(q, k, v, layer)
        index = layer.layer_id - self.pool.start_layer
        if save_kv_cache:
            self.pool.store(self.kernels, index, batch.write, k, v)
        watching = self._watching
        if watching is not None:
            watching[1].record(index, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        calls = [
            partial(
                self.kernels.decode_heads,
                q,
                RaggedKV(buffers.k, buffers.v, votes),
                part.plan,
                layer.scaling,
                buffers.head_map,
                out,
            )
            for buffers, part, votes in self._classes(index, batch)
        ]
        self._side_by_side.run(calls)
        return out.view(out.shape[0], -1)

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

    def _classes(
        self, index: int, batch: BatchPlan
    ) -> list[tuple[ClassBuffers, ClassPlan, torch.Tensor | None]]:
        """The classes that have heads in the pool's `index`-th layer, each with plan and votes."""
        classes: list[tuple[ClassBuffers, ClassPlan, torch.Tensor | None]] = []
        if self.pool.ca[index].heads:
            votes = None if self.pool.ca_votes is None else self.pool.ca_votes[index]
            classes.append((self.pool.ca[index], batch.ca, votes))
        if self.pool.locality[index].heads:
            assert batch.locality is not None, "a locality head without a locality plan"
            classes.append((self.pool.locality[index], batch.locality, self.pool.log_votes))
        return classes


def _if_any(votes: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor | None:
    """None where none of these entries has votes: a first prefill, which then never asks again."""
    return votes if votes is not None and bool(votes[slots].any()) else None


def _ragged(rows: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
    return torch.cat(rows), _indptr([int(row.numel()) for row in rows])


def _indptr(lengths: list[int]) -> tuple[int, ...]:
    total, bounds = 0, [0]
    for length in lengths:
        total += length
        bounds.append(total)
    return tuple(bounds)
