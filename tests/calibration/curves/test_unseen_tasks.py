"""Quality targets on tasks that a curve was not fitted to."""

from __future__ import annotations

import pytest

from kvtier.calibration.curves import Curve, Measurement, fit_curve, unseen_tasks

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
EASY, HARD = Curve(0.0, 0.05, 1.0, 2.0, 2.0), Curve(0.0, 0.2, 1.0, 2.0, 2.0)


def of_task(task: str, curve: Curve, contexts: range) -> list[Measurement]:
    return [
        Measurement(2.0, share, curve.quality(share, 2.0), context, task)
        for context in contexts
        for share in SHARES
    ]


def test_tasks_alike_get_the_quality_that_is_asked_for() -> None:
    found = unseen_tasks([*of_task("a", HARD, range(2)), *of_task("b", HARD, range(2, 4))], 0.95)
    assert [task.task for task in found] == ["a", "b"]
    for task in found:
        assert task.quality == pytest.approx(0.95, abs=0.01)
        assert task.share == pytest.approx(HARD.retention(0.95, 2.0), abs=0.01)


def test_a_task_is_judged_by_the_curve_of_the_others() -> None:
    measurements = [*of_task("easy", EASY, range(2)), *of_task("hard", HARD, range(2, 4))]
    easy, hard = unseen_tasks(measurements, 0.95)
    # Each task gets the share that the other one needs.
    assert easy.share == pytest.approx(HARD.retention(0.95, 2.0), abs=0.01)
    assert hard.share == pytest.approx(EASY.retention(0.95, 2.0), abs=0.01)
    assert easy.quality > 0.99
    assert hard.quality == pytest.approx(HARD.quality(hard.share, 2.0), abs=0.05)
    assert hard.quality < 0.8
    # A curve that has seen both knows better.
    assert fit_curve(measurements).retention(0.95, 2.0) > hard.share


def test_where_the_others_are_too_few_to_fit_nothing_is_said() -> None:
    assert unseen_tasks(of_task("alone", HARD, range(3)), 0.95) == []
    few = [Measurement(2.0, 0.5, 0.9, 9, "few")]
    found = unseen_tasks([*of_task("many", HARD, range(3)), *few], 0.95)
    assert [task.task for task in found] == ["few"]


def test_equally_many_contexts_are_not_asked_of_every_task() -> None:
    found = unseen_tasks([*of_task("a", HARD, range(1)), *of_task("b", HARD, range(1, 6))], 0.9)
    assert [round(task.quality, 2) for task in found] == [0.9, 0.9]
