"""Drafted tokens (n-gram) in the real engine: the answers are those without them, in fewer passes,
and every slot that a draft had comes back.

SGLang's functions of indices for drafts run on GPUs; here they are `kvtier_sglang.cpu_drafts`.
"""

from __future__ import annotations

import random

import pytest
from compressing import POLICIES, RULE_ENV
from engine_process import DEMO_MODEL, run_engine
from sessions import said
from tierd.live_tier import live_tier
from tiered_engine import RULE as TIERED_RULE

pytestmark = pytest.mark.engine

DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 20_000,
    "chunked_prefill_size": 512,
    **POLICIES["kvtier"],
}
PROFILE = {"KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json")}
# The most tokens of a prompt and its answer together.
CONTEXT = 948


def rounds(*, one_by_one: bool) -> list[list[dict]]:
    """Four contexts that repeat themselves, and two questions about each of them.

    A context's turn ends with its first answered token: where it ends later, drafts may have
    written the KV of one token more, and the turn is compressed there.
    """
    rng = random.Random(4)
    phrases = [[rng.randrange(6, 384) for _ in range(rng.randrange(20, 50))] for _ in range(4)]
    contexts = [{"input_ids": one * rng.randrange(8, 16), "max_new_tokens": 1} for one in phrases]
    asked: list[list[dict]] = [contexts]
    for length in (2, 9):
        new = {"max_new_tokens": 40, "logprobs": True}
        tails = [one + one[:length] for one in phrases]
        asked.append([{"input_ids": tail, **new} for tail in tails])
    alone = [[one] for requests in asked for one in requests]
    for step in (1, 2):
        for index in range(4):
            asked[step][index]["continues"] = [index, 0] if one_by_one else [0, index]
    return alone if one_by_one else asked


def accepted(out: dict) -> float:
    """Tokens for each pass, on average over requests."""
    found = [one["accept_length"] for requests in out["rounds"] for one in requests]
    lengths = [length for length in found if length is not None]
    assert len(lengths) >= 8
    return sum(lengths) / len(lengths)


def logprobs(out: dict) -> list[float]:
    return [x for requests in out["rounds"] for one in requests for x in one["logprobs"]]


@pytest.mark.parametrize(("kv", "off"), [("auto", 1e-3), ("fp8_e4m3", 0.05)])
def test_drafts_change_how_many_passes_it_takes_and_nothing_else(tmp_path, kv, off):
    """The engine has SGLang's default number of drafts, of which it reserves two passes' ahead:
    three answers end where the model's context does, of which SGLang leaves a token or two free."""
    engine = {**ENGINE, "kv_cache_dtype": kv, "context_length": CONTEXT}
    rng = random.Random(6)
    phrases = [[rng.randrange(6, 384) for _ in range(24)] for _ in range(3)]
    ending = [{"input_ids": one * 37, "max_new_tokens": CONTEXT - 2 - 888} for one in phrases]
    asked = [*rounds(one_by_one=False), ending]
    env = {**RULE_ENV, **PROFILE}
    plain = run_engine(tmp_path, engine, asked, env)
    drafted = run_engine(tmp_path, {**engine, "speculative_algorithm": "NGRAM"}, asked, env)
    assert said(drafted) == said(plain)
    assert [len(answer) for answer in said(drafted)[3]] == [58] * 3
    assert logprobs(drafted) == pytest.approx(logprobs(plain), abs=off)
    assert accepted(drafted) > 1.5
    assert drafted["state"]["compacted_tokens"] > 100


def test_slots_come_back_where_turns_are_evicted_and_requests_retracted(tmp_path):
    """Room for two of the four contexts. What is computed again is not compressed as it was.

    The last questions have a temperature: SGLang has no sampling of drafts on a CPU, and accepts
    them greedily.
    """
    limits = {"max_total_tokens": 1400, "max_running_requests": 3}
    asked = rounds(one_by_one=False)
    asked[2] = [{**one, "temperature": 0.8} for one in asked[2]]
    out = run_engine(tmp_path, {**ENGINE, **limits, **DRAFTS}, asked, {**RULE_ENV, **PROFILE})
    lengths = [[len(answer) for answer in answers] for answers in said(out)]
    assert lengths == [[1] * 4, [40] * 4, [40] * 4]
    state = out["state"]
    assert state["slots_used"] <= state["slots"]
    assert accepted(out) > 1.2


@pytest.mark.parametrize(("merge", "emptied"), [("keepkv", True), ("off", False)])
def test_a_context_that_a_tier_refreshes_is_asked_with_drafts(tmp_path, merge, emptied):
    """The context's entries are chosen again by the question, whose answer is drafted. The whole
    context comes back to an emptied server, or it stayed.

    The contexts are computed one by one: who shares a batch is a matter of time, and a choice
    among entries of nearly the same worth would be, too.
    """
    alone = rounds(one_by_one=True)
    flushes = [{"flush": True}] if emptied else []
    asked = [*alone[:4], *flushes, *alone[4:8]]
    env = {
        **TIERED_RULE,
        "KVTIER_RETENTION": "0.5",
        "KVTIER_REFRESH": "turn",
        "KVTIER_MERGE": merge,
    }
    answers = []
    with live_tier(tmp_path, "--memory", "256m") as tier:
        for name, drafts in (("plain", {}), ("drafted", DRAFTS)):
            named = {**env, "KVTIER_TIER": tier.address, "KVTIER_TIER_NAMESPACE": name}
            out = run_engine(tmp_path, {**ENGINE, **drafts}, asked, named)
            found = out["state"]["tier"]
            assert found["refreshed_turns"] == 4
            assert found.get("restored_requests", 0) == 4 * len(flushes)
            answers.append(said(out))
    assert answers[0] == answers[1]
