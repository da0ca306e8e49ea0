"""The decisions that the tensor parallel ranks of a server take together.

Every rank runs the same scheduler over the same requests, so all must decide the same. What could
differ between them (what a store or a tier answers, a clock, the last digits of a float) is found
by the first rank and told to the others.

The calls here wait for all ranks. They belong to the thread that starts the engine and then runs
the scheduler, at places that every rank comes by, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kvtier.heads.profile import ModelShape
from kvtier.retention.scorers import TokenScorer

T = TypeVar("T")


class Ranks:
    """The ranks that share the KV heads of one replica, and this process's place among them.

    group: SGLang's GroupCoordinator of them; None for a server of one rank.
    replica: which of a server's data parallel replicas they are.
    """

    def __init__(self, group: Any = None, replica: int = 0) -> None:
        self.replica = replica
        self.size: int = 1 if group is None else group.world_size
        self.rank: int = 0 if group is None else group.rank_in_group
        self._group = group

    @classmethod
    def of_this_process(cls) -> Ranks:
        """Return the ranks that SGLang has set up, once it has."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        group = parallel.attn_tp_group if parallel.attn_tp_size > 1 else None
        return cls(group, getattr(parallel, "dp_rank", None) or 0)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, find: Callable[[], T]) -> T:
        """Return what the first rank finds, on every rank; or raise what it raises."""
        if self.size == 1:
            return find()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told = [find(), None]
            except Exception as error:
                told = [None, error]
        group = self._group
        dist.broadcast_object_list(told, src=group.ranks[0], group=group.cpu_group)
        found, failure = told
        if failure is not None:
            raise failure
        return found

    def every(self, found: T) -> list[T]:
        """Return what each rank found, on every rank."""
        if self.size == 1:
            return [found]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, found, group=self._group.cpu_group)
        return told

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has, on every rank; may be `part` itself."""
        if self.size == 1:
            return part
        summed: torch.Tensor = self._group.all_reduce(part)
        return summed

    def scorer(self, scorer: TokenScorer, shape: ModelShape) -> TokenScorer:
        """A model's scorer as this rank uses it."""
        if self.size == 1:
            return scorer
        return scorer.among_ranks(shape.kv_heads_of_rank(self.rank, self.size), self.total)
