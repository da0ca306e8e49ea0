"""kvtier's engine with nothing compressed is SGLang's engine: the same tokens, bit for bit of
greedy choice, on 240 requests; with a profile it is the policy's own reference implementation.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from compressing import POLICIES, RULE, RULE_ENV, demo_model, uneven_profile
from engine_process import DEMO_MODEL, retractions, run_engine, with_aborts
from sessions import Prompt, Rounds, said, side_by_side, tokens
from tiered_engine import ENGINE

from kvtier.heads.profile import HeadProfile
from kvtier.heads.reference.session import ReferenceSession
from kvtier.retention.locality import LocalityRule

pytestmark = pytest.mark.engine

COMMON = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 60_000,
    "chunked_prefill_size": 512,
}


def mixed_rounds(seed: int) -> Rounds:
    """Three turns of 80 concurrent requests: short, long (chunked), shared prefixes, batched."""
    rng = random.Random(seed)
    shared = [tokens(rng, n) for n in (40, 300, 900)]
    sessions = []
    for i in range(80):
        first = tokens(rng, rng.choice([1, 2, 17, 60, 130, 400, 700]))
        if i % 3 == 0:
            first = rng.choice(shared) + first
        sessions.append([first, *(tokens(rng, rng.randrange(1, 30)) for _ in "ab")])
    rounds = side_by_side(sessions, 0, logprobs=True)
    for request in (one for requests in rounds for one in requests):
        request["max_new_tokens"] = rng.randrange(1, 14)
    return rounds


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, dict[str, Any]]:
    rounds = mixed_rounds(seed=1)
    return {
        name: run_engine(tmp_path_factory.mktemp(name), {**COMMON, **args}, rounds)
        for name, args in POLICIES.items()
    }


def pairs(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[dict, dict]]:
    """The answers to each request."""
    return [
        both
        for turns in zip(ours["rounds"], theirs["rounds"], strict=True)
        for both in zip(*turns, strict=True)
    ]


def assert_same(found: list[tuple[dict, dict]], within: float) -> None:
    """The tokens are the same, and log-probabilities as near as that."""
    assert [a["output_ids"] for a, _ in found] == [b["output_ids"] for _, b in found]
    both = [xy for a, b in found for xy in zip(a["logprobs"], b["logprobs"], strict=True)]
    assert max(abs(x - y) for x, y in both) < within


@pytest.mark.parametrize("policy", ["full", "kvtier"])
def test_greedy_tokens_are_those_of_stock_sglang_on_240_requests(outputs, policy):
    found = pairs(outputs[policy], outputs["stock"])
    assert len(found) == 240
    assert_same(found, 1e-3)


def test_later_turns_are_served_from_the_tree(outputs):
    found = outputs["kvtier"]
    assert found["state"]["integrity"] == []
    for a, b in zip(found["rounds"][1], found["rounds"][0], strict=True):
        # All of the first turn but its last token, which has no KV yet.
        assert a["cached_tokens"] >= len(b["prompt"]) + len(b["output_ids"]) - 1


def test_an_fp8_cache_gives_the_greedy_tokens_of_stock_sglangs(tmp_path):
    """The cache is of e5m2. One of e4m3 gives the reference's: test_tier.py, test_compaction.py."""
    engine, rounds = {**COMMON, "kv_cache_dtype": "fp8_e5m2"}, [mixed_rounds(seed=2)[0][:30]]
    ours, theirs = (
        run_engine(tmp_path, {**engine, **POLICIES[name]}, rounds) for name in ("kvtier", "stock")
    )
    # A rounding of float32 may be one of fp8, which is a million times as large.
    assert_same(pairs(ours, theirs), 0.05)
    assert ours["state"]["integrity"] == []


def policy_session_rounds(
    profile: HeadProfile, rule: LocalityRule, sessions: int, turns: int
) -> tuple[Rounds, list[list[Prompt]]]:
    """Sessions with long contexts for the engine, and the oracle's answers to the same prompts. In
    the last round all go on once more from their second turn.

    Later prompts are so short that nothing is saved of them, or so long that there is, wherever
    their slots begin: of lengths between them this decides, as whole bundles stay.
    """
    rng = random.Random(5)
    prompts, expected, forks = [], [], []
    for _ in range(sessions):
        session = ReferenceSession(demo_model(), profile, rule, in_pages=True)
        later = [rng.choice([(1, 80), (110, 180)]) for _ in range(turns - 1)]
        prompts.append([tokens(rng, rng.randrange(*one)) for one in ((300, 1500), *later)])
        answers = []
        for turn, prompt in enumerate(prompts[-1]):
            answers.append(session.turn(prompt, 9).token_ids)
            if turn == 1:
                fork = session.fork()
        forks.append(tokens(rng, rng.randrange(1, 180)))
        expected.append([*answers, fork.turn(forks[-1], 9).token_ids])
    rounds = side_by_side(prompts, 9)
    rounds.append(
        [
            {"input_ids": prompt, "max_new_tokens": 9, "continues": [1, index]}
            for index, prompt in enumerate(forks)
        ]
    )
    return rounds, [list(answers) for answers in zip(*expected, strict=True)]


def test_with_a_profile_the_tokens_are_those_of_the_transformers_reference(tmp_path):
    """Without compensation, with which test_tier.py has them. Requests are retracted, and others
    beside them are aborted."""
    profile = uneven_profile()
    profile.save(tmp_path / "profile.json")
    rule = replace(RULE, compensation=False)
    rounds, expected = policy_session_rounds(profile, rule, sessions=8, turns=4)
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_LOCALITY_COMPENSATION": "False",
    }
    engine, environment = {**ENGINE, "max_total_tokens": 30_000}, {"SGLANG_TEST_RETRACT": "1"}
    out = run_engine(tmp_path, engine, with_aborts(rounds), env, environment)
    got = said(out)
    assert [answers[:8] for answers in got] == expected
    assert min(len(answer) for answers in got for answer in answers[8:]) < 200
    assert retractions(out) > 0
    assert out["state"]["compacted_tokens"] > 1000
