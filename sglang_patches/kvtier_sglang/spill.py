"""Exact KV on its way to the tier, while the engine still has it.

A prompt's KV is exact until its turn ends, so it leaves in the meantime: whenever a chunk is
published, the spans that are whole by then are copied to host memory, and the rest happens in the
background (kvtier.tier.link). When the turn ends only its last, partial span is left, and the
record of how the turn was compressed.

    chunk published    [ span ][ span ][ ...      copied out, checksummed and sent behind our back
    turn ended         ... ][ tail ] + record     then locality slots are freed

A span that begins in an earlier turn needs that turn's last tokens: they are inside its recent
window, which is at least a span long. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.tier.client import Blob
from kvtier.tier.keys import SpanChain
from kvtier.tier.link import TierLink
from kvtier.tier.names import ContextNames, NamedChains
from kvtier.tier.turns import LAYOUT, NodeRecord, TurnRecord, tail_digest
from kvtier_sglang.spans import SpanCodec

# Copied out into one piece of host memory, which is held until the last of them is sent: so much
# may be held beyond what the link counts, and on its way on the device.
SPANS_TOGETHER = 8
BYTES_TOGETHER = 64 << 20


@dataclass
class Turn:
    """What was spilled of a request. spilled: tokens; exact: computed with nothing dropped."""

    chains: NamedChains
    spilled: int
    exact: bool

    @property
    def chain(self) -> SpanChain:
        return self.chains.exact if self.exact else self.chains.policy


class Spiller:
    """See the module docstring. names: of this server's KV."""

    def __init__(self, link: TierLink, codec: SpanCodec, names: ContextNames) -> None:
        self.link = link
        self.codec = codec
        self.names = names
        self.counters: Counter[str] = Counter()
        self._turns: dict[str, Turn] = {}

    def begin(self, rid: str, prefix_tokens: int, extra_key: str, *, exact: bool) -> None:
        """A request starts computing behind a prefix that the tree had."""
        span = self.names.span_tokens
        whole = prefix_tokens // span * span
        self._turns[rid] = Turn(self.names.chains(extra_key), whole, exact)

    def known(self, rid: str) -> bool:
        return rid in self._turns

    def published(self, rid: str, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """The first tokens of a request, as far as they are computed, with their CA slots (any
        integers)."""
        turn = self._turns.get(rid)
        if turn is None or not self.link.healthy:
            return
        span = self.names.span_tokens
        stop = len(token_ids) // span * span
        if stop <= turn.spilled:
            return
        turn.chains.extend(token_ids)
        self._spill(turn, turn.spilled, stop, slots[turn.spilled : stop].to(torch.int64))
        turn.spilled = stop

    def _spill(self, turn: Turn, begin: int, stop: int, slots: torch.Tensor) -> None:
        """Send the whole spans of [begin, stop) that are exact on the device."""
        span = self.names.span_tokens
        first, count = begin // span, (stop - begin) // span
        exact = self.codec.exact_spans(slots, count)
        if not all(exact):
            # Nobody could use what comes behind a gap, but a later gap costs only itself.
            self.counters["spans_not_exact"] += exact.count(False)
            for index, one in enumerate(exact):
                if one:
                    part = slots[index * span : (index + 1) * span]
                    self._send(turn.chain.keys[first + index : first + index + 1], part)
            return
        self._send(turn.chain.keys[first : first + count], slots)

    def _send(self, keys: Sequence[bytes], slots: torch.Tensor) -> None:
        """Send equal spans that follow each other, as far as the link takes them."""
        tokens = slots.numel() // len(keys)
        layout = self.codec.layout(tokens)
        encoded = layout.encode()
        together = max(1, min(SPANS_TOGETHER, BYTES_TOGETHER // layout.num_bytes))
        for first in range(0, len(keys), together):
            some = keys[first : first + together]
            part = slots[first * tokens : (first + len(some)) * tokens]
            payload = self.codec.gather(part, len(some))
            rows = zip(some, payload.rows, strict=True)
            blobs = [Blob(key, encoded, [memoryview(row.numpy())]) for key, row in rows]
            taken = self.link.put(blobs, ready=payload.ready)
            self.counters["spans_spilled"] += taken
            self.counters["spill_bytes"] += taken * layout.num_bytes
            if taken < len(some):
                self.counters["spans_shed"] += len(keys) - first - taken
                return

    def ended(self, rid: str, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """The turn ended; nothing of it is freed yet. Spills its last, partial span."""
        self.published(rid, token_ids, slots)
        turn = self._turns.get(rid)
        if turn is None or not self.link.healthy:
            return
        turn.chains.extend(token_ids)
        tail = list(token_ids[turn.spilled :])
        if 0 < len(tail) < self.names.span_tokens:
            part = slots[turn.spilled :].to(torch.int64)
            if self.codec.exact_spans(part, 1) == [True]:
                key = turn.chain.tail_key(turn.spilled // self.names.span_tokens, tail)
                self._send([key], part)

    def compressed(self, rid: str, token_ids: Sequence[int], nodes: Sequence[NodeRecord]) -> None:
        """The turn's nodes are what they will be: store the record of them, and forget the turn."""
        turn = self._turns.pop(rid, None)
        if turn is None or not nodes or not self.link.healthy:
            return
        # The tier may have been away when the turn's spans were due.
        turn.chains.extend(token_ids)
        whole = len(token_ids) // self.names.span_tokens
        tail = token_ids[whole * self.names.span_tokens :]
        record = TurnRecord(nodes=tuple(nodes), tail=tail_digest(tail))
        key = turn.chains.policy.turns_key(whole)
        self.link.put([Blob(key, LAYOUT, [record.encode()])], replace=True)

    def forget(self, rid: str) -> None:
        """The request is gone, or will start again."""
        self._turns.pop(rid, None)


__all__ = ["Spiller"]
