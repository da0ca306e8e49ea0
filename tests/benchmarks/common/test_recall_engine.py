"""Recall contexts in the engine, as far as that needs no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common import recall_engine as side
from benchmarks.common.recall_arguments import DEMO_MODEL
from benchmarks.common.recall_contexts import STANDING_OUT, make_context
from kvtier.bench.engine import Answer, EngineError
from kvtier.bench.schema import Occupancy, RetainedTurn

CONTEXT = make_context(STANDING_OUT, seed=0, index=0, context_tokens=512, questions=4)
NEWEST = RetainedTurn(
    prompt_tokens=512, kept_tokens=256, retention=0.5, reason="share", nll=None, quality=None
)


class OpenBook:
    """An engine that answers by searching the prompt and remembers what it is told to."""

    device = "fake"

    def __init__(self, forgetful: bool = False, compacts: bool = False) -> None:
        self.forgetful, self.compacts = forgetful, compacts
        self.cached: tuple[int, ...] = ()

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
    ) -> Answer:
        prompt = tuple(input_ids)
        hit = 0 if self.forgetful or prompt[: len(self.cached)] != self.cached else len(self.cached)
        output = self._say(prompt, stop_ids[0])[:max_new_tokens]
        self.cached = self.cached or prompt
        return Answer(output, hit, 1.0, 1.0, ())

    def _say(self, prompt: tuple[int, ...], stop_id: int) -> tuple[int, ...]:
        name = prompt[-3:-1]
        at = next((i for i in range(len(prompt) - 3) if prompt[i : i + 2] == name), 0)
        return (*prompt[at : at + 10], stop_id)

    def occupancy(self) -> Occupancy:
        used = 100 * len(self.cached)
        return Occupancy(
            kv_used_bytes=used,
            kv_peak_bytes=used,
            kv_capacity_bytes=1 << 20,
            compacted_turns=1 if self.cached and self.compacts else 0,
            newest=NEWEST,
        )

    def flush(self) -> None:
        self.cached = ()

    def close(self) -> None: ...


def test_right_answers_from_the_cache_score_one_and_bytes_are_the_contexts() -> None:
    asked = side.ask_all(OpenBook(), CONTEXT)
    assert asked.recalls == (1.0,) * len(CONTEXT.questions)
    assert asked.kv_bytes == 100 * len(CONTEXT.context_ids)
    assert asked.turn_s > 0


@pytest.mark.parametrize("compacts", [True, False])
def test_what_a_context_kept_is_reported_if_this_very_turn_was_compacted(compacts: bool) -> None:
    retained = side.ask_all(OpenBook(compacts=compacts), CONTEXT).retained
    assert retained == (NEWEST if compacts else None)


def test_an_answer_from_recomputed_kv_does_not_count() -> None:
    with pytest.raises(EngineError, match="0 of 512 context tokens"):
        side.ask_all(OpenBook(forgetful=True), CONTEXT)


def test_the_worker_gets_the_settings_and_no_stray_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = side.make_plan(DEMO_MODEL, [CONTEXT], DEMO_MODEL / side.PROFILE_FILE)
    monkeypatch.setenv("KVTIER_STRAY", "1")
    environment = side.worker_environment(
        tmp_path, plan, {"RETENTION": "0.25", "LOCALITY_SINK_TOKENS": "8"}
    )
    assert environment["KVTIER_RETENTION"] == "0.25"
    assert environment["KVTIER_LOCALITY_SINK_TOKENS"] == "8"
    assert "KVTIER_STRAY" not in environment
    assert Path(environment["KVTIER_CONFIG"]).read_text() == ""
    assert environment["KVTIER_HEAD_PROFILE"] == str(tmp_path / side.PROFILE_FILE)


def test_the_plan_holds_the_context_and_every_question() -> None:
    plan = side.make_plan(DEMO_MODEL, [CONTEXT], DEMO_MODEL / side.PROFILE_FILE)
    asked = sum(len(q.prompt_ids) + len(q.answer_ids) + 1 for q in CONTEXT.questions)
    assert plan.pools.max_total_tokens >= len(CONTEXT.context_ids) + asked
    assert plan.engine_args["attention_backend"] == "kvtier"
    assert plan.engine_args["radix_cache_backend"] == "kvtier"
