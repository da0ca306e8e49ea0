"""Layers that attend to their newest tokens only, beside others that attend to all.

A query sees the last `tokens` tokens up to itself, by their slots: what is in the window is never
compressed, but for requests that leave a turn in its middle, whose windows begin behind the last
token that is not dense any more. When decoding, a window is a list of dense tokens like any other;
a prefill goes in blocks of queries, each over the tokens that any of them sees, by PyTorch's
attention under a mask.

Forward thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvtier_kernels import AttentionKernels, RaggedKV, with_sinks
from kvtier_kernels.fp8 import take
from kvtier_sglang.attention.lists import Dense, blank_tables
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool

# Queries of a block; of a window that is larger, as many as it has tokens.
LEAST_BLOCK = 256


class Windows:
    """See the module docstring. tokens: of a window, a query's own included."""

    def __init__(
        self, kernels: AttentionKernels, pool: HeadPagedKVPool, rows: int, tokens: int
    ) -> None:
        """rows: the most requests of a pass."""
        self.tokens = tokens
        self._kernels, self._cells = kernels.lists, pool.cells
        self._shape = pool.layer_num, pool.head_num
        # A request of a pass has the row of its place in the batch.
        self._tables = blank_tables(pool, rows, tokens)
        self._steps = torch.arange(tokens, device=pool.device)
        self._rows = torch.arange(rows, device=pool.device)
        # The plans of passes and of CUDA graphs, keyed by their number of requests.
        self._last: dict[int, Any] = {}
        self._of_graphs: dict[int, Any] = {}

    def tails(self, dense: Sequence[torch.Tensor], begins: torch.Tensor) -> list[torch.Tensor]:
        """Return the slots of each request's prefix that its new tokens may see: int64.

        dense: the slots of its dense tokens; begins: how many of them stand before one that is not.
        """
        first = begins.tolist()
        return [
            slots[max(len(slots) - self.tokens + 1, begin) :]
            for slots, begin in zip(dense, first, strict=True)
        ]

    def plan(self, dense: Dense, *, recorded: bool = False) -> Any:
        """A plan of a decoding pass over requests whose newest token is their last dense one."""
        requests = dense.counts.numel()
        begins = torch.maximum(dense.counts - self.tokens, dense.begins)
        at = (begins[:, None] + self._steps).clamp_max(dense.slots.shape[1] - 1)
        self._tables.slots[:requests] = dense.slots[dense.rows[:, None], at]
        known = self._of_graphs if recorded else self._last
        counts = (dense.counts - begins).clamp_min(0)
        known[requests] = self._kernels.plan(
            self._tables, self._rows[:requests], counts, *self._shape, known.get(requests)
        )
        return known[requests]

    def decode(
        self, q: torch.Tensor, plan: Any, layer: int, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See ListKernels.decode and kvtier_kernels.with_sinks; the output alone."""
        state = self._kernels.decode(q, self._cells, plan, layer, scale)
        return state.o if sinks is None else with_sinks(state, sinks).o

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        tails: Sequence[torch.Tensor],
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """New tokens over themselves and over the `tails` of their prefixes.

        q: [tokens, heads, group, dim]; k, v: [tokens, heads, dim]; request i owns the rows
        q_indptr[i]:q_indptr[i + 1]; sinks: [heads, group] or None. Returns the output, as q.
        """
        out = torch.empty_like(q)
        for (begin, end), tail in zip(pairwise(q_indptr), tails, strict=True):
            keys, values = (
                torch.cat([take(held, 0, tail).to(q.dtype), new[begin:end].to(q.dtype)])
                for held, new in ((kv.k, k), (kv.v, v))
            )
            out[begin:end] = over_window(q[begin:end], keys, values, self.tokens, scale, sinks)
        return out


def over_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of a request, each over the last `window` tokens up to itself.

    q: [tokens, heads, group, dim]; k, v: [entries, heads, dim], whose last are the tokens' own;
    sinks: [heads, group], see kvtier_kernels.with_sinks. Returns the output, as q.
    """
    tokens, group, dim = len(q), *q.shape[2:]
    before = len(k) - tokens
    block = max(window, LEAST_BLOCK)
    parts = []
    for begin in range(0, tokens, block):
        end = min(begin + block, tokens)
        first, last = max(0, before + begin - window + 1), before + end
        row = torch.arange(before + begin, last, device=q.device)[:, None]
        key = torch.arange(first, last, device=q.device)
        sees = (key <= row) & (key > row - window)
        queries = q[begin:end].permute(1, 2, 0, 3)
        keys, values = (x[first:last].transpose(0, 1) for x in (k, v))
        if sinks is not None:
            # One entry more, which all see, by a dimension of its own: PyTorch's attention returns
            # no log-sum-exp to merge by. Its kernels want dimensions in eights.
            sees = pad(sees, (1, 0), value=True)
            queries = pad(queries, (0, 8))
            keys, values = (pad(x, (0, 8, 1, 0)) for x in (keys, values))
            queries[..., dim] = sinks.float()[..., None] / scale
            keys[:, 0, dim] = 1
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=sees, scale=scale)
        parts.append(found[..., :dim].permute(2, 0, 1, 3))
    return torch.cat(parts) if parts else torch.empty_like(q)
