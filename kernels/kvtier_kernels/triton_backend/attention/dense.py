"""Long prefills by a library, from copies of their prefix that lie in one piece.

On a Hopper GPU `extend_blocks`, which gathers tiles of entries by slot, reaches less than half of
cuDNN's speed (`benchmarks/README.md`). Where thousands of new tokens read an entry, copying it into
one piece first costs little. Whole blocks of the prefix go to the library. What is left of it goes
to `extend_blocks`, which then computes the new tokens, too, and the attention states are merged.
Where nothing is left, the library computes the new tokens as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch.backends import cuda as sdpa

from kvtier_kernels.base import AttentionState, RaggedKV
from kvtier_kernels.fp8 import take
from kvtier_kernels.triton_backend.launching import has_wide_products, is_interpreted, to_device
from kvtier_kernels.triton_backend.planning.plans import TritonPlan


class DenseAttention(Protocol):
    """Attention of one KV head over keys that lie in one piece."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[tokens, group, dim]`; k, v `[entries, dim]`; causal: as many entries as tokens, of
        which a token sees those up to itself, else every one sees all. Returns o, as q, and the
        natural log-sum-exp `[tokens, group]`, float32."""


class Part(NamedTuple):
    """One request's new tokens (rows of the call), and the slots of the blocks that they read."""

    rows: slice
    blocks: tuple[torch.Tensor, ...]


class Division(NamedTuple):
    """The division of a call between the library and the other kernel.

    rest: the plan without the entries of the parts. None where that leaves no entry and every
          request is a part, so that the library computes the new tokens, too.
    """

    parts: tuple[Part, ...]
    rest: TritonPlan | None


@dataclass(frozen=True)
class DensePrefixes:
    """Chooses the parts of a plan that a library computes, and merges their states.

    attend: the library.
    blocks: entries of a block, descending. cuDNN prepares each new shape for 50 ms, so there are
            few: a prefix is cut in the largest blocks that it fills.
    rows:   new tokens are filled up to a multiple of this, for the same reason; a request that has
            less than three quarters of it is left to the other kernel.
    """

    attend: DenseAttention
    blocks: tuple[int, ...] = (65536, 32768, 16384, 8192)
    rows: int = 4096

    def shapes(self, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        """New tokens and entries of every call there may be, in passes of up to `chunk` tokens."""
        for rows in range(self.rows, chunk + self.rows, self.rows):
            for entries in (0, *self.blocks):
                if rows <= chunk and entries <= context:
                    yield rows, entries

    def divide(self, plan: TritonPlan, q_indptr: Sequence[int]) -> Division | None:
        """Return the division of a call, computed once for all layers of a step. It is None where
        no request is long enough."""
        key = tuple(q_indptr)
        if key not in plan.divisions:
            plan.divisions[key] = self._divide(plan, key)
        known: Division | None = plan.divisions[key]
        return known

    def _divide(self, plan: TritonPlan, q_indptr: Sequence[int]) -> Division | None:
        parts, rest, bounds = [], [], [0]
        requests = zip(pairwise(plan.bounds), pairwise(q_indptr), strict=True)
        for (begin, end), (first, last) in requests:
            if 4 * (last - first) >= 3 * self.rows:
                taken = []
                for block in self.blocks:
                    while end - begin >= block:
                        taken.append(plan.slots[begin : begin + block])
                        begin += block
                parts.append(Part(slice(first, last), tuple(taken)))
            rest.append(plan.slots[begin:end])
            bounds.append(bounds[-1] + end - begin)
        if len(parts) == plan.requests and not bounds[-1]:
            return Division(tuple(parts), None)
        parts = [part for part in parts if part.blocks]
        if not parts:
            return None
        on_device = to_device(bounds, plan.slots.device)
        left = TritonPlan(torch.cat(rest), on_device, tuple(bounds))
        return Division(tuple(parts), left)

    def new_tokens(
        self,
        parts: Sequence[Part],
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        scale: float,
        state: AttentionState,
    ) -> None:
        """Set the state of the parts' rows to that of their new tokens over themselves."""
        for rows, _ in parts:
            count = rows.stop - rows.start
            for head in range(q.shape[1]):
                queries, k, v = (self._filled(x[rows, head]) for x in (q, k_new, v_new))
                o, lse = self.attend(queries, k, v, scale, causal=True)
                state.o[rows, head] = o[:count]
                state.lse[rows, head] = lse[:count]

    def add(
        self,
        parts: Sequence[Part],
        q: torch.Tensor,
        kv: RaggedKV,
        scale: float,
        state: AttentionState,
    ) -> None:
        """Merge the parts' prefixes into the state over the rest, in place."""
        for rows, blocks in parts:
            for head in range(q.shape[1] if blocks else 0):
                queries = self._filled(q[rows, head])
                total = state.o[rows, head].float()
                lse = state.lse[rows, head]
                for slots in blocks:
                    k, v = (take(x[:, head], 0, slots).to(q.dtype) for x in (kv.k, kv.v))
                    part = self.attend(queries, k, v, scale, causal=False)
                    o, log = (x[: len(lse)] for x in part)
                    both = torch.logaddexp(lse, log)
                    total.mul_((lse - both).exp_().unsqueeze(-1))
                    total.addcmul_(o, (log - both).exp_().unsqueeze(-1))
                    lse = both
                state.o[rows, head] = total
                state.lse[rows, head] = lse

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with rows of zeros up to a multiple of `rows`."""
        missing = -len(x) % self.rows
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`DenseAttention` of half-precision tensors by the cuDNN that torch brings."""
    o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_as_batch(q, k, v), None, True, 0.0, causal, False, scale=scale
    )[:2]
    return o[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0]).transpose(0, 1)


def has_cudnn_attention(q: torch.Tensor) -> bool:
    """Return whether cuDNN computes attention of such queries, `[tokens, heads, group, dim]`, on
    this GPU, and the GPU is of a kind where it is the faster."""
    if q.device.type != "cuda" or is_interpreted() or not has_wide_products():
        return False
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    keys = q[:, 0, 0]
    q, k, v = _as_batch(q[:, 0], keys, keys)
    params = sdpa.SDPAParams(q, k, v, None, 0.0, False, True)
    return sdpa.can_use_cudnn_attention(params)


def _as_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in torch's layout: `[batch, heads, tokens, dim]`."""
    return q.transpose(0, 1)[None], k[None, None], v[None, None]


CUDNN = DensePrefixes(cudnn_attention)
