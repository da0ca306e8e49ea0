"""The log of what contexts kept: metrics that fail cost metrics, and nothing else."""

from __future__ import annotations

from kvtier.retention.shares import Choice, FixedShare, Turn
from kvtier_sglang.compression.retention import Retention


class Metrics:
    def __init__(self, works: bool) -> None:
        self.works, self.turns = works, []

    def turn(self, turn: Turn, choice: Choice) -> None:
        self.turns.append((turn, choice))
        if not self.works:
            raise OSError("No space left on device")


def test_every_turn_is_told_to_the_metrics():
    metrics = Metrics(works=True)
    retention = Retention(FixedShare(0.5), metrics=metrics)
    turns = [Turn(1000, 600), Turn(800, 400)]
    kept = [retention.choose(turn).kept_tokens for turn in turns]
    assert [(turn, choice.kept_tokens) for turn, choice in metrics.turns] == list(
        zip(turns, kept, strict=True)
    )


def test_metrics_that_fail_are_off_and_the_turn_is_decided_all_the_same(caplog):
    metrics = Metrics(works=False)
    retention = Retention(FixedShare(0.5), metrics=metrics)
    assert [retention.choose(Turn(1000, 600)).kept_tokens for _ in range(3)] == [112] * 3
    assert len(metrics.turns) == 1
    assert retention.report()["reasons"] == {"share": 3}
    assert caplog.text.count("metrics failed") == 1
