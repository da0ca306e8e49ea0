"""Exact KV in a real tier, restored by a real engine: the answers are those of a session that
never left, and of a fork that was never compressed.
"""

from __future__ import annotations

import random

import pytest
import torch
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE, continued, run_never_missing

from kvtier.heads.profile import load_profile
from kvtier.heads.reference.compaction import CompactingSession
from kvtier.retention.locality import LocalityRule
from kvtier.retention.shares import FixedShare, Turn

pytestmark = pytest.mark.engine

TURNS = 4
SESSIONS = 4


@pytest.fixture
def tier(tmp_path):
    with live_tier(tmp_path, "--memory", "512m", "--refresh-workers", "1") as live:
        yield live


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 384) for _ in range(count)]


def session_rounds() -> list[list[dict]]:
    """Sessions of several turns, prompts from shorter than a span to several chunks.

    One request at a time: what two prompts of one chunk keep may depend on where chunks end.
    """
    rng = random.Random(11)
    rounds: list[list[dict]] = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            length = rng.randrange(300, 1800) if turn == 0 else rng.randrange(5, 400)
            request: dict = {"input_ids": tokens(rng, length), "max_new_tokens": 12}
            if turn:
                request["continues"] = [(turn - 1) * SESSIONS + session, 0]
            rounds.append([request])
    return rounds


def reference_answers(
    rounds: list[list[dict]], share: FixedShare, kv_dtype: torch.dtype | None
) -> list[list[int]]:
    """Return what the transformers reference says in each round; by RULE, which the engine goes
    by."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    profile = load_profile(DEMO_MODEL / "head_profile.json")
    windows = (
        RULE[f"KVTIER_LOCALITY_{name}_TOKENS"] for name in ("SINK", "RECENT", "BRANCH_RECENT")
    )
    rule = LocalityRule(*map(int, windows))
    sessions = [
        CompactingSession(model, profile, rule, 512, kv_dtype=kv_dtype, in_pages=True)
        for _ in range(SESSIONS)
    ]
    for session in sessions:
        session.keep_count = lambda prompt, span: share.choose(Turn(prompt, span)).kept_tokens
    return [
        sessions[at % SESSIONS].turn(request["input_ids"], request["max_new_tokens"]).token_ids
        for at, (request,) in enumerate(rounds)
    ]


@pytest.mark.parametrize(
    ("retention", "kv"), [(None, "auto"), ("0.5", "auto"), ("0.5", "fp8_e4m3")]
)
def test_a_session_that_comes_back_to_a_restarted_server_goes_on_as_if_it_never_left(
    tmp_path, tier, retention, kv
):
    """A session that never left is answered as by the reference."""
    engine = {**ENGINE, "kv_cache_dtype": kv}
    env = RULE if retention is None else {**RULE, "KVTIER_RETENTION": retention}
    rounds = session_rounds()
    stayed = run_engine(tmp_path, engine, rounds, env)
    kv_dtype = torch.float8_e4m3fn if kv == "fp8_e4m3" else None
    wanted = reference_answers(rounds, FixedShare(float(retention or 1)), kv_dtype)
    assert [one["output_ids"] for (one,) in stayed["rounds"]] == wanted
    env = {**env, "KVTIER_TIER": tier.address}
    before = run_engine(tmp_path, engine, rounds[:-SESSIONS], env)
    assert before["state"]["tier"]["spans_spilled"] > 0
    last = continued(rounds, before["rounds"], SESSIONS)
    back = run_engine(tmp_path, engine, last, env)
    for (a,), (b,) in zip(back["rounds"], stayed["rounds"][-SESSIONS:], strict=True):
        assert a["prompt"] == b["prompt"]
        assert a["output_ids"] == b["output_ids"]
        # Everything but the new turn came from the tier, as it would have from the device.
        assert a["cached_tokens"] == b["cached_tokens"]
    assert back["state"]["tier"]["restored_requests"] == SESSIONS
    assert back["state"]["integrity"] == []


def test_a_fork_in_the_middle_of_a_compressed_context_answers_like_one_never_compressed(
    tmp_path, tier
):
    rng = random.Random(3)
    context = tokens(rng, 3000)
    # Later forks first: a request may otherwise end inside an earlier fork's recent window, and
    # share it as it is, compressed.
    places = sorted((rng.randrange(300, 2900) for _ in range(8)), reverse=True)
    forks = [context[:place] + tokens(rng, 9) for place in places]
    first = [{"input_ids": context, "max_new_tokens": 8}]
    requests = [{"input_ids": fork, "max_new_tokens": 12} for fork in forks]
    rounds = [first, *([one] for one in requests)]
    env = {**RULE, "KVTIER_TIER": tier.address}
    forked = run_engine(tmp_path, ENGINE, rounds, env)
    exact = run_engine(tmp_path, {**ENGINE, "radix_cache_backend": None}, rounds)
    assert [r[0]["output_ids"] for r in forked["rounds"]] == [
        r[0]["output_ids"] for r in exact["rounds"]
    ]
    # At most a span and the new tokens had to be computed.
    served = forked["state"]["tier"]
    computed = [
        len(fork) - answer[0]["cached_tokens"]
        for fork, answer in zip(forks, forked["rounds"][1:], strict=True)
    ]
    assert max(computed) <= 9 + 64
    assert served["restored_requests"] > 0
    assert forked["state"]["integrity"] == []


@pytest.mark.parametrize(
    ("kv", "merge"), [("auto", "off"), ("fp8_e4m3", "off"), ("auto", "keepkv")]
)
def test_entries_chosen_by_the_tier_give_the_tokens_of_entries_chosen_here(
    tmp_path, tier, kv, merge
):
    """The entries are chosen again while a turn is generated, too, by either, without a slot
    lost."""
    retention, engine = 0.25, {**ENGINE, "kv_cache_dtype": kv}
    sessions = session_rounds()[: 2 * SESSIONS]
    env = {
        **RULE,
        "KVTIER_TIER": tier.address,
        "KVTIER_RETENTION": f"{retention}",
        "KVTIER_TIER_SHARED_MEMORY": "false",
        "KVTIER_MERGE": merge,
    }
    answers, states = [], []
    for refresh_by in ("fetch", "near-data"):
        wanted = {"KVTIER_REFRESH": "turn", "KVTIER_REFRESH_BY": refresh_by}
        # Each has a namespace of its own, or the second run would have nothing to compute.
        wanted["KVTIER_TIER_NAMESPACE"] = refresh_by
        found = run_never_missing(tmp_path, sessions, env | wanted, engine)
        answers.append([one["output_ids"] for (one,) in found["rounds"]])
        states.append(found["state"])
        assert found["state"]["integrity"] == []
        assert found["state"]["tier"]["refreshed_turns"] == SESSIONS
        assert "unrefreshed_layers" not in found["state"]["tier"]
    assert answers[0] == answers[1]
    if merge != "off":
        return
    fetched, near = (state["tier"]["refresh_moved_bytes"] for state in states)
    assert near <= 1.1 * retention * fetched
    # The turn is asked again until what is chosen in the background has come before the end of an
    # answer.
    longer = [[{**one, "max_new_tokens": 80} for one in requests] for requests in sessions]
    longer += [{"until": "refreshed_again", "request": longer[-1][0]}]
    for refresh_by in ("fetch", "near-data"):
        wanted = {"KVTIER_REFRESH": "4", "KVTIER_REFRESH_BY": refresh_by}
        found = run_engine(tmp_path, engine, longer, env | wanted)
        assert found["state"]["integrity"] == []
        assert found["state"]["tier"]["refreshed_again"] > 0


@pytest.mark.parametrize(
    "settings",
    [{"KVTIER_REFRESH": "4", "KVTIER_MERGE": "keepkv"},
     {"KVTIER_REFRESH": "turn", "KVTIER_REFRESH_MOVED": "0.05"}],
    ids=["merged", "moved"],
)  # fmt: skip
def test_anchored_heads_choose_again_while_a_turn_is_generated(tmp_path, tier, settings):
    """The turn is asked again until what is chosen in the background has come before the end of an
    answer."""
    sessions = session_rounds()
    asked = {**sessions[SESSIONS][0], "max_new_tokens": 80}
    rounds = [sessions[0], [asked], {"until": "refreshed_again", "request": asked}]
    env = {**RULE, **settings, "KVTIER_TIER": tier.address, "KVTIER_RETENTION": "0.4"}
    out = run_engine(tmp_path, ENGINE, rounds, env)
    assert out["state"]["integrity"] == []
    assert out["state"]["tier"]["refreshed_again"] > 0
