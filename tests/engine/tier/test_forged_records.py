"""Records of turns that no server of our kind wrote, stored with a valid checksum: whatever is
in them, they are checked against this server's own rules, and the request that meets one computes.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import pytest
from thorough import THOROUGH
from tiered_tree_harness import shape, turn, two_turns
from tree_harness import MiniScheduler
from tree_requests import context
from waiting import SAFETY_S

from kvtier.errors import TierProtocolError
from kvtier.retention.shares import FixedShare
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.names import ContextNames
from kvtier.tier.blobs.turn_rules import TurnRules
from kvtier.tier.blobs.turns import LAYOUT, TurnRecord, decode_record, tail_digest
from kvtier.tier.client import Blob
from kvtier.tier.link.link import TierLink

SHARE = FixedShare(0.5)


class Session:
    """Two turns of a server that are in the tier, with the record of them.

    tokens: of both turns; record: of their nodes, as JSON; restored: tokens of a run of whole
    spans, which is what is left when the record is refused.
    """

    def __init__(self, link: TierLink) -> None:
        self.server = MiniScheduler(share=SHARE, link=link)
        self.tokens = two_turns(self.server)
        names: ContextNames = self.server.tree.tier.names
        whole = len(self.tokens) // names.span_tokens
        self.restored = whole * names.span_tokens
        self.key = names.chains(Scope(), self.tokens).policy.turns_key(whole)
        self.client = self.server.tree.tier.link.client
        landed = bytearray()

        def land(offer):
            landed.extend(bytes(offer.num_bytes))
            return memoryview(landed)

        self.client.get([self.key], land, 1 << 16)
        self.record = json.loads(landed)

    def forge(self, payload: bytes) -> None:
        """Store something else in the record's place."""
        self.client.put(Blob(self.key, LAYOUT, [payload]), replace=True)


def changed(record: dict, node: int, **fields) -> bytes:
    nodes = [dict(one) for one in record["nodes"]]
    nodes[node].update(fields)
    return json.dumps({**record, "nodes": nodes}).encode()


FORGED = {
    "nothing kept of what was dropped": (0, {"kept": 0}),
    "less kept than the share": (0, {"kept": 1}),
    "more kept than the share": (0, {"kept": 50}),
    "everything dropped": (0, {"dropped": [0, 62], "kept": 31}),
    "the sink dropped": (0, {"dropped": [0, 54]}),
    "the recent window dropped": (0, {"dropped": [4, 60]}),
    "half of it dropped": (0, {"dropped": [4, 30], "kept": 13}),
    "dropped and not compressed": (0, {"compressed": False}),
    "the answer taken for a prompt": (0, {"prompt_stop": 62}),
    "a prompt of nothing": (0, {"prompt_stop": 0}),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_record_that_this_server_could_not_have_written_is_refused(connect, forged):
    session = Session(connect())
    node, fields = FORGED[forged]
    session.forge(changed(session.record, node, **fields))
    b = MiniScheduler(share=SHARE, link=connect())
    assert turn(b, [*session.tokens, 9, 9], [3]).restored == session.restored
    assert b.tree.report()["tier"]["records_refused"] == 1


@pytest.mark.parametrize("whole", [False, True], ids=["as it is", "a span that stayed whole"])
def test_a_record_that_a_server_could_have_written_is_taken(connect, whole):
    """A span of which no slot would have gone is exact, and stays so."""
    session = Session(connect())
    if whole:
        session.forge(changed(session.record, 0, dropped=[0, 0], kept=0))
    b = MiniScheduler(share=SHARE, link=connect())
    assert turn(b, [*session.tokens, 9, 9], [3]).restored == len(session.tokens)
    first = min(b.tree.nodes(), key=lambda node: node.start)
    assert (first.stop, first.compressed) == (62, True)
    assert (first.num_slots == 62) is whole
    assert b.tree.report()["tier"].get("records_refused", 0) == 0


class Anything(TurnRules):
    """Rules that refuse nothing: what only restoring can notice gets there."""

    def check(self, record, share=None):
        pass


STEPS = {
    "scatter": lambda s: (s.tree.tier.codec, "scatter"),
    "hang": lambda s: (s.tree, "hang"),
    "vote": lambda s: (s.pool.packed, "vote"),
    "pack": lambda s: (s.pool.packed, "add"),
    "free": lambda s: (s.allocator, "free"),
    "choose": lambda s: (s.tree.compressor.selection, "compact"),
    "compact": lambda s: (s.allocator, "compact"),
    "evict": lambda s: (s.allocator, "evict_to_free_tokens"),
}


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_goes_wrong_while_restoring_is_a_miss_that_leaves_nothing(
    connect, step, after, call
):
    """The step raises when it is called for the first or the second time, before or after it did
    what it does."""
    session = Session(connect())
    b = MiniScheduler(share=SHARE, link=connect())
    turn(b, context(30, seed=5), [1])
    before = shape(b)
    owner, name = STEPS[step](b)
    works, left = getattr(owner, name), [call]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            raise RuntimeError("out of memory")
        result = works(*args, **kwargs)
        if left[0] == 0:
            raise RuntimeError("out of memory")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        request = b.admit([*session.tokens, 9, 9])
    assert left[0] <= 0, "the step was not taken"
    assert request.restored == 0
    assert shape(b) == before
    b.check()
    assert b.tree.report()["tier"]["restore_failed"] == 1
    assert b.extend(request, 1000)
    b.release(request, checkpoint=True)
    b.check()


# The numbers are those where rules, spans and numbers of a machine begin and end.
NUMBERS = [-1, 0, 1, 2, 3, 4, 5, 6, 31, 49, 50, 53, 54, 55, 56, 60, 61, 62, 63, 97, 102, 104, 105]
NUMBERS += [106, 107, 108, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**40, -9999]
NONSENSE = [None, True, False, 1.5, 1e308, float("nan"), "62", "", [], [1], [1, 2, 3], {}, {"a": 1}]
SHAPES = [b"", b"{}", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 5000, b'{"nodes":[],"tail":""}']


def mutated(rng: random.Random, record: dict) -> bytes:
    """A record with a few things changed, in any of its fields or in its bytes."""
    if rng.random() < 0.02:
        return rng.choice(SHAPES)
    record = copy.deepcopy(record)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice([_field, _field, _field, _nudge, _nudge, _nodes, _whole])(rng, record)
    payload = json.dumps(record).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(payload))
        payload = rng.choice(
            [payload[:at], payload[:at] + bytes([rng.randrange(256)]) + payload[at:]]
        )
    return payload


def _field(rng: random.Random, record: dict) -> None:
    for node in rng.sample(record["nodes"], min(1, len(record["nodes"]))):
        name = rng.choice(list(node))
        value = rng.choice(NUMBERS if rng.random() < 0.8 else NONSENSE)
        if name == "dropped" and rng.random() < 0.9:
            value = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
        elif name in ("compressed", "exact") and rng.random() < 0.9:
            value = not node[name]
        node[name] = value


def _nudge(rng: random.Random, record: dict) -> None:
    for node in rng.sample(record["nodes"], min(1, len(record["nodes"]))):
        by = rng.choice([-6, -2, -1, 1, 2, 6])
        name = rng.choice(["stop", "prompt_stop", "kept", "dropped"])
        if name == "dropped" and isinstance(node[name], list) and len(node[name]) == 2:
            node[name] = [one + rng.choice([0, by]) if _number(one) else one for one in node[name]]
        elif _number(node[name]):
            node[name] += by


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nodes(rng: random.Random, record: dict) -> None:
    nodes = record["nodes"]
    what = rng.randrange(5)
    if what == 0:
        rng.shuffle(nodes)
    elif what == 1:
        nodes.append(copy.deepcopy(rng.choice(nodes)))
    elif what == 2 and len(nodes) > 1:
        del nodes[rng.randrange(len(nodes))]
    elif what == 3:
        first = {**rng.choice(nodes), "dropped": [0, 0], "kept": 0, "stop": rng.randrange(1, 62)}
        nodes.insert(0, first)
    else:
        rng.choice(nodes)[rng.choice(["extra", "start"])] = 1


def _whole(rng: random.Random, record: dict) -> None:
    if rng.random() < 0.5:
        record["tail"] = rng.choice([*NONSENSE, "f" * 32, "f" * 10000])
    else:
        nodes = record["nodes"][:1] if rng.random() < 0.95 else record["nodes"] * 600
        record["nodes"] = copy.deepcopy(nodes)


def decoded(payloads: Iterable[bytes], rules: TurnRules) -> tuple[list[TurnRecord], int]:
    """Return the payloads that are records, and how many of them the rules take."""
    records, taken = [], 0
    for payload in payloads:
        with suppress(TierProtocolError):
            records.append(decode_record(payload))
            rules.check(records[-1])
            taken += 1
    return records, taken


def test_thousands_of_forged_records_are_taken_or_refused_and_nothing_else(connect):
    session = Session(connect())
    rng = random.Random(1)
    payloads = [mutated(rng, session.record) for _ in range(6000 if THOROUGH else 2000)]
    rules = session.server.tree.tier.rules
    records, taken = decoded(payloads, rules)
    assert len(payloads) // 6 < len(records) < len(payloads) * 5 // 6
    assert 0 < taken < len(records) // 2
    # The names are those of records that a lookup of the session would try.
    width = session.server.tree.tier.names.span_tokens
    last = len(session.tokens) // width
    tried = [record for record in records if record.stop // width == last][:250]
    assert len(tried) == 250
    link = connect()
    counted: Counter[str] = Counter()
    for number, record in enumerate(tried):
        prompt = [*session.tokens, 9, 9, 9, 9]
        tail = tail_digest(prompt[last * width : record.stop])
        session.forge(record.model_copy(update={"tail": tail}).encode())
        b = MiniScheduler(share=SHARE, link=link)
        if number % 2:
            b.tree.tier.rules = Anything(b.tree.compressor.rule, SHARE)
        for tokens in (prompt, [*prompt, 3, 7]):
            # Nothing is checkpointed: what is spilled would be waited for by the next lookup.
            request = b.admit(tokens)
            assert b.tree.check_integrity() == []
            assert b.extend(request, 1000)
            b.release(request, checkpoint=False, aborted=True)
            assert b.tree.check_integrity() == []
        counted += b.tree.restorer.counters + b.tree.tier.counters
    assert link.flush(SAFETY_S)
    assert link.held_bytes == 0
    assert link.counters["get_bugs"] == 0
    assert link.counters["records_refused"] > 20
    assert counted["restored_requests"] > 100
