"""Where the states of a call go, and how the parts of split KV become one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from kvtier_kernels.base import AttentionState, HeadMap
from kvtier_kernels.triton_backend.attention.merge import merge_parts
from kvtier_kernels.triton_backend.launching import Launch

MERGE_PARTS = 32


@dataclass(frozen=True)
class Output:
    """Where a call's result goes: a state of its own, or some heads of what holds all of them.

    q: the call's queries, `[rows, heads, group, dim]`, of all KV heads where `heads` are some.
    """

    q: torch.Tensor
    heads: HeadMap | None = None
    out: torch.Tensor | None = None

    @property
    def mapped(self) -> bool:
        return self.heads is not None

    @property
    def num_heads(self) -> int:
        return self.q.shape[1] if self.heads is None else len(self.heads.heads)

    @property
    def heads_of_q(self) -> Sequence[int]:
        return range(self.num_heads) if self.heads is None else self.heads.heads

    @property
    def head_ids(self) -> torch.Tensor:
        """Any tensor, not read, where nothing is mapped."""
        return self.q if self.heads is None else self.heads.ids

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o, of all KV heads where mapped, and lse of this call's heads."""
        rows, _, group, dim = self.q.shape
        shape = (rows, self.num_heads, group, dim)
        if self.out is None:
            return state_buffers(shape, self.q.device, self.q.dtype)
        assert self.out.is_contiguous(), "heads are placed in what lies in one piece"
        return self.out, torch.empty(shape[:-1], dtype=torch.float32, device=self.q.device)


def merged(
    launch: Launch,
    part_o: torch.Tensor,
    part_lse: torch.Tensor,
    parts: torch.Tensor,
    output: Output,
) -> AttentionState:
    """The state of every row of the output, from the parts that it owns."""
    o, lse = output.buffers()
    rows, heads, group, dim = o.shape
    lanes = output.num_heads * group
    launch(
        merge_parts,
        (rows, lanes),
        part_o,
        part_lse,
        parts,
        output.head_ids,
        o,
        lse,
        heads * group,
        GROUP=group,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_P=MERGE_PARTS,
        MAPPED=output.mapped,
    )
    return AttentionState(o, lse)


def state_buffers(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty(shape, dtype=dtype, device=device)
    return o, torch.empty(shape[:-1], dtype=torch.float32, device=device)


__all__ = ["Output", "merged", "state_buffers"]
