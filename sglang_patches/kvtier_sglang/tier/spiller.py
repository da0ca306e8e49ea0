"""The spilling of exact KV to the tier, while the engine still has it.

A prompt's KV is exact until its turn ends, so it leaves in the meantime: whenever a chunk is
published, the spans that are whole by then are copied to host memory, and the rest happens in the
background (kvtier.tier.link.link). When the turn ends only its last, partial span is left, and the
record of how the turn was compressed. What the link has no room for stays due until then.

    chunk published    [ span ][ span ][ ...      copied out; checksummed and sent later
    turn ended         ... ][ tail ] + record     then slots are freed

A span may begin in an earlier turn, of whose last tokens the heads keep little. The tier has those:
as that turn's last, partial span, or in a span of another turn that goes on there. They are copied
from it in the background, before the span is sent.

    earlier turn       ... ][ tail |
    this turn              [ beginning | own tokens ][ span ][ ...

A span that begins in the prefix that a memory stands for has zeros for the prefix's tokens.

All of it runs in the scheduler's thread only, but for `Joined` and the waiting for copies, which
the link's threads call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from kvtier.tier.blobs.keys import Scope, SpanChain
from kvtier.tier.blobs.names import ContextNames, NamedChains, SpanName
from kvtier.tier.blobs.turns import LAYOUT, MAX_NODES, NodeRecord, TurnRecord, tail_digest
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.prefetch import Layouts, fetch_spans
from kvtier_sglang.streams import HostPayload
from kvtier_sglang.tier.codec import SpanCodec

# So many spans, and bytes, are copied out into one piece of host memory at the most. It is held
# until the last of them is sent: so much may be held beyond what the link counts, and on its way on
# the device.
SPANS_TOGETHER = 8
BYTES_TOGETHER = 64 << 20


@dataclass
class Turn:
    """The spilling of one request.

    prefix_tokens: tokens of earlier turns. elsewhere: the tokens that follow them in other turns.
    spilled: tokens that are dealt with. exact: whether it computes with nothing dropped before it.
    memory_tokens: tokens of its prefix memory. sent: tokens that the link took. group: the group of
    its puts, which do not overtake each other.
    """

    chains: NamedChains
    prefix_tokens: int
    elsewhere: Sequence[Sequence[int]]
    spilled: int
    exact: bool
    memory_tokens: int = 0
    sent: int = 0
    group: object = field(default_factory=object)

    @property
    def chain(self) -> SpanChain:
        return self.chains.exact if self.exact else self.chains.policy

    def blank(self, begin: int) -> int:
        """Return how many tokens from `begin` on have no KV."""
        return max(self.memory_tokens - begin, 0)

    def inherited(self, begin: int) -> int:
        """Return how many tokens from `begin` on are of earlier turns."""
        return max(self.prefix_tokens - begin, 0)

    def beginnings(self, token_ids: Sequence[int]) -> list[SpanName]:
        """Return the names of spans that may hold the tokens of earlier turns in this turn's first
        span."""
        width = self.chain.span_tokens
        index = self.prefix_tokens // width
        begin, first = index * width, list(token_ids[index * width : self.prefix_tokens])
        found = []
        for after in ((), *self.elsewhere):
            ids = [*first, *after][:width]
            for chain in (self.chains.exact, self.chains.policy):
                key = chain.key if len(ids) == width else chain.tail_key
                found.append(SpanName(key(index, ids), begin, begin + len(ids)))
        return found


@dataclass(frozen=True)
class Joined:
    """A payload whose first tokens come from the tier. The link's thread calls it.

    payload: that of one span, uint8 `[1, bytes]`. names: those of spans that may hold the tokens.
    num_tokens: tokens of the payload's span. inherited: the first of them, which come from the
    tier."""

    link: TierLink
    codec: SpanCodec
    payload: HostPayload
    names: Sequence[SpanName]
    num_tokens: int
    inherited: int

    @property
    def reads(self) -> frozenset[bytes]:
        return frozenset(name.key for name in self.names)

    def __call__(self, client: TierClient) -> bool:
        """Copy the first tokens from the tier into the payload, and return whether they were
        there."""
        if self.payload.ready is not None:
            self.payload.ready()
        present = client.exists([name.key for name in self.names]).present
        held = (name for name, held in zip(self.names, present, strict=True) if held)
        return any(self._landed(client, name) for name in held)

    def _landed(self, client: TierClient, name: SpanName) -> bool:
        """Return whether a span landed; then the tokens are in the payload."""
        host = fetch_spans(client, self.link, [name], Layouts(self.codec.layout(1)))
        if host is None:
            return False
        for payload in host.payloads:
            source, tokens = torch.from_numpy(payload).unsqueeze(0), name.stop - name.begin
            self.codec.copy(source, tokens, self.payload.rows, self.num_tokens, self.inherited)
        landed = bool(host.payloads)
        host.release()
        return landed


class Spiller:
    """The spilling of one server's requests, see the module docstring. names: those of its KV."""

    def __init__(self, link: TierLink, codec: SpanCodec, names: ContextNames) -> None:
        self.link = link
        self.codec = codec
        self.names = names
        self.counters: Counter[str] = Counter()

    def begin(
        self,
        prefix_tokens: int,
        scope: Scope,
        *,
        exact: bool,
        elsewhere: Sequence[Sequence[int]] = (),
    ) -> Turn:
        """Return the spilling of a request that starts computing behind a prefix that the tree had.
        elsewhere: tokens that follow that prefix in other turns, a span's or fewer of each."""
        span = self.names.span_tokens
        whole = prefix_tokens // span * span
        chains = self.names.chains(scope)
        return Turn(chains, prefix_tokens, elsewhere, whole, exact, scope.memory_tokens)

    def published(self, turn: Turn, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """Spill the whole spans of a request that are due. token_ids: its first tokens, as far as
        they are computed; slots: theirs, any integers."""
        span = self.names.span_tokens
        stop = len(token_ids) // span * span
        if stop <= turn.spilled or not self._fitting(span):
            return
        turn.chains.extend(token_ids)
        if self._joins(turn, slots[turn.spilled : turn.spilled + span]):
            if not self._send_joined(turn, token_ids, slots, turn.spilled + span):
                return
            turn.spilled += span
        if turn.spilled == stop:
            return
        due = slots[turn.spilled : stop].to(torch.int64)
        turn.spilled += span * self._spill(turn, turn.spilled // span, due)

    def _fitting(self, num_tokens: int) -> int:
        """Return how many spans of that many tokens the link takes."""
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
            taken = self.link.put(blobs, ready=_waiting(payload), group=turn.group)
            turn.sent += max(0, taken * tokens - blank)
            self.counters["spans_spilled"] += taken
            self.counters["spill_bytes"] += taken * layout.num_bytes
            sent += taken
            if taken < len(some):
                break
        return sent

    def _joins(self, turn: Turn, slots: torch.Tensor) -> bool:
        """Return whether the next span, of these slots, is exact but for the tokens of earlier
        turns."""
        inherited, blank = turn.inherited(turn.spilled), turn.blank(turn.spilled)
        if inherited <= blank:
            return False
        held = slots.to(torch.int64)
        is_exact = [self.codec.exact_spans(held, 1, less) == [True] for less in (blank, inherited)]
        return is_exact == [False, True]

    def _send_joined(
        self, turn: Turn, token_ids: Sequence[int], slots: torch.Tensor, stop: int
    ) -> bool:
        """Send the next span, up to `stop`, whose first tokens the tier has. Returns whether the
        link took it."""
        begin, whole = turn.spilled, self.names.span_tokens
        tokens, inherited = stop - begin, turn.inherited(begin)
        layout = self.codec.layout(tokens)
        payload = self.codec.gather(slots[begin:stop].to(torch.int64), 1, inherited)
        joined = Joined(
            *(self.link, self.codec, payload, turn.beginnings(token_ids), tokens, inherited)
        )
        index, ids = begin // whole, token_ids[begin:stop]
        key = turn.chain.key(index, ids) if tokens == whole else turn.chain.tail_key(index, ids)
        (row,) = payload.rows
        blob = Blob(key, layout.encode(), [memoryview(row.numpy())])
        if not self.link.put([blob], ready=joined, reads=joined.reads, group=turn.group):
            return False
        turn.sent += tokens - inherited
        self.counters["spans_spilled"] += 1
        self.counters["spill_bytes"] += layout.num_bytes
        return True

    def ended(self, turn: Turn, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """Spill what is due of a turn that ended, and its last, partial span; nothing of it is
        freed yet."""
        self.published(turn, token_ids, slots)
        whole, num_tail = divmod(len(token_ids) - turn.spilled, self.names.span_tokens)
        self.counters["spans_shed"] += whole
        if num_tail and not whole and self._fitting(num_tail):
            turn.chains.extend(token_ids)
            begin = turn.spilled
            part = slots[begin:].to(torch.int64)
            if self._joins(turn, part):
                self._send_joined(turn, token_ids, slots, len(token_ids))
            elif self.codec.exact_spans(part, 1, turn.blank(begin)) == [True]:
                key = turn.chain.tail_key(begin // self.names.span_tokens, token_ids[begin:])
                self._send(turn, [key], part, begin)

    def compressed(self, turn: Turn, token_ids: Sequence[int], nodes: Sequence[NodeRecord]) -> int:
        """Store the record of a turn's nodes, which are what they will be. Returns how many tokens
        of the turn the link took."""
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


def _waiting(payload: HostPayload) -> Callable[[TierClient], bool] | None:
    """Return the function by which the link waits for a payload before it reads it; None where it
    is there already."""
    ready = payload.ready
    if ready is None:
        return None

    def wait(client: TierClient) -> bool:
        ready()
        return True

    return wait
