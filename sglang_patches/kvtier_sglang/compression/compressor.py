"""What happens to a context's KV when its turn ends.

Locality heads drop the span that `LocalityRule` names and keep one compensation entry of it. Where
a share of the context was asked for, CA heads keep only their best tokens of that span too
(selection.py), and the slots of the others go back to the pool.

    while prefilling   [ every token, exact                  ]
    turn ended         [ sink | compensation | recent | generated ]

The compressor changes slots and what a node says of itself; the tree's accounts are the caller's.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.scorers import TokenScorer
from kvtier.retention.shares import Choice, Everything, ShareRule, Turn
from kvtier.tier.blobs.turns import NodeRecord
from kvtier_sglang.compression.retention import Retention, mean_nll
from kvtier_sglang.compression.selection import TokenSelection
from kvtier_sglang.pool.allocator import HeadSplitAllocator


class Compressible(Protocol):
    """The part of a context that one node of the tree holds; see KvNode."""

    start: int
    prompt_stop: int
    value: torch.Tensor
    dropped: DroppedSpan
    compressed: bool
    choice: Choice | None
    kept_entries: int | None

    @property
    def stop(self) -> int: ...


class Freed(NamedTuple):
    """Slots of each class that went back to the pool."""

    ca: int = 0
    locality: int = 0


class Compressor:
    """See the module docstring.

    rule:      what locality heads keep.
    retention: how much of a context CA heads keep; `selection` says which tokens. Without a
               selection they keep everything, whatever `retention` says.
    """

    def __init__(
        self,
        allocator: HeadSplitAllocator,
        rule: LocalityRule,
        *,
        retention: Retention | None = None,
        selection: TokenSelection | None = None,
    ) -> None:
        self.allocator = allocator
        self.rule = rule
        self.retention = retention or Retention(Everything())
        self.selection = selection
        self.counters: Counter[str] = Counter(
            compressed_nodes=0, dropped_tokens=0, compacted_tokens=0
        )

    @property
    def share(self) -> ShareRule:
        """The rule that is in force for CA heads."""
        return Everything() if self.selection is None else self.retention.rule

    @property
    def scorer(self) -> TokenScorer | None:
        """What says which tokens CA heads keep; None where they keep all."""
        if self.selection is None or self.allocator.pool.state is None:
            return None
        return self.selection.scorer

    def report(self) -> dict[str, Any]:
        """For the server's internal state: what was let go, and by which scorer and share rule."""
        retention, scorer = self.retention.report(), self.scorer
        if scorer is not None:
            retention["scorer"] = {"name": scorer.name, **scorer.parameters()}
        return {**self.counters, "retention": retention}

    def end_turn(self, node: Compressible, held_before: Iterable[int]) -> Freed:
        """Compress a node that no request has locked. held_before: CA entries that the nodes
        before it keep, each."""
        span = self.rule.dropped(node.start, node.stop, node.prompt_stop)
        return self._compress(node, span, lambda: self._wanted(node, span, held_before))

    def as_recorded(self, node: Compressible, record: NodeRecord) -> Freed:
        """Compress a restored node as it had been, whatever today's rules would choose."""
        choice = Choice(record.kept, "as-recorded")
        return self._compress(node, DroppedSpan(*record.dropped), lambda: choice)

    def _compress(
        self, node: Compressible, span: DroppedSpan, choose: Callable[[], Choice]
    ) -> Freed:
        """choose: how many entries of the span CA heads keep, where they do not keep all."""
        node.compressed = True
        self.allocator.settle(node.value)
        if not span.num_tokens:
            return Freed()
        self.counters["compressed_nodes"] += 1
        locality = self.drop(node, span).locality
        if self.selection is None:
            return Freed(0, locality)
        node.choice = choose()
        return Freed(self._keep(node, self.selection, node.choice.kept_tokens), locality)

    def _wanted(self, node: Compressible, span: DroppedSpan, held_before: Iterable[int]) -> Choice:
        """How many entries of the dropped span the share rule keeps."""
        prompt_stop = min(node.prompt_stop, node.stop)
        nll = None
        if self.retention.rule.needs_nll:
            nll = mean_nll(self.allocator.pool.nll[node.value[: prompt_stop - node.start]])
        turn = Turn(
            prompt_tokens=prompt_stop - node.start,
            droppable_tokens=span.num_tokens,
            held_tokens=sum(held_before),
            nll=nll,
        )
        return self.retention.choose(turn)

    def slide_window(self, node: Compressible) -> Freed:
        """Streaming prefill: drop what has left the recent window by the node's end."""
        stop = node.stop
        span = self.rule.dropped(node.start, stop, min(stop, node.prompt_stop))
        return self.drop(node, span) if span.num_tokens else Freed()

    def drop(self, node: Compressible, span: DroppedSpan) -> Freed:
        """Let locality heads keep one entry of a span, or none."""
        freed = self.allocator.drop(
            node.value[span.begin : span.end], compensation=self.rule.compensation
        )
        node.dropped = span
        self.counters["dropped_tokens"] += freed
        return Freed(0, freed)

    def _keep(self, node: Compressible, selection: TokenSelection, keep: int) -> int:
        """Let CA heads keep their best `keep` entries of the dropped span; returns how many slots
        the others gave back."""
        span = node.dropped
        slots = node.value[span.begin : span.end]
        stay, free = selection.compact(slots, node.start + span.begin, keep)
        node.kept_entries = selection.entries(stay.numel(), keep)
        if not free.numel():
            return 0
        node.value[span.begin : span.end] = self.allocator.compact(stay, free)
        self.counters["compacted_tokens"] += free.numel()
        return free.numel()


__all__ = ["Compressible", "Compressor", "Freed"]
