"""Prompts that are compressed while they are prefilled, in the real engine: the tokens are those of
the transformers reference, a prompt may be longer than the pool, and a tier brings it back.
"""

from __future__ import annotations

import random

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier
from tiered_engine import ENGINE as TIERED_ENGINE
from tiered_engine import RULE as TIERED_RULE

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth

pytestmark = pytest.mark.engine

CHUNK, NEW = 256, 9
EXACT = {"custom_params": {"kvtier": {"exact": True}}}
ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 12_000,
    "chunked_prefill_size": CHUNK,
    **POLICIES["kvtier"],
}


@pytest.fixture(scope="module")
def worth() -> TokenWorth:
    return fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth


@pytest.fixture
def adaptive(tmp_path, worth) -> dict[str, str]:
    return {**competing(tmp_path, worth), "KVTIER_RETENTION": "0.25"}


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(21)
    return [[rng.randrange(6, 384) for _ in range(n)] for n in lengths]


def one_session(turns: list[list[int]], after: int = 0) -> list[list[dict]]:
    """A round a turn; so many rounds are before them."""
    rounds: list[list[dict]] = []
    for number, prompt in enumerate(turns):
        request: dict = {"input_ids": prompt, "max_new_tokens": NEW}
        if number:
            request["continues"] = [after + number - 1, 0]
        rounds.append([request])
    return rounds


def said(out: dict) -> list[list[int]]:
    assert out["state"]["integrity"] == []
    return [request["output_ids"] for (request,) in out["rounds"]]


@pytest.mark.parametrize(("bits", "ranks"), [(None, 1), (4, 1), (None, 2)])
def test_the_tokens_are_those_of_the_transformers_reference(tmp_path, adaptive, worth, bits, ranks):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    rule, turns = FixedShare(0.25), prompts(1500, 700, 90, 600)
    scorer = Reconstruction.of(worth)
    session = AdaptiveSession(model, RULE, CHUNK, scorer, ranks=ranks, bits=bits)
    session.keep_count = lambda prompt, span: rule.choose(Turn(prompt, span)).kept_tokens
    session.streams = True
    expected = [session.turn(prompt, NEW).token_ids for prompt in turns]
    env = {**RULE_ENV, **adaptive, **ranks_on_a_cpu(ranks), "KVTIER_COMPRESS_PREFILL": "always"}
    if bits is not None:
        env["KVTIER_KEPT_DTYPE"] = f"int{bits}"
    out = run_engine(tmp_path, {**ENGINE, "tp_size": ranks}, one_session(turns), env)
    assert said(out) == expected
    # The last two of a turn's 6, 3, 1 and 3 chunks stay exact while it is generated.
    assert out["state"]["streamed_chunks"] == 4 + 1 + 0 + 1
    held = [sum(len(prompt) for prompt in turns[: turn + 1]) for turn in range(len(turns))]
    cached = [request["cached_tokens"] for (request,) in out["rounds"]]
    assert cached[1:] == [n + NEW * (turn + 1) - 1 for turn, n in enumerate(held[:-1])]


def test_a_prompt_of_twice_the_pool_is_served(tmp_path, adaptive):
    """The prompt is served beside others, and asked again; what cannot be compressed is refused."""
    size = 2048
    (long, question), others = prompts(2 * size, 60), prompts(2 * size, 300, 200, 100)[1:]
    engine = {**ENGINE, "max_total_tokens": size}
    rounds: list[list[dict]] = [
        [{"input_ids": prompt, "max_new_tokens": NEW} for prompt in (long, *others)],
        [{"input_ids": question, "max_new_tokens": NEW, "continues": [0, 0]}],
        [{"input_ids": long, "max_new_tokens": 1, "refused": True, **EXACT}],
        [{"input_ids": others[0], "max_new_tokens": NEW, **EXACT}],
    ]
    out = run_engine(tmp_path, engine, rounds, {**RULE_ENV, **adaptive})
    assert out["state"]["integrity"] == []
    first, (again,), (refused,), (last,) = out["rounds"]
    assert [len(one["output_ids"]) for one in [*first, again, last]] == [NEW] * 6
    assert again["cached_tokens"] == len(long) + NEW - 1
    assert "expected a prompt of fewer than 2048 tokens" in refused["error"]
    assert out["state"]["streamed_chunks"] > 0
    assert out["state"]["kv_peak_bytes"] <= out["state"]["kv_capacity_bytes"]


def test_a_long_answer_has_room_behind_a_prompt_that_is_compressed_for_it(tmp_path, adaptive):
    size, prompt = 2048, prompts(1300)[0]
    engine = {**ENGINE, "max_total_tokens": size}
    asked = {"input_ids": prompt, "max_new_tokens": 900}
    rounds: list[list[dict]] = [[asked], [{**asked, "input_ids": prompt[::-1], **EXACT}]]
    out = run_engine(tmp_path, engine, rounds, {**RULE_ENV, **adaptive})
    assert out["state"]["integrity"] == []
    (streamed,), (exact,) = out["rounds"]
    assert len(streamed["output_ids"]) == 900
    assert len(exact["output_ids"]) == size - len(prompt) - 2
    assert out["state"]["streamed_chunks"] > 0


def test_a_restarted_server_goes_on_with_what_was_compressed_as_it_came(tmp_path, adaptive):
    turns = prompts(1500, 700, 90)
    env = {**TIERED_RULE, **adaptive, "KVTIER_COMPRESS_PREFILL": "always"}
    del env["KVTIER_HEAD_PROFILE"]
    engine = {**TIERED_ENGINE, "chunked_prefill_size": CHUNK}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        stayed = run_engine(tmp_path, engine, one_session(turns), env)
        again = {
            "input_ids": stayed["rounds"][2][0]["prompt"],
            "max_new_tokens": NEW,
        }
        back = run_engine(tmp_path, engine, [[again]], env)
    assert stayed["state"]["streamed_chunks"] == 4 + 1
    assert back["state"]["tier"]["restored_requests"] == 1, str(dict(back["state"]["tier"]))
    assert said(back)[0] == said(stayed)[2]


def test_prompts_under_a_head_profile_stream_too(tmp_path):
    turns = prompts(1500, 700)
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
        "KVTIER_COMPRESS_PREFILL": "always",
    }
    out = run_engine(tmp_path, ENGINE, one_session(turns), env)
    assert [len(answer) for answer in said(out)] == [NEW, NEW]
    assert out["state"]["streamed_chunks"] == 4 + 1
    assert out["rounds"][1][0]["cached_tokens"] == 1500 + NEW - 1
    assert out["state"]["kv_peak_bytes"] < 0.75 * out["state"]["kv_capacity_bytes"] * 1500 / 12_000


def test_what_does_not_fit_is_refused_where_nothing_may_stream(tmp_path, adaptive):
    (long,) = prompts(3000)
    request = {"input_ids": long, "max_new_tokens": NEW, "refused": True}
    engine = {**ENGINE, "max_total_tokens": 2048}
    env = {**RULE_ENV, **adaptive, "KVTIER_COMPRESS_PREFILL": "never"}
    out = run_engine(tmp_path, engine, [[request]], env)
    assert "3000" in out["rounds"][0][0]["error"]
