"""The rules that a record of turns is checked against take everything that a server writes."""

from __future__ import annotations

import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from thorough import THOROUGH
from tree_harness import MiniScheduler, run_turn
from tree_requests import random_tokens
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare, QualityTarget, TokenBudget
from kvtier.tier.blobs.turns import TurnRecord
from kvtier_sglang.radix import matching
from kvtier_sglang.tier.scopes import with_share


class Curve:
    """A curve that asks for more of what surprises more."""

    def quality(self, retention: float, nll: float) -> float:
        return retention

    def retention(self, quality: float, nll: float) -> float:
        return 0.3 + 0.1 * min(max(nll, 1.0), 4.0)


class Source:
    def curve(self) -> Curve:
        return Curve()


SHARES = [None, FixedShare(0.5), TokenBudget(30), QualityTarget(0.9, Source())]


def recorded(s: MiniScheduler, records: list[TurnRecord], asked: dict[str, float | None]) -> None:
    """Have every record of a server checked and counted. asked: shares of requests' sessions."""
    compressed, on_release = s.tree.tier.spiller.compressed, s.tree.on_release
    released: list[str] = []

    def release(req, *, checkpointed):
        released.append(req.rid)
        on_release(req, checkpointed=checkpointed)

    def check(turn, token_ids, nodes):
        if nodes:
            record = TurnRecord(nodes=tuple(nodes), tail="")
            s.tree.tier.rules.check(record, asked.get(released[-1]))
            records.append(record)
        return compressed(turn, token_ids, nodes)

    s.tree.on_release, s.tree.tier.spiller.compressed = release, check


@pytest.mark.parametrize("seed", range(2 if THOROUGH else 1))
@pytest.mark.parametrize(
    ("share", "adaptive"), [*((share, False) for share in SHARES), (FixedShare(0.5), True)]
)
def test_whatever_servers_do_their_own_records_pass(connect, monkeypatch, share, adaptive, seed):
    for name, tokens in (("CUT_WINDOW", 4), ("WIDE_CUT_WINDOW", 8), ("LEAST_CUT", 16)):
        monkeypatch.setattr(matching, name, tokens)
    rng = random.Random(seed)
    # There are 100 bundles: of few hardly any is whole, and then spans stay as they are.
    servers = [
        MiniScheduler(1600, share=share, link=connect(), adaptive=adaptive) for _ in range(2)
    ]
    records: list[TurnRecord] = []
    asked: dict[str, float | None] = {}
    for s in servers:
        recorded(s, records, asked)
    histories: list[tuple[list[int], float | None]] = [(random_tokens(rng, 100), None)]
    for _ in range(150 if THOROUGH else 90):
        s = rng.choice(servers)
        history, less = rng.choice(histories)
        if rng.random() < 0.1:
            less = rng.choice([None, 0.2])
        if rng.random() < 0.5:
            history = history[: rng.randrange(1, len(history) + 1)]
        prompt = [*history, *random_tokens(rng, rng.randrange(1, 120))][:500]
        if len(s.running) < 3:
            request = s.admit(prompt, extra_key=None if less is None else with_share(None, less))
            if request is not None:
                asked[request.rid] = less
        for request in list(s.running):
            if rng.random() < 0.3:
                continue
            going = s.extend(request, rng.randrange(20, 160))
            if going and request.filled < len(request.prompt):
                s.checkpoint(request)
                continue
            answer = random_tokens(rng, rng.randrange(0, 9)) if going else []
            answered = [token for token in answer if s.decode(request, token)]
            ending = rng.random()
            s.release(request, checkpoint=going and ending < 0.8, aborted=ending < 0.9)
            s.check()
            histories.append(([*request.prompt, *answered], asked[request.rid]))
        if rng.random() < 0.5:
            s.tree.tier.link.flush(SAFETY_S)
    for s in servers:
        for request in list(s.running):
            s.release(request, checkpoint=False, aborted=True)
        # Time decides what a server still has of a turn; this one is left in its middle.
        s.tree.evict(EvictParams(num_tokens=1600))
        tokens = random_tokens(rng, 200)
        for prompt in (tokens, [*tokens[:100], *random_tokens(rng, 20)]):
            run_turn(s, prompt, random_tokens(rng, 3))
    dropped = [node for record in records for node in record.nodes if node.dropped != (0, 0)]
    assert len(dropped) > 20
    assert sum(s.tree.tier.link.counters["records_refused"] for s in servers) == 0
    assert all(bool(s.tree.counters["cut_spans"]) is adaptive for s in servers)
