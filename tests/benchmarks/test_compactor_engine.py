"""kvtier's side of the Compactor comparison, as far as it needs no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import compactor_engine as side
from benchmarks.compactor_contexts import STANDING_OUT, RecallContext, make_context
from kvtier.bench.engine import Answer, EngineError
from kvtier.bench.schema import Occupancy
from kvtier.config import Settings
from kvtier.heads.profile import full_profile, load_profile
from kvtier.retention.pools import slot_bytes

CONTEXT = make_context(STANDING_OUT, seed=0, index=0, context_tokens=512, questions=4)
PROFILE = load_profile(side.DEMO_MODEL / side.PROFILE_FILE)


class OpenBook:
    """An engine that answers by searching the prompt and remembers what it is told to."""

    device = "fake"

    def __init__(self, forgetful: bool = False) -> None:
        self.forgetful = forgetful
        self.cached: tuple[int, ...] = ()

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, stop_id: int) -> Answer:
        prompt = tuple(input_ids)
        hit = 0 if self.forgetful or prompt[: len(self.cached)] != self.cached else len(self.cached)
        output = self._say(prompt, stop_id)[:max_new_tokens]
        self.cached = self.cached or prompt
        return Answer(output, hit, 1.0, 1.0, ())

    def _say(self, prompt: tuple[int, ...], stop_id: int) -> tuple[int, ...]:
        name = prompt[-3:-1]
        at = next((i for i in range(len(prompt) - 3) if prompt[i : i + 2] == name), 0)
        return (*prompt[at : at + 10], stop_id)

    def occupancy(self) -> Occupancy:
        used = 100 * len(self.cached)
        return Occupancy(kv_used_bytes=used, kv_peak_bytes=used, kv_capacity_bytes=1 << 20)

    def flush(self) -> None:
        self.cached = ()

    def close(self) -> None: ...


def job(contexts: Sequence[RecallContext], tmp_path: Path) -> side.Job:
    plan = side.make_plan(side.DEMO_MODEL, contexts, side.DEMO_MODEL / side.PROFILE_FILE)
    return side.Job(plan=plan, contexts=tmp_path / "contexts.json", method="kvtier", kept_share=1)


def test_right_answers_from_the_cache_score_one_and_bytes_are_the_contexts(tmp_path: Path) -> None:
    record = side.ask_all(OpenBook(), CONTEXT, job([CONTEXT], tmp_path))
    assert record.recalls == (1.0,) * len(CONTEXT.questions)
    assert record.kv_bytes == 100 * len(CONTEXT.context_ids)


def test_an_answer_from_recomputed_kv_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="0 of 512 context tokens"):
        side.ask_all(OpenBook(forgetful=True), CONTEXT, job([CONTEXT], tmp_path))


@given(st.floats(0.01, 1.0), st.integers(1024, 1 << 17))
def test_retention_of_all_heads_is_the_share(share: float, tokens: int) -> None:
    alike = full_profile(PROFILE.shape)
    assert side.retention_for(1, alike, tokens) == 1
    kept = side.retention_for(share, alike, tokens) * slot_bytes(alike, 4, scored=True).ca
    if share < 1:
        assert kept == pytest.approx(max(share, 1 / tokens) * slot_bytes(alike, 4).full, rel=0.02)
        assert kept <= share * slot_bytes(alike, 4).full * (1 + 1e-9) or share < 2 / tokens


@given(st.floats(0.01, 1.0), st.integers(1024, 1 << 17))
def test_retention_under_a_profile_keeps_the_bytes_asked_for(share: float, tokens: int) -> None:
    retention = side.retention_for(share, PROFILE, tokens)
    per_slot, exact = slot_bytes(PROFILE, 4, scored=True), slot_bytes(PROFILE, 4)
    settings = Settings()
    held = settings.sink_tokens + settings.recent_tokens + 1
    kept = per_slot.ca * retention * tokens + per_slot.locality * held
    wanted = share * exact.full * tokens
    if 1 / tokens < retention < 1:
        assert kept == pytest.approx(wanted)
    elif retention == 1 and share < 1:
        assert kept <= wanted * (1 + 1e-9)


def test_the_worker_gets_the_retention_and_no_stray_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = job([CONTEXT], tmp_path).plan
    monkeypatch.setenv("KVTIER_STRAY", "1")
    environment = side.worker_environment(tmp_path, plan, "all", 0.25)
    assert float(environment[side.RETENTION_VARIABLE]) == 0.25
    assert "KVTIER_STRAY" not in environment
    assert (environment["KVTIER_SINK_TOKENS"], environment["KVTIER_RECENT_TOKENS"]) == ("8", "4")
    assert Path(environment["KVTIER_CONFIG"]).read_text() == ""
    assert environment["KVTIER_HEAD_PROFILE"] == str(tmp_path / side.PROFILE_FILE)


def test_the_plan_holds_the_context_and_every_question(tmp_path: Path) -> None:
    plan = job([CONTEXT], tmp_path).plan
    asked = sum(len(q.prompt_ids) + len(q.answer_ids) + 1 for q in CONTEXT.questions)
    assert plan.pools.max_total_tokens >= len(CONTEXT.context_ids) + asked
    assert plan.engine_args["attention_backend"] == "kvtier"
    assert plan.engine_args["radix_cache_backend"] == "kvtier"
