"""The cost of a decoding step: what engines are started with, and what is said of several."""

from __future__ import annotations

import pytest

from benchmarks.cost import decoding


def test_policies_differ_in_attention_and_cache_alone() -> None:
    options = decoding.BENCHMARK.parse(["--len", "1k"])
    plans = {policy: decoding.make_plan(options, policy) for policy in decoding.POLICIES}
    assert len({plan.load for plan in plans.values()}) == 1
    chosen = {
        policy: (plan.engine.pop("attention_backend"), plan.engine.pop("radix_cache_backend", None))
        for policy, plan in plans.items()
    }
    assert chosen == {
        "stock": ("torch_native", None), "full": ("kvtier", None), "kvtier": ("kvtier", "kvtier"),
    }  # fmt: skip
    assert plans["stock"].engine == plans["full"].engine == plans["kvtier"].engine


def test_engines_of_all_policies_take_turns(monkeypatch, capsys) -> None:
    asked = []

    def serve(plan, folder, profile):
        cache = plan.engine.get("radix_cache_backend")
        policy = cache or {"torch_native": "stock"}.get(plan.engine["attention_backend"], "full")
        assert (profile is not None) == (policy == "kvtier")
        asked.append(policy)
        step_s = {"stock": 0.010, "full": 0.009, "kvtier": 0.008}[policy]
        return {"tpot_s": step_s * len(asked), "cached_tokens": 1000 + len(asked)}

    monkeypatch.setattr(decoding, "serve", serve)
    found = decoding.run(decoding.BENCHMARK.parse(["--rounds", "2"])).figures["policies"]
    assert asked == ["stock", "full", "kvtier", "kvtier", "full", "stock"]
    assert found["stock"]["tpot_ms"] == pytest.approx([10, 60])
    assert found["stock"]["median_tpot_ms"] == pytest.approx(35)
    assert found["kvtier"]["cached_tokens"] == 1003
    assert "stock / policy" in capsys.readouterr().out
