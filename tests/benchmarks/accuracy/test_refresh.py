"""The refresh benchmark's arithmetic, and its bad input."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.refresh import ARMS, main, make_rows, make_table
from benchmarks.common.recall_engine import Asked
from kvtier.bench.schema import TierReading


def asked(kind: str, recalls: tuple[float, ...], tier: TierReading | None = None) -> Asked:
    return Asked(
        kind=kind, context=0, recalls=recalls, kv_bytes=1 << 20, turn_s=1.0, retained=None,
        tier=tier,
    )  # fmt: skip


def test_a_row_counts_what_its_own_kind_refreshed() -> None:
    full = [asked("a", (1.0, 0.5)), asked("b", (1.0,))]
    served = [
        asked("a", (1.0, 0.0), TierReading(refreshed_turns=2, refresh_s=0.5)),
        asked("b", (0.5,), TierReading(refreshed_turns=3, refresh_s=0.6)),
    ]
    a, b = make_rows(0.25, "chosen again", full, served)
    assert (a.recall, a.full_recall, a.questions, a.refreshed) == (0.5, 0.75, 2, 2)
    assert (b.recall, b.refreshed) == (0.5, 1)
    assert a.refresh_ms == pytest.approx(250)
    assert b.refresh_ms == pytest.approx(100)
    assert make_table([a, b]).row_count == 2


def test_without_a_tier_nothing_was_refreshed() -> None:
    (row,) = make_rows(0.1, "chosen beforehand", [asked("a", (1.0,))], [asked("a", (0.5,))])
    assert (row.refreshed, row.refresh_ms) == (0, 0.0)


def test_every_arm_but_the_first_refreshes() -> None:
    first, *others = ARMS.values()
    assert first == {}
    assert all(settings["REFRESH"] == "turn" for settings in others)


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--shares", "0"], "--shares"), (["--contexts", "0"], "--contexts")],
)
def test_bad_input_is_refused_by_name(flags, named, capsys) -> None:
    assert main(flags) == 2
    assert named in capsys.readouterr().err
