"""The benchmark of drafts: both engines are alike but for them, and what differs is told."""

from __future__ import annotations

from benchmarks.cost import drafts


def run(monkeypatch, answers):
    """Two rounds. answers: of an engine with drafts, or without."""

    def serve(plan, folder, profile):
        drafted = plan.engine.pop("speculative_algorithm", None) is not None
        plan.engine.pop("speculative_num_draft_tokens", None)
        plans.append((drafted, plan))
        return {
            "tpot_s": 0.004 if drafted else 0.010,
            "accept_length": 2.5 if drafted else 1.0,
            "first_answers": answers(drafted),
        }

    plans = []
    monkeypatch.setattr(drafts, "serve", serve)
    return drafts.run(drafts.BENCHMARK.parse(["--rounds", "2"])), plans


def test_engines_with_and_without_drafts_take_turns_and_are_alike_otherwise(monkeypatch):
    found, plans = run(monkeypatch, lambda drafted: [[1, 2], [3]])
    assert [drafted for drafted, _ in plans] == [False, True, True, False]
    assert all(plan == plans[0][1] for _, plan in plans)
    assert found.figures["tpot_ratio"] == 2.5
    assert found.figures["accept_length"] == 2.5
    assert all(bar.met for bar in found.bars)


def test_an_answer_that_drafts_change_is_counted(monkeypatch):
    found, _ = run(monkeypatch, lambda drafted: [[1, 2], [4 if drafted else 3]])
    assert found.figures["differing_answers"] == 2
    assert [bar.met for bar in found.bars] == [True, False]
