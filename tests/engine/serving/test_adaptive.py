"""Heads that compete for a context's entries, in the real engine: the tokens are the reference's,
whichever kernels compute them, and a tier brings the context back as it was and refreshes it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, retractions, run_engine, with_aborts
from sglang_versions import needs_drafts
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, run_never_missing
from tiered_engine import RULE as TIERED_RULE

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.calibration.measuring import calibrate_curve
from kvtier.config import load_settings
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import PAGE, FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth

pytestmark = pytest.mark.engine

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def worth() -> TokenWorth:
    return fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth


@pytest.fixture
def adaptive(tmp_path, worth) -> dict[str, str]:
    """The settings, without a share."""
    return competing(tmp_path, worth)


def prompts(sessions: int, longest: int) -> list[list[list[int]]]:
    """Return the prompts of each session's turns."""
    rng = random.Random(12)
    lengths = [
        [rng.randrange(longest // 5, longest), *(rng.randrange(1, longest // 4) for _ in "abc")]
        for _ in range(sessions)
    ]
    return [[[rng.randrange(6, 384) for _ in range(n)] for n in turns] for turns in lengths]


def side_by_side(sessions: list[list[list[int]]], new: int) -> list[list[dict]]:
    """A round a turn, of all sessions at once."""
    rounds: list[list[dict]] = []
    for turn in range(len(sessions[0])):
        requests = [{"input_ids": turns[turn], "max_new_tokens": new} for turns in sessions]
        if turn:
            for index, request in enumerate(requests):
                request["continues"] = [turn - 1, index]
        rounds.append(requests)
    return rounds


def said(out: dict) -> list[list[list[int]]]:
    assert out["state"]["integrity"] == []
    return [[request["output_ids"] for request in requests] for requests in out["rounds"]]


@pytest.mark.parametrize(
    ("share", "kv", "ranks", "environment", "bits"),
    [
        (0.35, "auto", 1, {}, None),
        (0.1, "auto", 1, {}, None),
        (0.2, "fp8_e4m3", 1, {}, None),
        (0.25, "auto", 2, {}, None),
        (0.35, "auto", 1, {"SGLANG_TEST_RETRACT": "1"}, None),
        (0.35, "auto", 1, {"SGLANG_TEST_RETRACT": "1"}, 4),
        (0.25, "auto", 2, {}, 3),
    ],
    ids=[
        "0.35-auto-1",
        "0.1-auto-1",
        "0.2-fp8_e4m3-1",
        "0.25-auto-2",
        "retracted",
        "int4-retracted",
        "int3-2",
    ],
)
def test_the_tokens_are_those_of_the_transformers_reference(
    tmp_path, adaptive, worth, share, kv, ranks, environment, bits
):
    """Six sessions at a time beside requests that are aborted, and in the end all once more from
    their second turn. Each of two ranks has its own heads compete."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    rule, sessions, expected = FixedShare(share), prompts(6, 1500), []
    forks = [turns[2][::-1] for turns in sessions]
    for turns, other in zip(sessions, forks, strict=True):
        scorer, kv_dtype = Reconstruction.of(worth), FP8 if kv == "fp8_e4m3" else None
        session, fork = (
            AdaptiveSession(model, RULE, 512, scorer, kv_dtype=kv_dtype, ranks=ranks, bits=bits)
            for _ in "ab"
        )
        for one in (session, fork):
            one.keep_count = lambda prompt, span: rule.choose(Turn(prompt, span)).kept_tokens
        answers = [session.turn(prompt, 9).token_ids for prompt in turns]
        *_, last = (fork.turn(prompt, 9).token_ids for prompt in (*turns[:2], other))
        expected.append([*answers, last])
        counts = set(session.retained(0).values()) | set(session.retained(1).values())
        assert len(counts) > 1, "every head keeps as much"
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        "kv_cache_dtype": kv,
        "tp_size": ranks,
        **POLICIES["kvtier"],
    }
    env = {**RULE_ENV, **adaptive, "KVTIER_RETENTION": str(share), **ranks_on_a_cpu(ranks)}
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


def test_a_quality_target_keeps_what_the_curve_says_of_each_context(tmp_path, adaptive):
    file = Path(adaptive["KVTIER_SCORER_FILE"])
    settings = load_settings(
        scorer="reconstruction", scorer_file=file, head_budgets="adaptive", quality=0.95
    )
    profile = full_profile(model_shape(read_config(str(DEMO_MODEL))))
    curve = calibrate_curve(str(DEMO_MODEL), profile, settings, lengths=[768], contexts=2).document
    (tmp_path / "curve.json").write_text(curve.to_json())
    contexts = [turns[0] for turns in prompts(3, 2500)]
    engine = {"model_path": str(DEMO_MODEL), "max_total_tokens": 30_000, **POLICIES["kvtier"]}
    env = {**adaptive, "KVTIER_QUALITY": "0.95", "KVTIER_CURVE": str(tmp_path / "curve.json")}
    requests = [{"input_ids": ids, "max_new_tokens": 2} for ids in contexts]
    state = run_engine(tmp_path, engine, [requests], env)["state"]
    assert state["integrity"] == []
    assert state["retention"]["reasons"] == {"quality": len(contexts)}
    for turn in state["retention"]["recent"]:
        edges = settings.locality.kept_tokens(competes=settings.competes)
        share = curve.retention(0.95, turn["nll"])
        kept = edges + share * (turn["prompt_tokens"] - edges)
        assert turn["kept_tokens"] == pytest.approx(kept, abs=PAGE)


@needs_drafts
def test_drafts_are_verified_over_what_heads_competed_for(tmp_path, adaptive):
    """Contexts that repeat a phrase, compressed, and asked for more of it."""
    phrases = [turns[0][:35] for turns in prompts(4, 400)]
    contexts = [{"input_ids": one * 12, "max_new_tokens": 1} for one in phrases]
    questions = [
        {"input_ids": one, "max_new_tokens": 30, "continues": [index, 0]}
        for index, one in enumerate(phrases)
    ]
    rounds = [[one] for one in (*contexts, *questions)]
    engine = {"model_path": str(DEMO_MODEL), "max_total_tokens": 10_000, **POLICIES["kvtier"]}
    env = {**RULE_ENV, **adaptive, "KVTIER_RETENTION": "0.35"}
    drafts = {"speculative_algorithm": "NGRAM"}
    plain, drafted = (run_engine(tmp_path, engine | more, rounds, env) for more in ({}, drafts))
    assert said(drafted) == said(plain)
    assert drafted["state"]["compacted_tokens"] > 500
    assert max(one["accept_length"] or 1 for (one,) in drafted["rounds"]) > 1.5


def test_what_rests_is_not_pushed_out_by_what_is_in_flight(tmp_path, adaptive):
    """Three prompts at once would take the whole pool; one after the other they leave room for
    three contexts that rest."""
    rng = random.Random(13)
    contexts = [[rng.randrange(6, 384) for _ in range(2400)] for _ in range(6)]
    resting = [[{"input_ids": one, "max_new_tokens": 2}] for one in contexts[:3]]
    at_once = [{"input_ids": one, "max_new_tokens": 64} for one in contexts[3:]]
    again = [[{"input_ids": [7], "max_new_tokens": 2, "continues": [turn, 0]}] for turn in range(3)]
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 8000,
        "chunked_prefill_size": 512,
        **POLICIES["kvtier"],
    }
    env = {**RULE_ENV, **adaptive, "KVTIER_RETENTION": "0.25"}
    out = run_engine(tmp_path, engine, [*resting, at_once, *again], env)
    assert out["state"]["integrity"] == []
    assert [one["cached_tokens"] for (one,) in out["rounds"][4:]] == [2401] * 3
    assert [len(one["output_ids"]) for one in out["rounds"][3]] == [64] * 3


def test_requests_that_prefill_one_prefix_together_share_it_from_then_on(tmp_path, adaptive):
    """All but one get the tree's copy of it, and their own slots go to others while they decode:
    their answers are those of stock SGLang."""
    rng = random.Random(5)
    shared = [rng.randrange(6, 384) for _ in range(300)]
    own = [[rng.randrange(6, 384) for _ in range(rng.randrange(20, 90))] for _ in range(8)]
    requests = [{"input_ids": [*shared, *ids], "max_new_tokens": 40} for ids in own]
    common = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 4096,
    }
    env = {**RULE_ENV, **adaptive, "KVTIER_RETENTION": "0.5"}
    ours, stock = (
        run_engine(tmp_path, {**common, **POLICIES[name]}, [requests], env)
        for name in ("kvtier", "stock")
    )
    answers = [[one["output_ids"] for one in out["rounds"][0]] for out in (ours, stock)]
    assert answers[0] == answers[1]
    assert ours["state"]["integrity"] == []
    # Nobody had a prefix to begin with.
    assert {one["cached_tokens"] for one in ours["rounds"][0]} == {0}


def test_triton_kernels_say_the_same(tmp_path, adaptive):
    """The contexts are short, because Triton runs in its interpreter without a GPU."""
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 4000,
        "chunked_prefill_size": 64,
        **POLICIES["kvtier"],
    }
    rule = {
        "KVTIER_LOCALITY_SINK_TOKENS": "8",
        "KVTIER_LOCALITY_RECENT_TOKENS": "16",
        "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "12",
    }
    rounds = side_by_side([turns[:2] for turns in prompts(3, 120)], 4)
    answers = []
    for name in ("reference", "triton"):
        interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        env = {**rule, **adaptive, **interpreted, "KVTIER_RETENTION": "0.4", "KVTIER_KERNELS": name}
        (tmp_path / name).mkdir()
        out = run_engine(tmp_path / name, engine, rounds, env)
        answers.append(said(out))
        assert out["state"]["compacted_tokens"] > 50
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kv", "ranks", "merge", "kept"),
    [
        ("auto", 1, "off", None),
        ("fp8_e4m3", 1, "off", None),
        ("auto", 2, "off", "int4"),
        ("auto", 1, "keepkv", "int8"),
        *([("auto", 2, "off", None), ("auto", 1, "keepkv", None)] if THOROUGH else []),
    ],
)
def test_a_restarted_server_restores_and_refreshes_what_heads_competed_for(
    tmp_path, adaptive, kv, ranks, merge, kept
):
    """The answers of a turn that is refreshed are those of a server that never went away."""
    engine = {**ENGINE, "kv_cache_dtype": kv, "tp_size": ranks}
    env = {**TIERED_RULE, **adaptive, "KVTIER_RETENTION": "0.3", "KVTIER_REFRESH": "turn"}
    env |= ranks_on_a_cpu(ranks) | {"KVTIER_MERGE": merge}
    env |= {} if kept is None else {"KVTIER_KEPT_DTYPE": kept}
    del env["KVTIER_HEAD_PROFILE"]
    # One at a time, and every turn of a session after the one before.
    sessions = prompts(2, 1200)
    rounds: list[list[dict]] = []
    for turns in sessions:
        for turn, prompt in enumerate(turns):
            request: dict = {"input_ids": prompt, "max_new_tokens": 12}
            if turn:
                request["continues"] = [len(rounds) - 1, 0]
            rounds.append([request])
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        named = {**env, "KVTIER_TIER_NAMESPACE": "stayed"}
        stayed = run_never_missing(tmp_path, rounds, named, engine)
        assert stayed["state"]["tier"]["refreshed_turns"] == len(rounds) - len(sessions)
        assert "refresh_no_room" not in stayed["state"]["tier"]
        assert "unrefreshed_layers" not in stayed["state"]["tier"]
        before = run_never_missing(tmp_path, rounds[: len(sessions[0]) - 1], env, engine)
        assert said(before) == said(stayed)[: len(before["rounds"])]
        (last,) = before["rounds"][-1]
        request = rounds[len(sessions[0]) - 1][0]
        again = {
            "input_ids": [*last["prompt"], *last["output_ids"], *request["input_ids"]],
            "max_new_tokens": 12,
        }
        back = run_engine(tmp_path, engine, [[again]], env)
    found = back["state"]["tier"]
    assert found["restored_requests"] == 1, str(dict(found))
    assert found.get("refreshed_turns") == 1, str(dict(found))
    assert said(back)[0] == said(stayed)[len(sessions[0]) - 1]


@pytest.mark.parametrize(
    "settings",
    [{"KVTIER_REFRESH": "4"}, {"KVTIER_REFRESH": "4", "KVTIER_MERGE": "keepkv"},
     {"KVTIER_REFRESH": "turn", "KVTIER_REFRESH_MOVED": "0.05"}],
    ids=["every four tokens", "merged", "moved"],
)  # fmt: skip
def test_heads_that_compete_choose_again_while_a_turn_is_generated(tmp_path, adaptive, settings):
    """The turn is asked again until what is chosen in the background has come before the end of an
    answer."""
    first, second, *_ = prompts(1, 1500)[0]
    asked = {"input_ids": second, "max_new_tokens": 80, "continues": [0, 0]}
    rounds = [[{"input_ids": first, "max_new_tokens": 2}], [asked]]
    rounds.append({"until": "refreshed_again", "request": asked})
    env = {**TIERED_RULE, **adaptive, **settings, "KVTIER_RETENTION": "0.3"}
    del env["KVTIER_HEAD_PROFILE"]
    with live_tier(tmp_path, "--memory", "512m") as tier:
        out = run_engine(tmp_path, ENGINE, rounds, env | {"KVTIER_TIER": tier.address})
    assert out["state"]["integrity"] == []
    assert out["state"]["tier"]["refreshed_again"] > 0
