"""Requests that want something of their own of a server that compresses: log-probabilities of the
prompt, an exact answer, a measurement, a smaller share, to be evicted first; and nobody else
notices."""

from __future__ import annotations

import random
from typing import Any

import pytest
from compressing import RULE_ENV
from engine_process import DEMO_MODEL, run_engine
from sessions import tokens
from tierd.live_tier import live_tier
from tiered_engine import ENGINE

pytestmark = pytest.mark.engine

COMPRESSING = {
    **RULE_ENV,
    "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    "KVTIER_RETENTION": "0.5",
}
SINK = int(RULE_ENV["KVTIER_LOCALITY_SINK_TOKENS"])
FIRST, ANSWER, SECOND = 900, 6, 80
HELD = FIRST + ANSWER - 1
# In the sink, in what was dropped, and in the second turn's prompt.
STARTS = (None, 0, 10, 500, FIRST + ANSWER, FIRST + ANSWER + 30)
EXACTLY = {"custom_params": {"kvtier": {"exact": True}}}
MEASURED = {"custom_params": {"kvtier": {"measure": True}}}
DONE = {"custom_params": {"kvtier": {"done": True}}}
LESS = {"custom_params": {"kvtier": {"retention": 0.1}}}

rng = random.Random(3)
TURN = {"input_ids": tokens(rng, FIRST), "max_new_tokens": ANSWER}
AGAIN = {"input_ids": tokens(rng, SECOND), "max_new_tokens": 8, "logprobs": True}
LATER = {"input_ids": tokens(rng, 9), "max_new_tokens": 8, "logprobs": True}


def started() -> list[dict[str, Any]]:
    """A second turn without log-probabilities of its prompt, and with them from several positions
    on."""
    asked: dict[str, Any] = {"input_ids": AGAIN["input_ids"], "max_new_tokens": 2}
    wanted = {"logprobs": True}
    starts = ({} if at is None else {**wanted, "logprob_start_len": at} for at in STARTS)
    return [{**asked, **start} for start in starts]


# Each begins on an emptied server with the same turn. A request goes on from the one of that name
# or place in its own story, or in an earlier one's.
STORIES: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "starts": [(TURN, None), *((one, 0) for one in started())],
    "plain": [(TURN, None), (AGAIN, 0), (AGAIN, 0), (LATER, 1)],
    "exact": [
        *((TURN, None), (AGAIN, 0), (AGAIN | EXACTLY, 0), (AGAIN, 0)),
        *((LATER | EXACTLY, 1), (LATER, 1)),
    ],
    "done": [(TURN, None), (AGAIN | DONE, 0), (AGAIN, 0), (LATER, 1)],
    "measured": [
        (TURN, None),
        # The answer to `AGAIN` is the end of this prompt.
        (
            {
                "input_ids": [], "max_new_tokens": 0, "logprobs": True,
                "logprob_start_len": FIRST + ANSWER + SECOND - 1, **MEASURED,
            },
            ("plain", 1),
        ),
        (AGAIN, 0),
    ],
    "beside less": [(TURN, None), (TURN | LESS, None), (AGAIN, 0), (AGAIN | LESS, 1)],
    "behind less": [(TURN | LESS, None), (TURN, None), (AGAIN, 1)],
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """The answers of each story, and the state behind them."""
    rounds: list[Any] = []
    begin: dict[str, int] = {}
    for name, story in STORIES.items():
        rounds.append({"flush": True})
        begin[name] = len(rounds)
        for request, behind in story:
            if behind is not None:
                of, at = behind if isinstance(behind, tuple) else (name, behind)
                request = {**request, "continues": [begin[of] + at, 0]}
            rounds.append([request])
    out = run_engine(tmp_path_factory.mktemp("told"), ENGINE, rounds, COMPRESSING)
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    answers = {
        name: [one for (one,) in out["rounds"][at : at + len(STORIES[name])]]
        for name, at in begin.items()
    }
    return answers, out["state"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory, told) -> list[dict[str, Any]]:
    """The answers of an engine that keeps everything, to the requests from several positions on and
    to those that were to be answered exactly."""
    mine = told[0]["exact"]
    rounds = [[TURN], *([{**one, "continues": [0, 0]}] for one in started()[1:])]
    asked = {"max_new_tokens": 8, "logprobs": True}
    rounds += [[{"input_ids": mine[at]["prompt"], **asked}] for at in (2, 4)]
    out = run_engine(tmp_path_factory.mktemp("exact"), ENGINE, rounds, RULE_ENV)
    return [one for (one,) in out["rounds"][1:]]


def prompt_logprobs(answers: list[dict[str, Any]]) -> list[list[float]]:
    # The first of them has nothing before it that was asked for.
    return [answer["prompt_logprobs"][1:] for answer in answers]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["output_ids"] == theirs["output_ids"]
    assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


def test_prompt_logprobs_behind_a_compressed_turn_are_exact(told, exact):
    _, plain, *answers = told[0]["starts"]
    assert plain["cached_tokens"] == HELD
    theirs = prompt_logprobs(exact[: len(answers)])
    assert [len(one) for one in theirs] == [985, 975, 485, 79, 49]
    for ours, other in zip(prompt_logprobs(answers), theirs, strict=True):
        assert ours == pytest.approx(other, abs=1e-4)
    # The cache may give what is before a position: here, of what it has, the sink. Nothing is
    # computed again without them, before the first token, and in the sink.
    details = [answer["cached_tokens_details"] for answer in (plain, *answers)]
    assert details[:3] == [{"device": HELD, "host": 0}, None, {"device": 10, "host": 0}]
    for start, found in zip(STARTS[3:], details[3:], strict=True):
        assert found == {"device": SINK, "host": 0, "kvtier_recomputed": start - SINK}


def test_a_tier_brings_back_what_each_session_keeps_and_no_prompt_logprobs(tmp_path, told, exact):
    """The server is empty, and the tier has the record of a turn that ends where is asked."""
    rounds: list[Any] = [[TURN], [TURN | LESS], {"flush": True}]
    rounds += [[{**AGAIN, "continues": [0, 0]}], [{**AGAIN, **LESS, "continues": [1, 0]}]]
    rounds += [{"flush": True}, [{**started()[4], "continues": [0, 0]}]]
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env = {**COMPRESSING, "KVTIER_TIER": tier.address, "KVTIER_TIER_SPAN_TOKENS": "16"}
        out = run_engine(tmp_path, ENGINE, rounds, env)
    *_, (plain,), (less,), _, (answer,) = out["rounds"]
    assert answer["prompt_logprobs"][1:] == pytest.approx(prompt_logprobs(exact)[3], abs=1e-4)
    assert_same(plain, told[0]["plain"][1])
    assert_same(less, told[0]["beside less"][3])
    assert less["cached_tokens_details"]["storage"] > 0
    assert out["state"]["tier"].get("records_refused", 0) == 0


def test_an_exact_answer_is_the_models_and_leaves_the_session_as_it_was(told, exact):
    """The session is asked about twice, once more with exactness, and then as before; a turn goes
    on."""
    mine, plain = told[0]["exact"], told[0]["plain"]
    for at, model in ((2, exact[-2]), (4, exact[-1])):
        assert_same(mine[at], model)
    # It tells something: what is compressed says other things, and says them as before.
    assert mine[1]["logprobs"] != pytest.approx(exact[-2]["logprobs"], abs=1e-3)
    for ours, theirs in ((mine[1], plain[1]), (mine[3], plain[2]), (mine[5], plain[3])):
        assert_same(ours, theirs)
        assert ours["cached_tokens"] == theirs["cached_tokens"]
    assert mine[2]["cached_tokens_details"]["kvtier_recomputed"] > FIRST - SINK - 1


def test_a_request_that_measures_is_told_what_this_server_would_say(told):
    """The log-probabilities of an answer as a prompt are those with which it was generated, over a
    compressed turn; and the session goes on as if nobody had asked."""
    _, measured, again = told[0]["measured"]
    plain = told[0]["plain"][1]
    assert measured["prompt_logprobs"][1:] == pytest.approx(plain["logprobs"], abs=1e-4)
    assert measured["cached_tokens"] == again["cached_tokens"] == plain["cached_tokens"] == HELD
    assert_same(again, plain)


def test_a_session_that_is_done_goes_on_as_it_was_while_there_is_room(told):
    for ours, theirs in zip(told[0]["done"][1:], told[0]["plain"][1:], strict=True):
        assert_same(ours, theirs)
        assert ours["cached_tokens"] == theirs["cached_tokens"]


def test_a_session_that_keeps_less_changes_nothing_of_others_with_the_same_prompt(told):
    answers, state = told
    alone = answers["plain"][1]
    for story in ("beside less", "behind less"):
        other = answers[story][2]
        assert_same(other, alone)
        assert other["cached_tokens"] == HELD
    # It goes on with its own, and what it keeps says other things.
    mine = answers["beside less"][3]
    assert mine["cached_tokens"] == HELD
    assert mine["logprobs"] != pytest.approx(alone["logprobs"], abs=1e-3)
    turns = [turn for turn in state["retention"]["recent"] if turn["prompt_tokens"] == FIRST]
    kept = {turn["reason"]: turn["retention"] for turn in turns}
    assert kept["asked"] < 0.5 * kept["share"]
