"""Ranks over a tier that answers one of them late or not at all say what one rank says: profiles x
what is compressed, flushed, restored and refreshed x what goes wrong. SGLang's own checker
compares what the ranks decide, and ends a server whose ranks part.

TESTS_THOROUGH=1 runs all of it, otherwise each profile, each fault, and each life that flushes at
least once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from compressing import competing, competing_session
from serving import PROFILES, serve
from sessions import one_by_one, said_in, side_by_side, tokens
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import COMPETING_RULE, RULE

from kvtier.retention.locality import LocalityRule

pytestmark = pytest.mark.engine

SESSIONS = 2
SHARE = {"KVTIER_RETENTION": "0.3"}
REFRESH = {**SHARE, "KVTIER_REFRESH": "turn"}


class Life(NamedTuple):
    """The life of a server. flushes: before the third turn; one_by_one: no turn waits for
    another's."""

    settings: Mapping[str, str] = MappingProxyType({})
    flushes: bool = False
    one_by_one: bool = False


LIVES = {
    "merging": Life({**REFRESH, "KVTIER_MERGE": "keepkv"}, flushes=True, one_by_one=True),
    "plain": Life(),
    "a budget in bytes": Life({"KVTIER_BUDGET_BYTES": "300000"}, flushes=True),
    "a share": Life(SHARE, flushes=True),
}
FAULTS = (None, "slow", "losing")
SOME = [
    ("even", "merging", "slow"),
    ("an empty rank", "a budget in bytes", None),
    ("uneven", "a share", "losing"),
]
EVERY = [(p, life, fault) for p in PROFILES for life in LIVES for fault in FAULTS]


def rounds_of(life: Life, seed: int) -> list[Any]:
    """Three turns of every session."""
    rng = random.Random(seed)
    sessions = [
        [tokens(rng, count) for count in (rng.randrange(300, 900), 70, 70)] for _ in range(SESSIONS)
    ]
    turns = (one_by_one if life.one_by_one else side_by_side)(sessions, 9)
    third = len(turns) * 2 // 3
    return [*turns[:third], *([{"flush": True}] if life.flushes else []), *turns[third:]]


@pytest.mark.parametrize(("profile", "life", "fault"), EVERY if THOROUGH else SOME)
def test_ranks_say_what_one_says(tmp_path: Path, profile: str, life: str, fault: str | None):
    one_life = LIVES[life]
    rounds = rounds_of(one_life, seed=sum(map(ord, profile + life)))
    PROFILES[profile]().save(tmp_path / "profile.json")
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), **one_life.settings}
    outs = []
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        for ranks in (1, 2):
            env["KVTIER_TIER_NAMESPACE"] = f"{ranks}"
            # All ranks lose what one loses; what it waits for comes.
            wrong = fault if ranks == 2 or fault == "losing" else None
            outs.append(serve(tmp_path, ranks, rounds, env, fault=wrong))
    one, two = outs
    assert said_in(two, SESSIONS) == said_in(one, SESSIONS)
    assert two["state"].get("compacted_tokens", 0) > 0
    tier_of_one, tier_of_two = one["state"]["tier"], two["state"]["tier"]
    for name in ("restored_requests", "restored_tokens", "refreshed_turns", "refresh_missed"):
        assert tier_of_two.get(name, 0) == tier_of_one.get(name, 0), name
    if one_life.flushes:
        assert (tier_of_two.get("restored_requests", 0) > 0) == (fault != "losing")
    if "KVTIER_REFRESH" in env:
        assert (tier_of_two.get("refreshed_turns", 0) > 0) == (fault != "losing")


def test_ranks_whose_heads_compete_refresh_together_or_not_at_all(tmp_path: Path):
    """One request at a time: what a refresh waits for is the same in every run. A rank that loses
    what the tier sends has all of them go on with what the reference keeps."""
    rng = random.Random(8)
    sessions = [[tokens(rng, rng.randrange(300, 900)), tokens(rng, 70)] for _ in range(SESSIONS)]
    rule = LocalityRule(sink_tokens=32, recent_tokens=64, branch_recent_tokens=24)
    references = [competing_session(0.3, rule, ranks=2) for _ in sessions]
    kept = [
        [session.turn(prompt, 9).token_ids for prompt in turns]
        for session, turns in zip(references, sessions, strict=True)
    ]
    env, answers = {**COMPETING_RULE, **competing(tmp_path), **REFRESH}, {}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        for fault in FAULTS:
            env |= {"KVTIER_TIER": tier.address, "KVTIER_TIER_NAMESPACE": f"{fault}"}
            out = serve(tmp_path, 2, one_by_one(sessions, 9), env, fault=fault)
            answers[fault] = said_in(out, SESSIONS)
            refreshed = out["state"]["tier"].get("refreshed_turns", 0)
            assert refreshed == (0 if fault == "losing" else SESSIONS), fault
            assert out["state"]["compacted_tokens"] > 300
    assert answers["slow"] == answers[None] != kept
    assert answers["losing"] == kept
