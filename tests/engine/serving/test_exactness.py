"""kvtier's engine with nothing compressed is SGLang's engine: the same tokens, bit for bit of
greedy choice, on 240 requests; with a profile it is the policy's own reference implementation.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from compressing import POLICIES, RULE, RULE_ENV, uneven_profile
from engine_process import DEMO_MODEL, retractions, run_engine, with_aborts

from kvtier.heads.profile import HeadProfile, load_profile
from kvtier.retention.locality import LocalityRule

pytestmark = pytest.mark.engine


def mixed_rounds(seed: int) -> list[list[dict]]:
    """Three turns of 80 concurrent requests: short, long (chunked), shared prefixes, batched."""
    rng = random.Random(seed)
    shared = [[rng.randrange(6, 384) for _ in range(n)] for n in (40, 300, 900)]
    first = []
    for i in range(80):
        length = rng.choice([1, 2, 17, 60, 130, 400, 700])
        prompt = [rng.randrange(6, 384) for _ in range(length)]
        if i % 3 == 0:
            prompt = rng.choice(shared) + prompt
        first.append({"input_ids": prompt, "max_new_tokens": rng.randrange(1, 14)})
    rounds = [first]
    for turn in (1, 2):
        rounds.append(
            [
                {
                    "continues": [turn - 1, i],
                    "input_ids": [rng.randrange(6, 384) for _ in range(rng.randrange(1, 30))],
                    "max_new_tokens": rng.randrange(1, 14),
                }
                for i in range(80)
            ]
        )
    for requests in rounds:
        for request in requests:
            request["logprobs"] = True
    return rounds


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, dict]:
    common = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 60_000,
        "chunked_prefill_size": 512,
    }
    rounds = mixed_rounds(seed=1)
    return {
        name: run_engine(tmp_path_factory.mktemp(name), {**common, **args}, rounds)
        for name, args in POLICIES.items()
    }


@pytest.mark.parametrize("policy", ["full", "kvtier"])
def test_greedy_tokens_are_those_of_stock_sglang_on_240_requests(outputs, policy):
    different = [
        (turn, i)
        for turn, (ours, theirs) in enumerate(
            zip(outputs[policy]["rounds"], outputs["stock"]["rounds"], strict=True)
        )
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a["output_ids"] != b["output_ids"]
    ]
    assert sum(len(r) for r in outputs[policy]["rounds"]) == 240
    assert different == []


@pytest.mark.parametrize("policy", ["full", "kvtier"])
def test_log_probabilities_are_within_a_thousandth(outputs, policy):
    worst = max(
        abs(x - y)
        for ours, theirs in zip(outputs[policy]["rounds"], outputs["stock"]["rounds"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a["logprobs"], b["logprobs"], strict=True)
    )
    assert worst < 1e-3


def test_later_turns_are_served_from_the_tree(outputs):
    for a, b in zip(outputs["kvtier"]["rounds"][1], outputs["kvtier"]["rounds"][0], strict=True):
        # All of the first turn but its last token, which has no KV yet.
        assert a["cached_tokens"] >= len(b["prompt"]) + len(b["output_ids"]) - 1


def test_the_engine_ends_with_sound_accounts(outputs):
    assert outputs["kvtier"]["state"]["integrity"] == []


@pytest.mark.parametrize(("dtype", "turns"), [("fp8_e4m3", 3), ("fp8_e5m2", 1)])
def test_an_fp8_cache_gives_the_greedy_tokens_of_stock_sglangs(tmp_path, dtype, turns):
    rounds = [requests[:30] for requests in mixed_rounds(seed=2)[:turns]]
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        "kv_cache_dtype": dtype,
    }
    ours, theirs = (
        run_engine(tmp_path, {**engine, **POLICIES[name]}, rounds) for name in ("kvtier", "stock")
    )
    pairs = [
        (a, b)
        for one, other in zip(ours["rounds"], theirs["rounds"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert [a["output_ids"] for a, _ in pairs] == [b["output_ids"] for _, b in pairs]
    # A rounding of float32 may be one of fp8, which is a million times as large.
    both = [xy for a, b in pairs for xy in zip(a["logprobs"], b["logprobs"], strict=True)]
    assert max(abs(x - y) for x, y in both) < 0.05
    assert ours["state"]["integrity"] == []


def policy_session_rounds(
    profile: HeadProfile, rule: LocalityRule, model, sessions: int, turns: int
):
    """Sessions with long contexts for the engine, and the oracle's answers to the same prompts. In
    the last round all go on once more from their second turn.

    Later prompts are so short that nothing is saved of them, or so long that there is, wherever
    their slots begin: of lengths between them this decides, as whole bundles stay.
    """
    from kvtier.heads.reference.session import ReferenceSession

    rng = random.Random(5)
    rounds: list[list[dict]] = [[] for _ in range(turns + 1)]
    expected: list[list[list[int]]] = [[] for _ in range(turns + 1)]
    forks = []
    for index in range(sessions):
        session = ReferenceSession(model, profile, rule, in_pages=True)
        for turn in range(turns):
            later = rng.randrange(*rng.choice([(1, 80), (110, 180)]))
            length = rng.randrange(300, 1500) if turn == 0 else later
            prompt = [rng.randrange(6, 384) for _ in range(length)]
            request = {"input_ids": prompt, "max_new_tokens": 9}
            if turn:
                request["continues"] = [turn - 1, index]
            rounds[turn].append(request)
            expected[turn].append(session.turn(prompt, 9).token_ids)
            if turn == 1:
                forks.append(session.fork())
    for index, fork in enumerate(forks):
        prompt = [rng.randrange(6, 384) for _ in range(rng.randrange(1, 180))]
        rounds[-1].append({"input_ids": prompt, "max_new_tokens": 9, "continues": [1, index]})
        expected[-1].append(fork.turn(prompt, 9).token_ids)
    return rounds, expected


@pytest.mark.parametrize(
    ("which", "compensation", "environment"),
    [
        ("stored", True, {}),
        ("uneven", True, {}),
        ("stored", False, {}),
        ("uneven", True, {"SGLANG_TEST_RETRACT": "1"}),
    ],
    ids=["stored", "uneven", "without compensation", "retracted"],
)
def test_with_a_profile_the_tokens_are_those_of_the_transformers_reference(
    tmp_path, which, compensation, environment
):
    """Other requests beside them are aborted."""
    import torch
    from transformers import AutoModelForCausalLM

    stored = DEMO_MODEL / "head_profile.json"
    profile = load_profile(stored) if which == "stored" else uneven_profile()
    profile.save(tmp_path / "profile.json")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    rule = replace(RULE, compensation=compensation)
    rounds, expected = policy_session_rounds(profile, rule, model, sessions=8, turns=4)
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        **POLICIES["kvtier"],
    }
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_LOCALITY_COMPENSATION": f"{compensation}",
    }
    out = run_engine(tmp_path, engine, with_aborts(rounds), env, environment)
    got = [[request["output_ids"] for request in requests] for requests in out["rounds"]]
    assert [answers[:8] for answers in got] == expected
    assert min(len(answer) for answers in got for answer in answers[8:]) < 200
    assert (retractions(out) > 0) == bool(environment)
    assert out["state"]["compacted_tokens"] > 1000
    assert out["state"]["integrity"] == []
