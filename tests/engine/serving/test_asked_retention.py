"""A session that asks to keep less does, and nobody else notices."""

from __future__ import annotations

import random

import pytest
from compressing import RULE_ENV
from engine_process import DEMO_MODEL, run_engine

pytestmark = pytest.mark.engine

ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 20_000,
    "attention_backend": "kvtier",
    "radix_cache_backend": "kvtier",
}
COMPRESSING = {
    **RULE_ENV,
    "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    "KVTIER_RETENTION": "0.5",
}
LESS = {"custom_params": {"kvtier": {"retention": 0.1}}}
FIRST, SECOND, ANSWER = 900, 60, 6


def test_a_session_that_keeps_less_changes_nothing_of_others_with_the_same_prompt(tmp_path):
    rng = random.Random(5)
    first, second = ([rng.randrange(6, 384) for _ in range(n)] for n in (FIRST, SECOND))
    turn = {"input_ids": first, "max_new_tokens": ANSWER}
    later = {"input_ids": second, "max_new_tokens": ANSWER, "logprobs": True}
    plain, after_plain = turn, {"continues": [0, 0], **later}
    less, after_less = {**turn, **LESS}, {"continues": [1, 0], **later, **LESS}
    found = {}
    for name, rounds in {
        "alone": [[plain], [], [after_plain]],
        "beside": [[plain], [less], [after_plain], [after_less]],
        "behind": [[less], [plain], [{**after_plain, "continues": [1, 0]}]],
    }.items():
        (tmp_path / name).mkdir()
        out = run_engine(tmp_path / name, ENGINE, rounds, COMPRESSING)
        assert out["state"]["integrity"] == []
        found[name] = out
    alone = found["alone"]["rounds"][2][0]
    for name in ("beside", "behind"):
        other = found[name]["rounds"][2][0]
        assert other["output_ids"] == alone["output_ids"]
        assert other["cached_tokens"] == alone["cached_tokens"] == FIRST + ANSWER - 1
        assert other["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
    # It goes on with its own, and what it keeps says other things.
    mine = found["beside"]["rounds"][3][0]
    assert mine["cached_tokens"] == FIRST + ANSWER - 1
    assert mine["logprobs"] != pytest.approx(alone["logprobs"], abs=1e-3)
    assert found["beside"]["state"]["retention"]["reasons"]["asked"] >= 1
    kept = {
        one["reason"]: one["retention"]
        for one in found["beside"]["state"]["retention"]["recent"][:2]
    }
    assert kept["asked"] < 0.5 * kept["share"]
