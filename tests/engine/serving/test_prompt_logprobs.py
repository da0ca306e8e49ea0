"""Log-probabilities of a prompt are those of the model, and an answer that was asked for exactly is
the model's, whatever is kept of the context."""

from __future__ import annotations

import random

import pytest
from compressing import RULE_ENV
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier

pytestmark = pytest.mark.engine

ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 20_000,
    "chunked_prefill_size": 512,
    "attention_backend": "kvtier",
    "radix_cache_backend": "kvtier",
}
COMPRESSING = {
    **RULE_ENV,
    "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    "KVTIER_RETENTION": "0.3",
}
FIRST, ANSWER, SECOND = 900, 6, 80
STARTS = (None, 0, 10, 500, FIRST + ANSWER, FIRST + ANSWER + 30)
SINK = int(RULE_ENV["KVTIER_LOCALITY_SINK_TOKENS"])


def rounds() -> list[list[dict]]:
    """A turn; a second one without log-probabilities; and the same with them from several
    positions on: in the sink, in what was dropped, and in the second turn's prompt."""
    rng = random.Random(3)
    first, second = ([rng.randrange(6, 384) for _ in range(n)] for n in (FIRST, SECOND))
    plan = [[{"input_ids": first, "max_new_tokens": ANSWER}]]
    for start in STARTS:
        request = {"continues": [0, 0], "input_ids": second, "max_new_tokens": 2}
        if start is not None:
            request |= {"logprobs": True, "logprob_start_len": start}
        plan.append([request])
    return plan


def prompt_logprobs(answers: list[list[dict]]) -> list[list[float]]:
    # The first of them has nothing before it that was asked for.
    return [answer["prompt_logprobs"][1:] for (answer,) in answers[2:]]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Return what an engine that keeps everything says."""
    out = run_engine(tmp_path_factory.mktemp("exact"), ENGINE, rounds(), RULE_ENV)
    found = prompt_logprobs(out["rounds"])
    assert [len(one) for one in found] == [985, 975, 485, 79, 49]
    return found


def test_prompt_logprobs_behind_a_compressed_turn_are_exact(tmp_path, exact):
    out = run_engine(tmp_path, ENGINE, rounds(), COMPRESSING)
    assert out["rounds"][1][0]["cached_tokens"] == FIRST + ANSWER - 1
    assert out["state"]["compacted_tokens"] > 0
    assert out["state"]["integrity"] == []
    for ours, theirs in zip(prompt_logprobs(out["rounds"]), exact, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)

    # The cache may give what is before a position: here, of what it has, the sink.
    details = [answer["cached_tokens_details"] for (answer,) in out["rounds"][1:]]
    for start, found in zip(STARTS[3:], details[3:], strict=True):
        assert found == {"device": SINK, "host": 0, "kvtier_recomputed": start - SINK}
    # Nothing is computed again without them, before the first token, and in the sink.
    assert details[:3] == [
        {"device": FIRST + ANSWER - 1, "host": 0},
        None,
        {"device": 10, "host": 0},
    ]


def test_prompt_logprobs_are_not_computed_behind_what_a_tier_restores(tmp_path, exact):
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env = {**COMPRESSING, "KVTIER_TIER": tier.address, "KVTIER_TIER_SPAN_TOKENS": "16"}
        plan = rounds()
        first = run_engine(tmp_path, ENGINE, plan[:1], env)["rounds"][0][0]
        before = [*first["prompt"], *first["output_ids"]]
        # The first one finds an empty server, and the record of a turn that ends where it asks.
        (request,) = plan[-2]
        request["input_ids"] = [*before, *request["input_ids"]]
        del request["continues"]
        answer = run_engine(tmp_path, ENGINE, [[request]], env)["rounds"][0][0]
    assert answer["prompt_logprobs"][1:] == pytest.approx(exact[-2], abs=1e-4)


EXACTLY = {"custom_params": {"kvtier": {"exact": True}}}


def test_an_exact_answer_is_the_models_and_leaves_the_session_as_it_was(tmp_path):
    """The session is asked about twice, once more with exactness, and then as before; a turn goes
    on."""
    rng = random.Random(3)
    first, second, third = ([rng.randrange(6, 384) for _ in range(n)] for n in (FIRST, SECOND, 9))
    again = {"continues": [0, 0], "input_ids": second, "max_new_tokens": 8, "logprobs": True}
    turn = {"input_ids": first, "max_new_tokens": ANSWER}
    later = {"continues": [1, 0], "input_ids": third, "max_new_tokens": 8, "logprobs": True}
    plans = {
        "with": [[turn], [again], [again | EXACTLY], [again], [later | EXACTLY], [later]],
        "without": [[turn], [again], [again], [later]],
    }
    found = {}
    for name, plan in plans.items():
        (tmp_path / name).mkdir()
        out = run_engine(tmp_path / name, ENGINE, plan, COMPRESSING)
        assert out["state"]["integrity"] == []
        assert out["state"]["compacted_tokens"] > 0
        found[name] = [one for (one,) in out["rounds"]]
    mine, plain = found["with"], found["without"]
    alone = [
        [{"input_ids": one["prompt"], "max_new_tokens": 8, "logprobs": True}]
        for one in (mine[2], mine[4])
    ]
    exact = [one for (one,) in run_engine(tmp_path, ENGINE, alone, RULE_ENV)["rounds"]]
    for ours, theirs in ((mine[2], exact[0]), (mine[4], exact[1])):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
    # It tells something: what is compressed says other things, and says them as before.
    assert mine[1]["logprobs"] != pytest.approx(exact[0]["logprobs"], abs=1e-3)
    for ours, theirs in ((mine[1], plain[1]), (mine[3], plain[2]), (mine[5], plain[3])):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
        assert ours["cached_tokens"] == theirs["cached_tokens"]
    assert mine[2]["cached_tokens_details"]["kvtier_recomputed"] > FIRST - SINK - 1


MEASURED = {"custom_params": {"kvtier": {"measure": True}}}


def test_a_request_that_measures_is_told_what_this_server_would_say(tmp_path):
    """The log-probabilities of an answer as a prompt are those with which it was generated, over a
    compressed turn; and the session goes on as if nobody had asked."""
    rng = random.Random(3)
    first, second = ([rng.randrange(6, 384) for _ in range(n)] for n in (FIRST, SECOND))
    turn = {"input_ids": first, "max_new_tokens": ANSWER}
    later = {"continues": [0, 0], "input_ids": second, "max_new_tokens": 8, "logprobs": True}
    (tmp_path / "plain").mkdir()
    plain = run_engine(tmp_path / "plain", ENGINE, [[turn], [later]], COMPRESSING)
    told = plain["rounds"][1][0]
    measuring = {
        "continues": [0, 0], "input_ids": [*second, *told["output_ids"]], "max_new_tokens": 0,
        "logprobs": True, "logprob_start_len": FIRST + ANSWER + SECOND - 1, **MEASURED,
    }  # fmt: skip
    out = run_engine(tmp_path, ENGINE, [[turn], [measuring], [later]], COMPRESSING)
    assert out["state"]["integrity"] == []
    _, measured, again = [one for (one,) in out["rounds"]]
    assert measured["prompt_logprobs"][1:] == pytest.approx(told["logprobs"], abs=1e-4)
    assert measured["cached_tokens"] == FIRST + ANSWER - 1
    for name in ("output_ids", "cached_tokens"):
        assert again[name] == told[name]
    assert again["logprobs"] == pytest.approx(told["logprobs"], abs=1e-4)
