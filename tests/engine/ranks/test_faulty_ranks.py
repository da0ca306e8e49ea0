"""Ranks over a tier that answers one of them late or not at all say what one rank says: profiles x
what is compressed, evicted, flushed, restored and refreshed x what goes wrong. SGLang's own checker
compares what the ranks decide, and ends a server whose ranks part.

TESTS_THOROUGH=1 runs all of it, otherwise each of the three at least once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from engine_process import DEMO_MODEL
from serving import PROFILES, first_turns, next_turns, said, serve
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import RULE

from kvtier.calibration.documents import CurveDocument, load_curve
from kvtier.calibration.keys import policy_digest
from kvtier.config import load_settings
from kvtier.heads.profile import HeadProfile
from kvtier.retention.rules import locality_rule, scorer_of

pytestmark = pytest.mark.engine

SESSIONS, LONGEST = 2, 900
SHARE = {"KVTIER_RETENTION": "0.3"}


class Life(NamedTuple):
    """The life of a server. slots: so few that contexts are evicted; flushes: before the third
    turn; one_by_one: no turn waits for another's."""

    settings: Mapping[str, str] = MappingProxyType({})
    slots: int = 40_000
    flushes: bool = False
    one_by_one: bool = False


LIVES = {
    "refresh": Life({**SHARE, "KVTIER_REFRESH": "turn"}, flushes=True, one_by_one=True),
    "evicting": Life(slots=2600),
    "a share": Life(SHARE),
    "a budget in tokens": Life({"KVTIER_BUDGET_TOKENS": "200"}, flushes=True),
    "a budget in bytes": Life({"KVTIER_BUDGET_BYTES": "300000"}, flushes=True),
    "merging": Life(
        {**SHARE, "KVTIER_REFRESH": "turn", "KVTIER_MERGE": "keepkv"},
        flushes=True,
        one_by_one=True,
    ),
    "quality": Life({"KVTIER_QUALITY": "0.95"}),
    "flush and restore": Life(SHARE, flushes=True),
    "plain": Life(),
}
FAULTS = (None, "slow", "losing")


def some() -> list[tuple[str, str, str | None]]:
    """Every life once, with each profile and each fault in turn. The places of those that refresh
    are such that they lose nothing."""
    profiles, faults = list(PROFILES), ("slow", "losing", None)
    return [(profiles[at % 3], life, faults[at // 2 % 3]) for at, life in enumerate(LIVES)]


def every() -> list[tuple[str, str, str | None]]:
    return [(p, life, fault) for p in PROFILES for life in LIVES for fault in FAULTS]


def rounds_of(life: Life, seed: int) -> list[Any]:
    """Three turns of every session."""
    rng = random.Random(seed)
    turns = [first_turns(rng, SESSIONS, LONGEST)]
    turns.append(next_turns(rng, 0, SESSIONS))
    turns.append(next_turns(rng, 1, SESSIONS))
    if life.one_by_one:
        return one_by_one(turns, flushes=life.flushes)
    if life.flushes:
        turns.insert(2, {"flush": True})
    return turns


def one_by_one(turns: list[Any], *, flushes: bool) -> list[Any]:
    """The same requests, each a round of its own."""
    rounds: list[Any] = []
    for number, requests in enumerate(turns):
        if number == 2 and flushes:
            rounds.append({"flush": True})
        for at, request in enumerate(requests):
            before = {"continues": [(number - 1) * SESSIONS + at, 0]} if number else {}
            rounds.append([{**request, **before}])
    return rounds


def curve_for(profile: HeadProfile) -> CurveDocument:
    """The demo model's curve, as if it had been fitted with another profile and rule."""
    settings = load_settings(
        **{name.removeprefix("KVTIER_").lower(): value for name, value in RULE.items()}
    )
    policy = policy_digest(profile, locality_rule(settings), scorer_of(settings))
    return load_curve(DEMO_MODEL / "curve.json").model_copy(update={"policy": policy})


@pytest.mark.parametrize(("profile", "life", "fault"), every() if THOROUGH else some())
def test_ranks_say_what_one_says(tmp_path: Path, profile: str, life: str, fault: str | None):
    PROFILES[profile]().save(tmp_path / "profile.json")
    one_life = LIVES[life]
    rounds = rounds_of(one_life, seed=sum(map(ord, profile + life)))
    env = {**RULE, "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"), **one_life.settings}
    if "KVTIER_QUALITY" in env:
        env["KVTIER_CURVE"] = str(tmp_path / "curve.json")
        curve = curve_for(PROFILES[profile]())
        (tmp_path / "curve.json").write_text(curve.model_dump_json())
    outs = []
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        for ranks in (1, 2):
            env["KVTIER_TIER_NAMESPACE"] = f"{ranks}"
            # All ranks lose what one loses; what it waits for comes.
            wrong = fault if ranks == 2 or fault == "losing" else None
            outs.append(
                serve(tmp_path, ranks, rounds, env, fault=wrong, max_total_tokens=one_life.slots)
            )
    one, two = outs
    assert said(two) == said(one)
    assert two["state"].get("compacted_tokens", 0) > 0
    tier_of_one, tier_of_two = one["state"]["tier"], two["state"]["tier"]
    for name in ("restored_requests", "restored_tokens", "refreshed_turns", "refresh_missed"):
        assert tier_of_two.get(name, 0) == tier_of_one.get(name, 0), name
    if one_life.flushes:
        assert (tier_of_two.get("restored_requests", 0) > 0) == (fault != "losing")
    if "KVTIER_REFRESH" in env:
        assert (tier_of_two.get("refreshed_turns", 0) > 0) == (fault != "losing")
