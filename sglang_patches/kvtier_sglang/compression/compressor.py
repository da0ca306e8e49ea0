"""The compression of a context's KV when its turn ends.

Of the span that `LocalityRule` names heads keep what the selection says (selection.py): the best
tokens of all heads, or by a head profile those of the anchored heads and one compensation entry of
the others. The slots that are not needed any more go back to the pool; where none would, the span
stays as it is, exact.

    while prefilling   [ every token, exact                  ]
    turn ended         [ sink | compensation | recent | generated ]

The compressor changes slots and what a node says of itself; the tree's accounts are the caller's.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.scorers import TokenScorer
from kvtier.retention.shares import Choice, Everything, ShareRule, Turn, whole_pages
from kvtier.tier.blobs.turns import NodeRecord
from kvtier_sglang.compression.retention import Retention, mean_nll
from kvtier_sglang.compression.selection import PackedSelection
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.tier.scopes import share_in


class Compressible(Protocol):
    """The part of a context that one node of the tree holds; see KvNode."""

    key: RadixKey
    start: int
    prompt_stop: int
    value: torch.Tensor
    dropped: DroppedSpan
    compressed: bool
    choice: Choice | None
    kept_entries: int | None

    @property
    def stop(self) -> int: ...


class Compressor:
    """See the module docstring.

    rule:      what of a turn is dropped, or kept in part.
    retention: how much of it anchored heads keep; `selection` says which tokens. Without a
               selection nothing is dropped, whatever `retention` says.
    """

    def __init__(
        self,
        allocator: BundleAllocator,
        rule: LocalityRule,
        *,
        retention: Retention | None = None,
        selection: PackedSelection | None = None,
    ) -> None:
        self.allocator = allocator
        self.rule = rule
        self.retention = retention or Retention(Everything())
        self.selection = selection
        self.counters: Counter[str] = Counter(compressed_nodes=0, compacted_tokens=0)

    @property
    def page(self) -> int:
        """Entries of a page of what is kept."""
        return self.allocator.pool.kept_page

    @property
    def share(self) -> ShareRule:
        """The rule that is in force for anchored heads."""
        return Everything() if self.selection is None else self.retention.rule

    @property
    def scorer(self) -> TokenScorer | None:
        """The scorer that says which tokens heads keep; None where they keep all."""
        if self.selection is None or self.allocator.pool.state is None:
            return None
        return self.selection.scorer

    def report(self) -> dict[str, Any]:
        """Return what was let go, and by which scorer and share rule, for the server's internal
        state."""
        retention, scorer = self.retention.report(), self.scorer
        if scorer is not None:
            retention["scorer"] = {"name": scorer.name, **scorer.parameters()}
        return {**self.counters, "retention": retention}

    def end_turn(self, node: Compressible, held_before: Iterable[int]) -> int:
        """Compress a node that no request has locked; returns how many slots it gave back.
        held_before: entries that anchored heads keep of the nodes before it, each."""
        span = self.rule.dropped(node.start, node.stop, node.prompt_stop)
        stop = min(node.prompt_stop, node.stop)
        return self._compress(node, span, lambda: self._wanted(node, span, stop, held_before))

    def end_part(self, node: Compressible, held_before: Iterable[int]) -> int:
        """The same of a part of a context behind which the newest tokens stay as they are."""
        span = self.rule.dropped_chunk(node.start, node.stop)
        return self._compress(node, span, lambda: self._wanted(node, span, node.stop, held_before))

    def end_chunk(self, node: Compressible, held_before: Iterable[int]) -> int:
        """The same of a chunk of a prompt, the next chunk of which is computed."""
        stop = max(node.start, min(node.stop, node.prompt_stop))
        span = self.rule.dropped_chunk(node.start, stop)
        return self._compress(node, span, lambda: self._wanted(node, span, stop, held_before))

    def chunk_slots(self, tokens: int) -> int:
        """Slots of a chunk of so many tokens of a prompt, once it is compressed."""
        rule = self.retention.rule
        if self.selection is None or isinstance(rule, Everything):
            return tokens
        kept = rule.choose(Turn(tokens, tokens)).kept_tokens
        return min(self.selection.slots_of(kept, tokens), tokens)

    def as_recorded(self, node: Compressible, record: NodeRecord) -> int:
        """Compress a restored node as it had been, whatever today's rules would choose."""
        span = DroppedSpan(*record.dropped)
        kept_all = record.kept == span.num_tokens
        choice = None if kept_all else Choice(record.kept, "as-recorded")
        return self._compress(node, span, lambda: choice)

    def _compress(
        self, node: Compressible, span: DroppedSpan, choose: Callable[[], Choice | None]
    ) -> int:
        """choose: how many entries of the span anchored heads keep; None: all."""
        node.compressed = True
        if self.selection is None or not span.num_tokens:
            return 0
        self.counters["compressed_nodes"] += 1
        node.choice = choose()
        slots = node.value[span.begin : span.end]
        keep = span.num_tokens if node.choice is None else node.choice.kept_tokens
        assert keep > 0, "a span of which nothing stays"
        first, alloc = node.start + span.begin, self.allocator.alloc_bundles
        stay, free = self.selection.compact(slots, first, keep, alloc)
        gone = span.num_tokens - stay.numel()
        if gone:
            node.dropped = span
            node.kept_entries = whole_pages(keep, span.num_tokens, self.page)
            row = self.allocator.compact(stay, free, span.num_tokens)
            node.value[span.begin : span.end] = row
            self.counters["compacted_tokens"] += gone
        return gone

    def _wanted(
        self,
        node: Compressible,
        span: DroppedSpan,
        prompt_stop: int,
        held_before: Iterable[int],
    ) -> Choice | None:
        """Return how many entries of the span the share rule keeps; None where there is none.
        prompt_stop: where the node's prompt ends."""
        if isinstance(self.retention.rule, Everything):
            return None
        nll = None
        if self.retention.rule.needs_nll:
            nll = mean_nll(self.allocator.pool.nll[node.value[: prompt_stop - node.start]])
        turn = Turn(
            prompt_tokens=prompt_stop - node.start,
            droppable_tokens=span.num_tokens,
            held_tokens=sum(held_before),
            nll=nll,
        )
        return self.retention.choose(turn, share_in(node.key.extra_key))
