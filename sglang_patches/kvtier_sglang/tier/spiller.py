"""Exact KV on its way to the tier, while the engine still has it.

A prompt's KV is exact until its turn ends, so it leaves in the meantime: whenever a chunk is
published, the spans that are whole by then are copied to host memory, and the rest happens in the
background (kvtier.tier.link.link). When the turn ends only its last, partial span is left, and the
record of how the turn was compressed. What the link has no room for stays due until then.

    chunk published    [ span ][ span ][ ...      copied out; checksummed and sent later
    turn ended         ... ][ tail ] + record     then slots are freed

A span that begins in an earlier turn needs that turn's last tokens: they are inside its recent
window, which is at least a span long. One that begins in the prefix that a memory stands for has
zeros for the prefix's tokens. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from kvtier.tier.blobs.keys import Scope, SpanChain
from kvtier.tier.blobs.names import ContextNames, NamedChains
from kvtier.tier.blobs.turns import LAYOUT, MAX_NODES, NodeRecord, TurnRecord, tail_digest
from kvtier.tier.client import Blob
from kvtier.tier.link.link import TierLink
from kvtier_sglang.tier.codec import SpanCodec

# Copied out into one piece of host memory, which is held until the last of them is sent: so much
# may be held beyond what the link counts, and on its way on the device.
SPANS_TOGETHER = 8
BYTES_TOGETHER = 64 << 20


@dataclass
class Turn:
    """What was spilled of a request.

    spilled: tokens that are dealt with. exact: computed with nothing dropped. memory_tokens: of its
    prefix memory. sent: tokens that the link took. group: of its puts.
    """

    chains: NamedChains
    spilled: int
    exact: bool
    memory_tokens: int = 0
    sent: int = 0
    group: object = field(default_factory=object)

    @property
    def chain(self) -> SpanChain:
        return self.chains.exact if self.exact else self.chains.policy

    def blank(self, begin: int) -> int:
        """How many tokens from `begin` on have no KV."""
        return max(self.memory_tokens - begin, 0)


class Spiller:
    """See the module docstring. names: of this server's KV."""

    def __init__(self, link: TierLink, codec: SpanCodec, names: ContextNames) -> None:
        self.link = link
        self.codec = codec
        self.names = names
        self.counters: Counter[str] = Counter()
        self._turns: dict[str, Turn] = {}

    def begin(self, rid: str, prefix_tokens: int, scope: Scope, *, exact: bool) -> None:
        """A request starts computing behind a prefix that the tree had."""
        span = self.names.span_tokens
        whole = prefix_tokens // span * span
        self._turns[rid] = Turn(self.names.chains(scope), whole, exact, scope.memory_tokens)

    def known(self, rid: str) -> bool:
        return rid in self._turns

    def published(self, rid: str, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """The first tokens of a request, as far as they are computed, with their slots (any
        integers)."""
        turn = self._turns.get(rid)
        span = self.names.span_tokens
        stop = len(token_ids) // span * span
        if turn is None or stop <= turn.spilled or not self._fitting(span):
            return
        turn.chains.extend(token_ids)
        due = slots[turn.spilled : stop].to(torch.int64)
        turn.spilled += span * self._spill(turn, turn.spilled // span, due)

    def _fitting(self, num_tokens: int) -> int:
        """Spans of that many tokens which the link takes."""
        room = self.link.room_bytes
        return room // self.codec.layout(num_tokens).num_bytes if room else 0

    def _spill(self, turn: Turn, first: int, slots: torch.Tensor) -> int:
        """Send the spans from the `first` one on that are exact on the device; returns how many are
        dealt with."""
        span = self.names.span_tokens
        exact = self.codec.exact_spans(slots, slots.numel() // span, turn.blank(first * span))
        done = 0
        # A span behind a gap is never looked up, but a gap in what comes later costs only itself.
        for alike, members in groupby(exact):
            count = len(list(members))
            if alike:
                keys = turn.chain.keys[first + done : first + done + count]
                begin = (first + done) * span
                sent = self._send(turn, keys, slots[done * span : (done + count) * span], begin)
                if sent < count:
                    return done + sent
            else:
                self.counters["spans_not_exact"] += count
            done += count
        return done

    def _send(self, turn: Turn, keys: Sequence[bytes], slots: torch.Tensor, begin: int) -> int:
        """Send equal spans that follow each other, from token `begin` on; returns how many of them
        the link took."""
        tokens = slots.numel() // len(keys)
        layout = self.codec.layout(tokens)
        encoded = layout.encode()
        together = max(1, min(SPANS_TOGETHER, BYTES_TOGETHER // layout.num_bytes))
        fitting = min(len(keys), self._fitting(tokens))
        sent = 0
        while sent < fitting:
            some = keys[sent : min(sent + together, fitting)]
            part = slots[sent * tokens : (sent + len(some)) * tokens]
            blank = turn.blank(begin + sent * tokens)
            payload = self.codec.gather(part, len(some), blank)
            rows = zip(some, payload.rows, strict=True)
            blobs = [Blob(key, encoded, [memoryview(row.numpy())]) for key, row in rows]
            taken = self.link.put(blobs, ready=payload.ready, group=turn.group)
            turn.sent += max(0, taken * tokens - blank)
            self.counters["spans_spilled"] += taken
            self.counters["spill_bytes"] += taken * layout.num_bytes
            sent += taken
            if taken < len(some):
                break
        return sent

    def ended(self, rid: str, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """The turn ended; nothing of it is freed yet. Spills its last, partial span."""
        self.published(rid, token_ids, slots)
        turn = self._turns.get(rid)
        if turn is None:
            return
        whole, num_tail = divmod(len(token_ids) - turn.spilled, self.names.span_tokens)
        self.counters["spans_shed"] += whole
        if num_tail and not whole and self._fitting(num_tail):
            turn.chains.extend(token_ids)
            begin = turn.spilled
            part = slots[begin:].to(torch.int64)
            if self.codec.exact_spans(part, 1, turn.blank(begin)) == [True]:
                key = turn.chain.tail_key(begin // self.names.span_tokens, token_ids[begin:])
                self._send(turn, [key], part, begin)

    def compressed(self, rid: str, token_ids: Sequence[int], nodes: Sequence[NodeRecord]) -> int:
        """The turn's nodes are what they will be: store the record of them, and forget the turn.
        Returns how many tokens of the turn the link took."""
        turn = self._turns.pop(rid, None)
        if turn is None:
            return 0
        # A memory's prefix has no KV, and no record.
        nodes = [node for node in nodes if node.stop > turn.memory_tokens]
        if not 0 < len(nodes) <= MAX_NODES or not self.link.room_bytes:
            return turn.sent
        # There may have been no room when the turn's spans were due.
        turn.chains.extend(token_ids)
        whole = len(token_ids) // self.names.span_tokens
        tail = token_ids[whole * self.names.span_tokens :]
        record = TurnRecord(nodes=tuple(nodes), tail=tail_digest(tail), start=turn.memory_tokens)
        key = turn.chains.policy.turns_key(whole)
        blob = Blob(key, LAYOUT, [record.encode()])
        self.link.put([blob], replace=True, group=turn.group)
        return turn.sent

    def forget(self, rid: str) -> None:
        """The request is gone, or will start again."""
        self._turns.pop(rid, None)

    def clear(self) -> None:
        """Nothing that is under way is stored; what the link has already is."""
        self._turns.clear()


__all__ = ["Spiller"]
