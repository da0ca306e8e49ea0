"""The records of a long benchmark on disk, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.real.records import Records
from benchmarks.real.tables import kept_worth
from kvtier.errors import UsageError

SETTINGS = {"model": "tiny", "seed": 0}


@pytest.mark.parametrize("whole", [0, 3])
def test_records_are_there_for_the_next_run_though_one_was_cut_off(
    tmp_path: Path, whole: int
) -> None:
    records = Records(tmp_path, SETTINGS)
    for index in range(whole):
        records.add((index, "ff"), {"loss": float(index)})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"key": [9, "ff"], "fou')
    again = Records(tmp_path, SETTINGS)
    assert (9, "ff") not in again
    again.add((9, "ff"), {"loss": 9.0})
    last = Records(tmp_path, SETTINGS)
    assert [last[index, "ff"]["loss"] for index in (*range(whole), 9)] == [*range(whole), 9]


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    Records(tmp_path, SETTINGS)
    with pytest.raises(UsageError, match=r"--state.*seed 0.*'seed': 1"):
        Records(tmp_path, {**SETTINGS, "seed": 1})


def test_worth_is_one_with_everything_and_none_with_nothing() -> None:
    rng = np.random.default_rng(0)
    full = rng.random((3, 4))
    none = full + 1 + rng.random((3, 4))
    assert kept_worth(full, full, none) == (1, 1, 1)
    assert kept_worth(none, full, none) == (0, 0, 0)
    half = kept_worth((full + none) / 2, full, none)
    assert half == pytest.approx((0.5, 0.5, 0.5))
    noisy = kept_worth(full + rng.normal(0.2, 0.1, full.shape), full, none)
    assert noisy.low < noisy.mean < noisy.high < 1
