"""The selection benchmark's arithmetic: overhead is paired with the baseline of the same turn."""

from __future__ import annotations

import pytest

from benchmarks.selection import BASELINE, overheads


def test_overhead_is_the_median_of_paired_ratios() -> None:
    seconds = {BASELINE: [1.0, 2.0, 4.0], "half kept": [1.1, 2.0, 4.2]}
    found = overheads(seconds)
    assert found[BASELINE] == 0
    assert found["half kept"] == pytest.approx(0.05)
