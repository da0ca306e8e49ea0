"""What a forward pass attends over, planned once per pass and head class and shared by all layers.

Nothing is padded. Kernels that plan on the device (on a GPU) are told where the engine's tables
are; the others get a table made on the host. A streaming prefill plans its settled entries again
in each layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kvtier.config import Settings
from kvtier_kernels import AttentionKernels, Window
from kvtier_kernels.positions import positions_of
from kvtier_sglang.attention.drafts import tree_masks
from kvtier_sglang.attention.lists import RequestLists
from kvtier_sglang.compression.selection import PrefillRows
from kvtier_sglang.memory.passes import MemoryPass
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool


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
    prefill:      what an extend pass computes, where selection wants to know; else None.
    lists:        instead of `ca`, where heads may have different entries: a plan over lists of all
                  that was there before, or, in a decoding pass, is there now; `ca` is then over
                  nothing.
    drafts:       in a pass that verifies drafts, bool [requests, drafts, drafts]: which drafts each
                  of them sees. It is planned like a decoding one, over what was there before.
    memory:       what the pass asks of prefix memories; None where no request has one.
    """

    ca: ClassPlan
    locality: ClassPlan | None
    write: KVWriteLoc
    q_indptr: tuple[int, ...]
    prefill: PrefillRows | None = None
    lists: Any = None
    drafts: torch.Tensor | None = None
    memory: MemoryPass | None = None


class Planner:
    """Plans the passes of one pool. req_to_token: SGLang's table of request rows."""

    def __init__(
        self,
        kernels: AttentionKernels,
        pool: HeadSplitKVPool,
        req_to_token: torch.Tensor,
        settings: Settings,
    ) -> None:
        self.kernels = kernels
        self.pool = pool
        self.req_to_token = req_to_token
        self.settings = settings
        # Whether tokens of a request may have no CA slot: compressed ones, and a memory's prefix.
        self.has_gaps = pool.state is not None or pool.packed is not None
        self.lists: RequestLists | None = None
        if pool.packed is not None:
            self.lists = RequestLists(kernels, pool, *req_to_token.shape)

    def extend(self, forward_batch: Any, requests: list[int]) -> BatchPlan:
        """requests: their rows, which the caller has asked the device for."""
        lengths = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        q_indptr = indptr(forward_batch.extend_seq_lens_cpu)
        written = forward_batch.out_cache_loc
        prefill = None
        if self.pool.state is not None:
            prefill = PrefillRows(q_indptr, tuple(lengths), written)
        rows = self._rows(requests, lengths)
        lists = None
        if self.lists is not None:
            every = zip(requests, rows, pairwise(q_indptr), strict=True)
            dense = [self.lists.begin(one, row, written[a:b]) for one, row, (a, b) in every]
            if self.lists.has_packed(requests):
                indices = forward_batch.req_pool_indices
                lists = self.lists.prefixes(indices, dense)
                rows = [row[:0] for row in rows]
        return BatchPlan(
            ca=self._ca(rows),
            locality=self._locality(rows, streaming=self.settings.prefill == "streaming"),
            write=self.write(written),
            q_indptr=q_indptr,
            prefill=prefill,
            lists=lists,
        )

    def follow_moved(self, forward_batch: Any) -> None:
        """Before a decoding pass, write rows again that have other slots than their lists say. It
        asks the device only where there are some."""
        if self.lists is None or self.pool.packed is None or not self.pool.packed.moved:
            return
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        for request, length in zip(requests.tolist(), lengths.tolist(), strict=True):
            if length and request in self.pool.packed.moved:
                (row,) = self._rows([request], [length - 1])
                self.lists.begin(request, row, row[:0])

    def decode(self, forward_batch: Any) -> BatchPlan:
        self.follow_moved(forward_batch)
        if self.lists is not None:
            return self._over_lists(
                forward_batch,
                self.lists.grown(
                    forward_batch.req_pool_indices,
                    forward_batch.seq_lens,
                    forward_batch.out_cache_loc,
                ),
            )
        if self.kernels.plans_on_device:
            longest = int(forward_batch.seq_lens_cpu.max())
            ca = self._on_device(forward_batch, longest, None)
            locality = None
            if self.pool.splits_heads:
                locality = self._on_device(forward_batch, longest, self.pool.locality_of)
        else:
            rows = self._all_rows(forward_batch)
            ca, locality = self._ca(rows), self._locality(rows, streaming=False)
        return BatchPlan(ca, locality, self.write(forward_batch.out_cache_loc), ())

    def _over_lists(self, forward_batch: Any, lists: Any) -> BatchPlan:
        """A pass over lists alone."""
        write = self.write(forward_batch.out_cache_loc)
        return BatchPlan(ClassPlan(None), None, write, (), lists=lists)

    def verify(self, forward_batch: Any) -> BatchPlan:
        """Drafts over prefixes that are as long as the batch says."""
        masks = tree_masks(forward_batch)
        if self.lists is None:
            return replace(self.decode(forward_batch), drafts=masks)
        # Of the drafts before, those that were accepted are where their positions are.
        requests = forward_batch.req_pool_indices.tolist()
        for request, row in zip(requests, self._all_rows(forward_batch), strict=True):
            self.lists.begin(request, row, row[:0])
        lists = self.lists.before(forward_batch.req_pool_indices, forward_batch.seq_lens)
        return replace(self._over_lists(forward_batch, lists), drafts=masks)

    def write(self, written: torch.Tensor) -> KVWriteLoc:
        """Where a pass's new tokens go, in both slot spaces."""
        if self.pool.splits_heads:
            return KVWriteLoc(written, self.pool.locality_of[written])
        return KVWriteLoc(written)

    def _all_rows(self, forward_batch: Any) -> list[torch.Tensor]:
        """The rows of a decoding pass."""
        lengths = [int(n) for n in forward_batch.seq_lens_cpu]
        return self._rows(forward_batch.req_pool_indices.tolist(), lengths)

    def _rows(self, requests: list[int], lengths: list[int]) -> list[torch.Tensor]:
        """Each request's token slots."""
        return [
            self.req_to_token[request, :length].to(torch.int64)
            for request, length in zip(requests, lengths, strict=True)
        ]

    def _on_device(
        self, forward_batch: Any, longest: int, slot_map: torch.Tensor | None
    ) -> ClassPlan:
        """Entries of one class, of all requests of a decoding pass."""
        plan = self.kernels.plan_on_device(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            longest,
            slot_map,
            voted=slot_map is not None or self.pool.ca_votes is not None,
        )
        return ClassPlan(plan)

    def _ca(self, rows: list[torch.Tensor]) -> ClassPlan:
        """CA entries: every token's, less those that compression took (slot 0)."""
        slots, bounds = _ragged(self._dense(rows))
        votes = self.pool.ca_voted if self.pool.ca_votes is not None else None
        return ClassPlan(self.kernels.plan(slots, bounds, _if_any(votes, slots)))

    def _dense(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each row without what compression took, and without packed spans."""
        if self.pool.packed is not None:
            rows = [self.pool.packed.dense_of[row] for row in rows]
        if self.has_gaps:
            rows = [row.index_select(0, positions_of(row > 0)) for row in rows]
        return rows

    def _locality(self, rows: list[torch.Tensor], *, streaming: bool) -> ClassPlan | None:
        """Locality entries: the CA slots that still have a locality slot, in order."""
        if not self.pool.splits_heads:
            return None
        mapped = [self.pool.locality_of.index_select(0, row) for row in rows]
        positions = [positions_of(slots) for slots in mapped]
        held = [slots.index_select(0, at) for slots, at in zip(mapped, positions, strict=True)]
        entries, bounds = _ragged(held)
        plan = self.kernels.plan(entries, bounds, _if_any(self.pool.log_votes, entries))
        if not streaming:
            return ClassPlan(plan)
        settled = [self.pool.settled[r[p]] for r, p in zip(rows, positions, strict=True)]
        window = Window(
            sink_tokens=self.settings.locality.sink_tokens,
            recent_tokens=self.settings.locality.recent_tokens,
            q_start=tuple(int(row.numel()) for row in rows),
            positions=torch.cat(positions),
            settled=torch.cat(settled),
        )
        return ClassPlan(plan, window)


def _if_any(votes: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor | None:
    """None where none of these entries has votes: a first prefill, which then never asks again."""
    return votes if votes is not None and bool(votes.index_select(0, slots).any()) else None


def _ragged(rows: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
    return torch.cat(rows), indptr(row.numel() for row in rows)


def indptr(lengths: Iterable[int]) -> tuple[int, ...]:
    """Where each of so many rows begins, and where the last ends."""
    return (0, *accumulate(int(length) for length in lengths))


__all__ = ["BatchPlan", "ClassPlan", "Planner", "indptr"]
