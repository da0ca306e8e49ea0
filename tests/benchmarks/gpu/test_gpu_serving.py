"""The serving benchmark's plan: all policies get the same load, and differ in what is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.remote import WorkerError
from benchmarks.gpu import serving, serving_plan
from benchmarks.gpu.serving_worker import Load, hold
from kvtier.bench.engine import Answer, Arrival
from kvtier.heads.profile import load_profile
from kvtier.pool_sizing import slot_bytes

FLAGS = [
    *("--sessions", "3", "--context", "1000", "--turns", "4", "--turn-tokens", "20"),
    *("--answer-tokens", "10", "--chunk", "500"),
]
# The tokens of all turns.
TURNS_TOKENS = 4 * (20 + 10)


def test_policies_get_the_same_load_and_room_and_differ_in_attention_and_cache(
    tmp_path: Path,
) -> None:
    options = serving.BENCHMARK.parse([*FLAGS, "--stock-attention", "fa3"])
    found = {
        policy: serving_plan.make_plan(options, policy, tmp_path) for policy in options.policies
    }
    assert tuple(found) == serving_plan.POLICIES
    assert len({plan.load for plan in found.values()}) == 1
    rooms = {plan.engine["max_total_tokens"] for plan in found.values()}
    assert rooms == {3 * (1000 + TURNS_TOKENS) + 500 + serving_plan.SLACK_TOKENS}
    engines = {policy: dict(plan.engine) for policy, plan in found.items()}
    own = {
        policy: (engine.pop("attention_backend"), engine.pop("radix_cache_backend", None))
        for policy, engine in engines.items()
    }
    assert own == {
        "stock": ("fa3", None), "full": ("kvtier", None),
        "kvtier": ("kvtier", "kvtier"), "adaptive": ("kvtier", "kvtier"),
    }  # fmt: skip
    assert all(engine == engines["stock"] for engine in engines.values())


def test_a_policys_engine_gets_its_own_settings_and_no_stray_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_STRAY", "1")
    options = serving.BENCHMARK.parse(FLAGS)

    def settings(policy: str) -> dict[str, str]:
        """Return the settings that the engine is told, and not what they are anyway."""
        found = serving_plan.environment(options, policy, tmp_path)
        assert "KVTIER_STRAY" not in found
        usual = serving_plan.Settings().to_env()
        return {
            name: value
            for name, value in found.items()
            if name.startswith("KVTIER_") and usual.get(name) != value
        }

    everything = {"KVTIER_DATA_DIR": str(tmp_path / "data"), "KVTIER_HEAD_BUDGETS": "equal"}
    assert settings("stock") == settings("full") == everything
    assert settings("kvtier") == {
        **everything,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "head_profile.json"),
    }
    assert settings("adaptive") == {
        **everything,
        "KVTIER_HEAD_BUDGETS": "adaptive",
        "KVTIER_RETENTION": "0.25",
        "KVTIER_SCORER": "reconstruction",
        "KVTIER_SCORER_FILE": str(tmp_path / "token_worth.npz"),
    }


@pytest.mark.parametrize("policy", serving_plan.COMPRESSING)
def test_the_same_bytes_hold_more_sessions_of_policies_that_compress(tmp_path, policy):
    options = serving.BENCHMARK.parse(["--dry", "--sessions", "8"])
    # A dry run changes defaults and no flag that was given.
    assert (options.sessions, options.context) == (8, serving.DRY["context"])
    serving_plan.write_model(options, tmp_path)
    pool = serving_plan.equal_pool(options, policy, tmp_path)
    assert int(pool.sessions) >= 1.5 * 8
    shape = load_profile(tmp_path / "head_profile.json").shape
    assert pool.slots * slot_bytes(shape, 4) <= serving_plan.full_bytes(options)
    plan = serving_plan.make_plan(options, policy, tmp_path, int(pool.sessions))
    assert plan.load.sessions == int(pool.sessions)
    assert plan.engine["max_total_tokens"] > pool.slots


def test_a_policy_that_fails_leaves_its_log_and_misses_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(
        module: str, files: list[Path], environment: dict[str, str], log: Path, limit_s: float
    ) -> None:
        log.write_text("no room for so much")
        raise WorkerError(log)

    monkeypatch.setattr(serving, "run_module", failing)
    options = serving.BENCHMARK.parse(FLAGS)
    found = serving.serve(options, "stock", tmp_path)
    assert found == {"failed": "no room for so much"}
    fine = {"integrity": []}
    policies = {"stock": found, "kvtier": fine}
    bars = {bar.name: bar.met for bar in serving.make_bars(policies, options)}
    assert bars["stock: the engine served"] is False
    assert bars["kvtier: the engine served"] is True
    broken = serving.make_bars({"kvtier": {"integrity": ["a slot has no owner"]}}, options)
    assert [bar.met for bar in broken] == [True, False]


class Listening:
    """An engine that remembers the lengths of prompts, and answers as much as it is asked for."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def flush(self) -> None:
        self.prompts.clear()

    def replay(self, arrivals: list[Arrival], tell: Any) -> list[Answer]:
        self.prompts.append([len(one.input_ids) for one in arrivals])
        return [
            Answer((5,) * one.output_tokens, len(one.input_ids) - 20, 1.0, 10.0) for one in arrivals
        ]


def load(sessions: int, turns: int) -> Load:
    return Load(
        sessions=sessions, context=100, turns=turns, turn_tokens=20, answer_tokens=10, chunk=50,
        ids=(1000, 4000), seed=1,
    )  # fmt: skip


def test_sessions_prefill_one_by_one_and_then_ask_together_on_top_of_what_was_said() -> None:
    engine = Listening()
    found = hold(engine, load(sessions=2, turns=3))
    assert engine.prompts == [[100], [100], [130, 130], [160, 160]]
    assert found["cached_tokens"] == 110
    assert (found["ttft_s"], found["tpot_s"]) == (0.001, 0.001)
