"""The kernel contract, first part: ragged attention over slot tables, with votes. The second,
selection and merging, is in `selection.py`; the third, lists of entries in pages, in `lists.py`.

One call serves one *head class* of one layer for a batch of requests. Requests may hold
different numbers of entries; all heads of a class hold the same number.

    q         [tokens, heads, group, dim]   heads = KV heads of the class, group = GQA group
    kv.k      [slots,  heads, dim]          any strides; the pool decides the physical layout
    slots     [entries]                     the entries of all requests, one after another
    indptr    requests + 1 ints             request i owns slots[indptr[i]:indptr[i + 1]]

Every result is an `AttentionState` (o, lse) with the natural-log LSE, so results over
disjoint blocks of KV can be merged with `states.merge_states`.

Ownership: kernels borrow every tensor and keep none of them beyond the call, except that a
plan keeps its slot table. A plan may be shared by all layers of a step; it remembers what they
asked for, and `plan_on_device(into=)` overwrites it, so who reads it must be ahead of that in
the same stream. Thread safety: one thread and one stream per instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvtier_kernels.fp8 import put
from kvtier_kernels.lists import ListKernels
from kvtier_kernels.memory.base import MemoryKernels
from kvtier_kernels.selection import SelectionKernels
from kvtier_kernels.states import AttentionState as AttentionState


class KernelUnavailableError(RuntimeError):
    """A kernel backend was asked for that is unknown or cannot run here."""


class HeadMap(NamedTuple):
    """Some of a layer's KV heads: those of one head class.

    heads: ascending indices. ids: the same, [heads] int64 on the device, so that using them waits
           for nothing.
    """

    heads: tuple[int, ...]
    ids: torch.Tensor

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """These heads of x [tokens, all KV heads, ...]; a view where they are adjacent."""
        adjacent = self._adjacent
        return x.index_select(1, self.ids) if adjacent is None else x[:, adjacent]

    def place(self, out: torch.Tensor, o: torch.Tensor) -> None:
        """Store o [tokens, heads, ...] at these heads of out [tokens, all KV heads, ...]."""
        adjacent = self._adjacent
        if adjacent is None:
            out.index_copy_(1, self.ids, o)
        else:
            out[:, adjacent] = o

    @property
    def _adjacent(self) -> slice | None:
        first, last = self.heads[0], self.heads[-1]
        return slice(first, last + 1) if last - first + 1 == len(self.heads) else None


class RaggedKV(NamedTuple):
    """The buffers of one head class of one layer.

    k, v:      [slots, heads, dim], in the query's dtype or one that converts to it (fp8).
    log_votes: float32 added to the logits of an entry (KeepKV: ln p), [slots], or
               [slots, heads, group] where every query head has its own; None when every entry
               stands for exactly one token.
    """

    k: torch.Tensor
    v: torch.Tensor
    log_votes: torch.Tensor | None = None


@dataclass(frozen=True)
class Window:
    """Streaming prefill: which tokens of its own turn a query may see.

    A query at position p sees the key at position t of the same turn when
    ``t <= p and (t < sink_tokens or t > p - recent_tokens)``. Entries settled before the
    turn began are visible to all.

    q_start:   per request, the position of its first query.
    positions: [entries] int64, the position of every prefix entry in the plan's order.
    settled:   [entries] bool, whether the entry belongs to a turn that has ended.
    """

    sink_tokens: int
    recent_tokens: int
    q_start: Sequence[int]
    positions: torch.Tensor
    settled: torch.Tensor


class AttentionKernels(ABC):
    """One backend of the contract in this module's docstring.

    name:            what users choose it by.
    selection:       how it selects and merges; unlike the rest, for any thread and stream.
    memory:          how it attends over fixed prefixes that memories stand for.
    lists:           how it attends over lists of entries in pages.
    plans_on_device: whether `plan_on_device` and `empty_plan` are there.
    """

    name: str
    selection: SelectionKernels
    memory: MemoryKernels
    lists: ListKernels
    plans_on_device = False

    def reads(self, dtype: torch.dtype) -> bool:
        """Whether KV may be of that dtype on this machine."""
        return True

    @abstractmethod
    def plan(
        self,
        slots: torch.Tensor,
        indptr: Sequence[int],
        log_votes: torch.Tensor | None = None,
    ) -> Any:
        """Prepare a slot table for `decode` and `extend`; reusable by every layer of a step.

        slots:     [entries] int64, indices into the class's slots.
        indptr:    requests + 1 non-decreasing ints, from 0 to len(slots).
        log_votes: [slots] float32, anything but 0 where an entry has votes in some layer, or
                   None where none has; the votes themselves come with each call's RaggedKV.
        """

    def plan_on_device(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        max_length: int,
        image: torch.Tensor | None = None,
        *,
        voted: bool = False,
        into: Any = None,
    ) -> Any:
        """A plan for `decode` (not `extend`), made without waiting for the device.

        table:      [rows, width] int32 or int64, columns adjacent: token slots, 0 where there is
                    none.
        rows:       [requests] int32 or int64, each request's row.
        lengths:    [requests] int32 or int64, how many columns of its row.
        max_length: no length is more than this, and it is at least 1.
        image:      [slots] int32 or int64, another space's slot by token slot, 0 where there is
                    none.
        voted:      whether entries may have votes; an `empty_plan` knows it already.
        into:       an `empty_plan` of as many requests and room for requests * max_length entries,
                    to fill where the addresses must stay the same: CUDA graphs can record that.

        Request i's entries are what is not 0 of its slots, or of their images, in order. Returns
        the plan. Raises ValueError for an `into` that does not fit, and KernelUnavailableError
        where `plans_on_device` is False.
        """
        raise KernelUnavailableError(f"kernels: {self.name!r} plans on the host")

    def empty_plan(self, slots: torch.Tensor, requests: int, *, voted: bool) -> Any:
        """A plan of so many requests for `plan_on_device` to fill.

        slots: [entries] int32, room for all that they may hold together. Plans that are never
               used at the same time may share it.
        """
        raise KernelUnavailableError(f"kernels: {self.name!r} plans on the host")

    @abstractmethod
    def decode(self, q: torch.Tensor, kv: RaggedKV, plan: Any, scale: float) -> AttentionState:
        """One query per request over all its entries (its own token included).

        q: [requests, heads, group, dim]. scale multiplies q.k (usually 1 / sqrt(dim)).
        """

    @abstractmethod
    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: Any,
        scale: float,
        window: Window | None = None,
    ) -> AttentionState:
        """New tokens of each request over its planned prefix entries and, causally, themselves.

        q: [tokens, heads, group, dim]; k_new, v_new: [tokens, heads, dim]; request i owns the
        rows q_indptr[i]:q_indptr[i + 1]. The plan holds the prefix only. `window` restricts
        what is seen of the request's own turn (streaming prefill).
        """

    def extend_shapes(self, q: torch.Tensor, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        """Shapes (new tokens, prefix entries) of one request whose first `extend` takes longer than
        later ones, because something is compiled or prepared then. An engine calls `extend` with
        each of them before it serves.

        q: queries of the shape, dtype and device that will come. chunk: the most new tokens of a
        call. context: the most entries of a request.
        """
        yield 1, 1

    # The same for one head class in place, which backends may do without copies of its heads.

    def store(
        self, k: torch.Tensor, v: torch.Tensor, kv: RaggedKV, slots: torch.Tensor, heads: HeadMap
    ) -> None:
        """Write new tokens into a class's buffers.

        k, v: [tokens, all KV heads, dim]; slots: [tokens] int64, where each goes in kv.k and kv.v,
        which may have another dtype (fp8).
        """
        put(kv.k, slots, heads.select(k))
        put(kv.v, slots, heads.select(v))

    def decode_heads(
        self,
        q: torch.Tensor,
        kv: RaggedKV,
        plan: Any,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
    ) -> None:
        """`decode` of these heads of q into the same heads of out, whose other heads stay.

        q, out: [requests, all KV heads, group, dim]; out is contiguous, of q's dtype.
        """
        heads.place(out, self.decode(heads.select(q), kv, plan, scale).o)

    def extend_heads(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: Any,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
        window: Window | None = None,
    ) -> None:
        """`extend` of these heads of q, k_new, v_new into the same heads of out, as above."""
        q, k_new, v_new = (heads.select(x) for x in (q, k_new, v_new))
        heads.place(out, self.extend(q, k_new, v_new, q_indptr, kv, plan, scale, window).o)

    @abstractmethod
    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        """The state over the union of two disjoint blocks of KV; see `states.merge_states`."""
