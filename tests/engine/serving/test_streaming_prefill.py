"""Prompts that are compressed while they are prefilled, in the real engine: the tokens are those of
the transformers reference, a prompt may be longer than the pool, and a tier brings it back.
"""

from __future__ import annotations

import random

import pytest
from compressing import RULE_ENV, competing, competing_session
from engine_process import DEMO_MODEL, run_engine
from sessions import Prompt, one_by_one, said, said_in, tokens
from tierd.live_tier import live_tier
from tiered_engine import COMPETING_RULE
from tiered_engine import ENGINE as TIERED_ENGINE

from benchmarks.common.engines import ranks_on_a_cpu

pytestmark = pytest.mark.engine

CHUNK, NEW = 256, 9
EXACT = {"custom_params": {"kvtier": {"exact": True}}}
ENGINE = {**TIERED_ENGINE, "max_total_tokens": 12_000, "chunked_prefill_size": CHUNK}
ALWAYS = {"KVTIER_COMPRESS_PREFILL": "always"}


@pytest.fixture
def adaptive(tmp_path) -> dict[str, str]:
    return {**RULE_ENV, **competing(tmp_path), "KVTIER_RETENTION": "0.25"}


def prompts(*lengths: int) -> list[Prompt]:
    rng = random.Random(21)
    return [tokens(rng, n) for n in lengths]


@pytest.mark.parametrize(("bits", "ranks"), [(4, 1), (None, 2)])
def test_the_tokens_are_those_of_the_transformers_reference(tmp_path, adaptive, bits, ranks):
    turns = prompts(1500, 700, 90, 600)
    session = competing_session(0.25, chunk_tokens=CHUNK, ranks=ranks, bits=bits)
    session.streams = True
    expected = [session.turn(prompt, NEW).token_ids for prompt in turns]
    env = {**adaptive, **ALWAYS, **ranks_on_a_cpu(ranks)}
    if bits is not None:
        env["KVTIER_KEPT_DTYPE"] = f"int{bits}"
    out = run_engine(tmp_path, {**ENGINE, "tp_size": ranks}, one_by_one([turns], NEW), env)
    assert said_in(out, 1) == [expected]
    # The last two of a turn's 6, 3, 1 and 3 chunks stay exact while it is generated.
    assert out["state"]["streamed_chunks"] == 4 + 1 + 0 + 1
    held = [sum(len(prompt) for prompt in turns[: turn + 1]) for turn in range(len(turns))]
    cached = [request["cached_tokens"] for (request,) in out["rounds"]]
    assert cached[1:] == [n + NEW * (turn + 1) - 1 for turn, n in enumerate(held[:-1])]


def test_a_prompt_of_twice_the_pool_is_served(tmp_path, adaptive):
    """The prompt is served beside others, and asked again; what cannot be compressed is refused. A
    long answer has room behind a prompt that is compressed for it."""
    size = 2048
    long, question, *others, before = prompts(2 * size, 60, 300, 200, 100, 1300)
    exact = {"max_new_tokens": NEW, **EXACT}
    rounds: list[list[dict]] = [
        [{"input_ids": prompt, "max_new_tokens": NEW} for prompt in (long, *others)],
        [{"input_ids": question, "max_new_tokens": NEW, "continues": [0, 0]}],
        [{"input_ids": long, "refused": True, **exact}],
        [{"input_ids": others[0], **exact}],
        [{"input_ids": before, "max_new_tokens": 900}],
        [{"input_ids": before[::-1], **exact, "max_new_tokens": 900}],
    ]
    engine = {**ENGINE, "max_total_tokens": size}
    out = run_engine(tmp_path, engine, rounds, adaptive)
    assert out["state"]["integrity"] == []
    first, (again,), (refused,), (last,), (streamed,), (kept_whole,) = out["rounds"]
    assert [len(one["output_ids"]) for one in [*first, again, last]] == [NEW] * 6
    assert again["cached_tokens"] == len(long) + NEW - 1
    assert "expected a prompt of fewer than 2048 tokens" in refused["error"]
    assert len(streamed["output_ids"]) == 900
    assert len(kept_whole["output_ids"]) == size - len(before) - 2
    assert out["state"]["streamed_chunks"] > 0
    assert out["state"]["kv_peak_bytes"] <= out["state"]["kv_capacity_bytes"]


def test_an_emptied_server_goes_on_with_what_was_compressed_as_it_came(tmp_path, adaptive):
    rounds = one_by_one([prompts(1500, 700, 90)], NEW)
    emptied = [*rounds[:2], {"flush": True}, rounds[2]]
    engine = {**TIERED_ENGINE, "chunked_prefill_size": CHUNK}
    env, outs = {**COMPETING_RULE, **competing(tmp_path), **ALWAYS, "KVTIER_RETENTION": "0.25"}, []
    with live_tier(tmp_path, "--memory", "512m") as tier:
        for name, asked in (("stayed", rounds), ("back", emptied)):
            of_it = {"KVTIER_TIER": tier.address, "KVTIER_TIER_NAMESPACE": name}
            outs.append(run_engine(tmp_path, engine, asked, env | of_it))
    stayed, back = outs
    assert stayed["state"]["streamed_chunks"] == back["state"]["streamed_chunks"] == 4 + 1
    assert back["state"]["tier"]["restored_requests"] == 1, str(dict(back["state"]["tier"]))
    assert said_in(back, 1) == said_in(stayed, 1)


def test_prompts_under_a_head_profile_stream_too(tmp_path):
    rounds = one_by_one([prompts(1500, 700)], NEW)
    profile = {"KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json")}
    out = run_engine(tmp_path, ENGINE, rounds, {**RULE_ENV, **profile, **ALWAYS})
    assert [len(answer) for (answer,) in said(out)] == [NEW, NEW]
    assert out["state"]["streamed_chunks"] == 4 + 1
    assert out["rounds"][1][0]["cached_tokens"] == 1500 + NEW - 1
    assert out["state"]["kv_peak_bytes"] < 0.75 * out["state"]["kv_capacity_bytes"] * 1500 / 12_000


def test_what_does_not_fit_is_refused_where_nothing_may_stream(tmp_path, adaptive):
    (long,) = prompts(3000)
    request = {"input_ids": long, "max_new_tokens": NEW, "refused": True}
    env = {**adaptive, "KVTIER_COMPRESS_PREFILL": "never"}
    out = run_engine(tmp_path, {**ENGINE, "max_total_tokens": 2048}, [[request]], env)
    assert "3000" in out["rounds"][0][0]["error"]
