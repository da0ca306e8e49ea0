"""The kernel contract, first part: new tokens over slot tables and over themselves. The second,
selection and merging, is in `selection.py`; the third, lists of entries in pages, over which all
decoding goes, in `lists.py`; the fourth, prefix memories, in `memory/base.py`.

One call serves one layer for a batch of requests, whose prefixes may hold different numbers of
tokens:

    q         [tokens, heads, group, dim]   heads = KV heads of the layer, group = GQA group
    kv.k      [slots,  heads, dim]          any strides; the pool decides the physical layout
    slots     [entries]                     the prefixes of all requests, one after another
    indptr    requests + 1 ints             request i owns slots[indptr[i]:indptr[i + 1]]

Every result is an `AttentionState` (o, lse) with the natural-log LSE, so results over
disjoint blocks of KV can be merged with `states.merge_states`.

Ownership: kernels borrow every tensor and keep none of them beyond the call, except that a
plan keeps its slot table. A plan may be shared by all layers of a step; it remembers what they
asked for. Thread safety: one thread and one stream per instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
    """A subset of a layer's KV heads.

    heads: ascending indices. ids: the same, [heads] int64 on the device, so that using them waits
           for nothing.
    """

    heads: tuple[int, ...]
    ids: torch.Tensor

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """These heads of x [tokens, all KV heads, ...]; a view where they are adjacent."""
        first, last = self.heads[0], self.heads[-1]
        if last - first + 1 == len(self.heads):
            return x[:, first : last + 1]
        return x.index_select(1, self.ids)


class RaggedKV(NamedTuple):
    """The buffers of one layer: k, v [slots, heads, dim], in the query's dtype or one that converts
    to it (fp8)."""

    k: torch.Tensor
    v: torch.Tensor


class AttentionKernels(ABC):
    """One backend of the contract in this module's docstring.

    name:            what users choose it by.
    selection:       how it selects and merges; unlike the rest, for any thread and stream.
    memory:          how it attends over fixed prefixes that memories stand for.
    lists:           how it attends over lists of entries in pages.
    plans_on_device: whether `lists.plan` asks the device for nothing, so that CUDA graphs record
                     it.
    """

    name: str
    selection: SelectionKernels
    memory: MemoryKernels
    lists: ListKernels
    plans_on_device = False

    def reads(self, dtype: torch.dtype) -> bool:
        """Return whether this machine's kernels read KV of that dtype."""
        return True

    @abstractmethod
    def plan(self, slots: torch.Tensor, indptr: Sequence[int]) -> Any:
        """Prepare a slot table for `extend`; reusable by every layer of a step.

        slots: [entries] int64. indptr: requests + 1 non-decreasing ints, from 0 to len(slots).
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
    ) -> AttentionState:
        """New tokens of each request over its planned prefix entries and, causally, themselves.

        q: [tokens, heads, group, dim]; k_new, v_new: [tokens, heads, dim]; request i owns the
        rows q_indptr[i]:q_indptr[i + 1]. The plan holds the prefix only. scale multiplies q.k
        (usually 1 / sqrt(dim)).
        """

    def extend_shapes(self, q: torch.Tensor, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        """Shapes (new tokens, prefix entries) of one request whose first `extend` takes longer than
        later ones, because something is compiled or prepared then. An engine calls `extend` with
        each of them before it serves.

        q: queries of the shape, dtype and device that will come. chunk: the most new tokens of a
        call. context: the most entries of a request.
        """
        yield 1, 1

    def store(self, k: torch.Tensor, v: torch.Tensor, kv: RaggedKV, slots: torch.Tensor) -> None:
        """Write new tokens into a layer's buffers.

        k, v: [tokens, heads, dim]; slots: [tokens] int64, where each goes in kv.k and kv.v, which
        may have another dtype (fp8).
        """
        put(kv.k, slots, k)
        put(kv.v, slots, v)

    @abstractmethod
    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        """The state over the union of two disjoint blocks of KV; see `states.merge_states`."""
