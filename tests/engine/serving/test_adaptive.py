"""Heads that compete for a context's entries, in the real engine: the tokens are the reference's,
whichever kernels compute them, and a tier brings the context back as it was and refreshes it.
"""

from __future__ import annotations

import random

import pytest
import torch
from compressing import RULE_ENV, competing, competing_session
from engine_process import retractions, run_engine, with_aborts
from sessions import Prompt, one_by_one, said, said_in, side_by_side, tokens
from sglang_versions import needs_drafts
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import COMPETING_RULE, ENGINE, run_never_missing

from benchmarks.common.engines import ranks_on_a_cpu

pytestmark = pytest.mark.engine


def prompts(sessions: int, longest: int) -> list[list[Prompt]]:
    """The prompts of each session's four turns."""
    rng = random.Random(12)
    lengths = [
        [rng.randrange(longest // 5, longest), *(rng.randrange(1, longest // 4) for _ in "abc")]
        for _ in range(sessions)
    ]
    return [[tokens(rng, n) for n in turns] for turns in lengths]


@pytest.mark.parametrize(
    ("share", "kv", "ranks", "environment", "bits"),
    [
        (0.2, "fp8_e4m3", 1, {}, None),
        (0.1, "auto", 1, {"SGLANG_TEST_RETRACT": "1"}, None),
        (0.35, "auto", 1, {"SGLANG_TEST_RETRACT": "1"}, 4),
        (0.25, "auto", 2, {}, 3),
    ],
    ids=["fp8", "retracted", "int4-retracted", "int3-2"],
)
def test_the_tokens_are_those_of_the_transformers_reference(
    tmp_path, share, kv, ranks, environment, bits
):
    """Six sessions at a time beside requests that are aborted, and in the end all once more from
    their second turn. Each of two ranks has its own heads compete."""
    sessions, expected = prompts(6, 1500), []
    forks = [turns[2][::-1] for turns in sessions]
    kv_dtype = torch.float8_e4m3fn if kv == "fp8_e4m3" else None
    for turns, other in zip(sessions, forks, strict=True):
        session, fork = (
            competing_session(share, kv_dtype=kv_dtype, ranks=ranks, bits=bits) for _ in "ab"
        )
        answers = [session.turn(prompt, 9).token_ids for prompt in turns]
        *_, last = (fork.turn(prompt, 9).token_ids for prompt in (*turns[:2], other))
        expected.append([*answers, last])
        counts = set(session.retained(0).values()) | set(session.retained(1).values())
        assert len(counts) > 1, "every head keeps as much"
    engine = {**ENGINE, "max_total_tokens": 30_000, "kv_cache_dtype": kv, "tp_size": ranks}
    env = {**RULE_ENV, **competing(tmp_path), **ranks_on_a_cpu(ranks)}
    env["KVTIER_RETENTION"] = str(share)
    if bits is not None:
        env["KVTIER_KEPT_DTYPE"] = f"int{bits}"
    rounds = side_by_side(sessions, 9)
    rounds.append(
        [
            {"input_ids": prompt, "max_new_tokens": 9, "continues": [1, index]}
            for index, prompt in enumerate(forks)
        ]
    )
    out = run_engine(tmp_path, engine, with_aborts(rounds), env, environment)
    found = [list(turns) for turns in zip(*said(out), strict=True)]
    assert found[: len(sessions)] == expected
    assert min(len(answer) for answers in found[len(sessions) :] for answer in answers) < 200
    assert (retractions(out) > 0) == bool(environment)
    assert out["state"]["compacted_tokens"] > 1000


@needs_drafts
def test_drafts_are_verified_over_what_heads_competed_for(tmp_path):
    """Contexts that repeat a phrase, compressed, and asked for more of it."""
    phrases = [turns[0][:35] for turns in prompts(4, 400)]
    contexts = [{"input_ids": one * 12, "max_new_tokens": 1} for one in phrases]
    questions = [
        {"input_ids": one, "max_new_tokens": 30, "continues": [index, 0]}
        for index, one in enumerate(phrases)
    ]
    sessions = [competing_session(0.35) for _ in phrases]
    expected = [[one.turn(x * 12, 1).token_ids] for one, x in zip(sessions, phrases, strict=True)]
    expected += [[one.turn(x, 30).token_ids] for one, x in zip(sessions, phrases, strict=True)]
    env = {**RULE_ENV, **competing(tmp_path), "KVTIER_RETENTION": "0.35"}
    engine = {**ENGINE, "speculative_algorithm": "NGRAM"}
    out = run_engine(tmp_path, engine, [[one] for one in (*contexts, *questions)], env)
    assert said(out) == expected
    assert out["state"]["compacted_tokens"] > 500
    assert max(one["accept_length"] or 1 for (one,) in out["rounds"]) > 1.5


def test_what_rests_is_not_pushed_out_by_what_is_in_flight(tmp_path):
    """Three prompts at once would take the whole pool; one after the other they leave room for
    three contexts that rest."""
    rng = random.Random(13)
    contexts = [tokens(rng, 2400) for _ in range(6)]
    resting = [[{"input_ids": one, "max_new_tokens": 2}] for one in contexts[:3]]
    at_once = [{"input_ids": one, "max_new_tokens": 64} for one in contexts[3:]]
    again = [[{"input_ids": [7], "max_new_tokens": 2, "continues": [turn, 0]}] for turn in range(3)]
    env = {**RULE_ENV, **competing(tmp_path), "KVTIER_RETENTION": "0.25"}
    engine = {**ENGINE, "max_total_tokens": 8000}
    out = run_engine(tmp_path, engine, [*resting, at_once, *again], env)
    assert [len(answer) for answer in said(out)[3]] == [64] * 3
    assert [one["cached_tokens"] for (one,) in out["rounds"][4:]] == [2401] * 3


def test_requests_that_prefill_one_prefix_together_share_it_from_then_on(tmp_path):
    """All but one get the tree's copy of it, and their own slots go to others while they decode:
    their answers are those of a session of its own."""
    rng = random.Random(5)
    shared = tokens(rng, 300)
    asked = [[*shared, *tokens(rng, rng.randrange(20, 90))] for _ in range(8)]
    expected = [competing_session(0.5).turn(prompt, 40).token_ids for prompt in asked]
    env = {**RULE_ENV, **competing(tmp_path), "KVTIER_RETENTION": "0.5"}
    engine = {**ENGINE, "chunked_prefill_size": 4096}
    out = run_engine(tmp_path, engine, side_by_side([[one] for one in asked], 40), env)
    assert said(out) == [expected]
    # Nobody had a prefix to begin with.
    assert {one["cached_tokens"] for one in out["rounds"][0]} == {0}


def test_triton_kernels_say_the_same(tmp_path):
    """The contexts are short, because Triton runs in its interpreter without a GPU. Over a profile:
    test_absent_gpu.py."""
    env = {
        **competing(tmp_path),
        "KVTIER_LOCALITY_SINK_TOKENS": "8",
        "KVTIER_LOCALITY_RECENT_TOKENS": "16",
        "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "12",
        "KVTIER_RETENTION": "0.4",
        **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}),
    }
    rounds = side_by_side([turns[:2] for turns in prompts(3, 120)], 4, logprobs=True)
    engine = {**ENGINE, "max_total_tokens": 4000, "chunked_prefill_size": 64}
    reference, triton = (
        run_engine(tmp_path, engine, rounds, {**env, "KVTIER_KERNELS": name})
        for name in ("reference", "triton")
    )
    assert said(triton) == said(reference)
    for ours, theirs in zip(triton["rounds"], reference["rounds"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a["logprobs"] == pytest.approx(b["logprobs"], abs=1e-3)
    assert min(out["state"]["compacted_tokens"] for out in (reference, triton)) > 50


@pytest.mark.parametrize(
    ("kv", "ranks", "merge", "kept"),
    [
        ("fp8_e4m3", 1, "off", None),
        ("auto", 2, "off", "int4"),
        ("auto", 1, "keepkv", "int8"),
        *([("auto", 2, "off", None), ("auto", 1, "keepkv", None)] if THOROUGH else []),
    ],
)
def test_what_heads_competed_for_comes_back_to_an_emptied_server_and_is_refreshed(
    tmp_path, kv, ranks, merge, kept
):
    """The answers of a turn that is refreshed are those of a server that never lost anything. After
    a restart: test_kinds.py."""
    engine = {**ENGINE, "kv_cache_dtype": kv, "tp_size": ranks}
    env = {**COMPETING_RULE, **competing(tmp_path), **ranks_on_a_cpu(ranks)}
    env |= {"KVTIER_RETENTION": "0.3", "KVTIER_REFRESH": "turn", "KVTIER_MERGE": merge}
    env |= {} if kept is None else {"KVTIER_KEPT_DTYPE": kept}
    rounds = one_by_one(prompts(1, 1200), 12)
    *before, (last,) = rounds
    emptied = [*before, {"flush": True}, [last]]
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        stayed, back = (
            run_never_missing(tmp_path, asked, env | {"KVTIER_TIER_NAMESPACE": name}, engine)
            for name, asked in (("stayed", rounds), ("back", emptied))
        )
    for out in (stayed, back):
        found = out["state"]["tier"]
        assert found["refreshed_turns"] == len(rounds) - 1, str(dict(found))
        assert "refresh_no_room" not in found
    assert back["state"]["tier"]["restored_requests"] == 1
    assert said_in(back, 1) == said_in(stayed, 1)
